"""Records become documents: whatever they hold, in every format, and what is broken is named by its line."""

import csv
import gzip
import io
import json
import random
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from data_helpers import one_sentence, patient
from hypothesis import given
from hypothesis import strategies as st

from mutations import mutated
from transformer_xl.data.corpora import pieces, records, unpacking
from transformer_xl.data.corpora.own_text import OwnText, prepare_own_text
from transformer_xl.data.corpora.selection import Inputs
from transformer_xl.data.corpora.unpacking import zstd
from transformer_xl.data.store import open_store
from transformer_xl.errors import DataError

WHOLE = OwnText(shares=(1.0,))
TEXTS = st.lists(st.text(max_size=60), min_size=1, max_size=20).filter(lambda texts: any(map(str.strip, texts)))
PLAIN = {"jsonl", "ndjson", "csv", "tsv"}
PACKED = {"": bytes, ".gz": gzip.compress, ".zst": zstd.compress}


def written(texts: list[str], form: str, *, end: str = "\n", escaped: bool = True) -> bytes:
    """A file of records that hold these texts in `text`, beside something else."""
    made = io.StringIO(newline="")
    if form in ("jsonl", "ndjson"):
        for number, text in enumerate(texts):
            made.write(json.dumps({"id": number, "text": text}, ensure_ascii=escaped) + end)
    elif form in ("csv", "tsv"):
        table = csv.writer(made, delimiter="," if form == "csv" else "\t", lineterminator=end)
        table.writerows([("id", "text"), *enumerate(texts)])
    else:
        import pyarrow
        from pyarrow import parquet

        file = io.BytesIO()
        parquet.write_table(pyarrow.table({"id": range(len(texts)), "text": texts}), file, row_group_size=7)
        return file.getvalue()
    return made.getvalue().encode("utf-8", "surrogatepass")


def documents(texts: list[str]) -> list[bytes]:
    kept = [text.encode() for text in texts if text.strip()]
    return [text if text.endswith(b"\n") else text + b"\n" for text in kept]


def stored(store) -> list[bytes]:
    split = store.split("train")
    data = store.tokenizer.decode_bytes(split.tokens)
    edges = [*split.document_starts.tolist(), len(data)]
    return [data[begin:end] for begin, end in pairwise(edges)]


@patient
@given(
    texts=TEXTS,
    form=st.sampled_from([*sorted(PLAIN), "parquet"]),
    packed=st.sampled_from(sorted(PACKED)),
    end=st.sampled_from(["\n", "\r\n"]),
    escaped=st.booleans(),
)
def test_every_record_is_a_document(tmp_path_factory, texts, form, packed, end, escaped):
    folder = tmp_path_factory.mktemp("records")
    # A table's cells lose nothing but what ends a line: csv has no way to say which it was.
    texts = [text.replace("\r", "") for text in texts] if form in ("csv", "tsv") else texts
    if not any(map(str.strip, texts)):
        texts = ["x"]
    packed = "" if form == "parquet" else packed
    path = folder / f"a.{form}{packed}"
    path.write_bytes(PACKED[packed](written(texts, form, end=end, escaped=escaped)))
    store = prepare_own_text([path], out=folder / "store", settings=WHOLE)
    assert stored(store) == documents(texts)
    assert store.manifest.origin["records"] == str(len(documents(texts)))
    assert store.manifest.documents == "a record's or a file's beginning"


@patient
@given(texts=TEXTS, size=st.integers(1, 40))
def test_small_pieces_give_the_same_documents(tmp_path_factory, texts, size):
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "a.jsonl").write_bytes(written(texts, "jsonl"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_BYTES", size)
        patch.setattr(pieces, "MARGIN_BYTES", 64)
        store = prepare_own_text([folder / "a.jsonl"], out=folder / "store", settings=WHOLE)
    assert stored(store) == documents(texts)


@patient
@given(
    texts=TEXTS,
    at=st.integers(0, 20),
    bad=st.sampled_from([b"{", b"[1, 2", b'{"text": "a"} x', b'{"text": "\xff"}', b"7", b'{"text": 7}']),
)
def test_a_broken_line_is_named_by_its_number(tmp_path_factory, texts, at, bad):
    folder = tmp_path_factory.mktemp("broken")
    lines = written(texts, "jsonl").splitlines()
    at = min(at, len(lines))
    lines.insert(at, bad)
    (folder / "a.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(DataError, match=rf"a\.jsonl, line {at + 1}\b"):
        prepare_own_text([folder / "a.jsonl"], out=folder / "store", settings=OwnText(inputs=Inputs(field=("text",))))
    assert not (folder / "store").exists()


@pytest.mark.parametrize("form", sorted(PLAIN))
def test_huge_lines(form, tmp_path, monkeypatch):
    path = tmp_path / f"a.{form}"
    text = "word " * 600_000
    path.write_bytes(written(["first one", text, "last one"], form))
    store = prepare_own_text([path], out=tmp_path / "store", settings=WHOLE)
    assert stored(store) == documents(["first one", text, "last one"])
    monkeypatch.setattr(records, "MOST_RECORD_BYTES", 1 << 21)
    with pytest.raises(DataError, match=r"line [23] has more than 2,097,152 bytes"):
        prepare_own_text([path], out=tmp_path / "other", settings=WHOLE)


def test_an_open_quote_does_not_swallow_the_file(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    monkeypatch.setattr(records, "MOST_RECORD_BYTES", 1 << 20)
    path.write_text('id,text\n1,"never closed\n' + "2,fine\n" * 3_000_000)
    tracemalloc.start()
    with pytest.raises(DataError, match="line 2 has more than 1,048,576 bytes"):
        prepare_own_text([path], out=tmp_path / "store", settings=WHOLE)
    assert tracemalloc.get_traced_memory()[1] < 30 << 20
    tracemalloc.stop()


def test_memory_does_not_grow_with_the_number_of_records(tmp_path):
    def peak(count: int) -> int:
        path = tmp_path / f"{count}.jsonl"
        path.write_bytes(b"".join(b'{"text": "record number %d of many"}\n' % n for n in range(count)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pieces, "PIECE_BYTES", 1 << 17)
            patch.setattr(unpacking, "BLOCK", 1 << 17)
            tracemalloc.start()
            prepare_own_text([path], out=tmp_path / "store", settings=WHOLE)
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        return most

    few, many = peak(20_000), peak(60_000)
    assert many < 1.2 * few


def test_fields_may_be_nested_several_and_in_lists(txl, tmp_path):
    rows = [
        {"a": {"b": "one"}, "title": "first", "turns": [{"say": "hi"}, {"say": "ho"}, {}]},
        {"a.b": "dotted", "title": None, "turns": []},
        {"a": {}, "turns": None},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    words = ("--field", "title", "--field", "a.b", "--field", "turns.say", "--split", "1", "--out", tmp_path / "store")
    code, out, err = txl("prepare", path, *words, "--json")
    assert code == 0, err
    assert json.loads(out)["origin"] == {"records": "2", "fields": "title, a.b, turns.say", "skipped": "1 record"}
    assert "a.jsonl: 1 without text in title or a.b or turns.say" in err
    assert stored(open_store(tmp_path / "store")) == [b"first\none\nhi\nho\n", b"dotted\n"]


@pytest.mark.parametrize(
    ("rows", "field"),
    [
        ([{"id": 1, "review": "x"}], "review"),
        ([{"id": "a1", "review": "good thing"}, {"id": "b2", "review": "bad"}], "review"),
        ([{"who": "ann lee", "Content": "x", "n": 3}], "Content"),
        ([{"title": "a b", "body": "c d"}], "body"),
        ([{"n": "17", "word": "yes"}, {"n": "4", "word": "no"}], "word"),
        ([{"n": "a1", "lines": "x\ny"}], "lines"),
        ([{"text": ["one of", "two"], "d": "other one"}], "text"),
        ([{"at": "2026-11-18T14:00:00Z", "said": "yes"}, {"at": "2026-11-18T15:00:00Z", "said": "no"}], "said"),
        ([{"text": "hello", "n": int("9" * 4000)}], "text"),
        (["plain", "strings"], ""),
    ],
)
def test_the_field_is_found_where_it_is_plain(rows, field, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    store = prepare_own_text([tmp_path / "a.jsonl"], out=tmp_path / "store", settings=WHOLE)
    assert store.manifest.origin.get("fields", "") == field


def test_which_field_was_taken_is_told(txl, tmp_path):
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text(f"id,review\n1,good {name}\n")
    (tmp_path / "c.jsonl").write_text('{"body": "of c", "n": ' + "9" * 5000 + "}\n")
    code, _, err = txl("prepare", *sorted(tmp_path.iterdir()), "--split", "1", "--out", tmp_path / "store")
    assert code == 0
    assert err == (
        "the text of 2 .csv files was taken from the field 'review'; name a field to take another\n"
        "the text of 1 .jsonl file was taken from the field 'body'; name a field to take another\n"
    )
    words = ("--field", "review", "--split", "1", "--out", tmp_path / "store")
    code, _, err = txl("prepare", tmp_path / "a.csv", *words)
    assert (code, err) == (0, "")


def test_a_list_of_texts_is_a_text_in_parquet(tmp_path):
    import pyarrow
    from pyarrow import parquet

    rows = {"text": [["one of", "two"], ["three"]], "d": ["other one", "other two"]}
    parquet.write_table(pyarrow.table(rows), tmp_path / "a.parquet")
    store = prepare_own_text([tmp_path / "a.parquet"], out=tmp_path / "store", settings=WHOLE)
    assert stored(store) == [b"one of\ntwo\n", b"three\n"]


@pytest.mark.parametrize(("mark", "told"), [(";", ";"), ("\t", "tabs")])
def test_a_csv_may_be_parted_by_something_else(mark, told, txl, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f'text{mark}n\nhello, you{mark}1,5\n"a{mark}b"{mark}2\n')
    code, _, err = txl("prepare", path, "--field", "text", "--split", "1", "--out", tmp_path / "store")
    assert (code, err) == (0, f"{path}: columns are parted by {told}\n")
    assert stored(open_store(tmp_path / "store")) == [b"hello, you\n", f"a{mark}b\n".encode()]


def test_quotes_of_a_tsv_are_letters_where_they_do_not_pair(txl, tmp_path):
    path = tmp_path / "a.tsv"
    rows = ['"quo\t1', 'say "hi"\t2', '"whole"\t3', *(f"line {n}\t{n}" for n in range(200)), 'end"\t4']
    path.write_text("\n".join(["text\tn", *rows]) + "\n")
    code, _, err = txl("prepare", path, "--split", "1", "--out", tmp_path / "store")
    assert code == 0, err
    assert f"{path}: quotes are read as they are, because they do not pair\n" in err
    assert stored(open_store(tmp_path / "store")) == [f"{row.partition(chr(9))[0]}\n".encode() for row in rows]
    path.write_text('text\tn\n"a\tb"\t1\n"two\nlines"\t2\n')
    code, _, err = txl("prepare", path, "--field", "text", "--split", "1", "--out", tmp_path / "store")
    assert (code, err) == (0, "")
    assert stored(open_store(tmp_path / "store")) == [b"a\tb\n", b"two\nlines\n"]


def test_half_characters_are_mended_and_told(txl, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "half \\ud83d of it"}\n{"text": "\\ud83d\\ude00 whole"}\n')
    code, _, err = txl("prepare", tmp_path / "a.jsonl", "--split", "1", "--out", tmp_path / "store")
    assert code == 0
    assert "a.jsonl: half characters in 1 record were written as U+FFFD" in err
    assert "skipped" not in err
    assert "skipped" not in open_store(tmp_path / "store").manifest.origin
    assert stored(open_store(tmp_path / "store")) == ["half \ufffd of it\n".encode(), "\U0001f600 whole\n".encode()]


def test_a_split_ends_with_a_record(tmp_path):
    texts = [f"record {n}\nhas two lines" for n in range(100)]
    (tmp_path / "a.jsonl").write_bytes(written(texts, "jsonl"))
    store = prepare_own_text([tmp_path / "a.jsonl"], out=tmp_path / "store", settings=OwnText())
    for name in store.splits:
        split = store.split(name)
        data = store.tokenizer.decode_bytes(split.tokens)
        assert data.startswith(b"record")
        assert data.endswith(b"lines\n")
        assert split.document_starts[0] == 0
        assert len(split.document_starts) == data.count(b"record")
    assert [record.documents for record in store.manifest.splits] == [90, 5, 5]


@pytest.mark.parametrize("tokenizer", ["char", "word", "bpe"])
def test_every_tokenizer_takes_records(tokenizer, tmp_path):
    texts = [f"größe {n} 日本 of this" for n in range(300)]
    (tmp_path / "a.jsonl").write_bytes(written(texts, "jsonl"))
    settings = OwnText(tokenizer=tokenizer, shares=(1.0,), vocabulary_size=300 if tokenizer == "bpe" else None)
    store = prepare_own_text([tmp_path / "a.jsonl"], out=tmp_path / "store", settings=settings)
    split = store.split("train")
    assert store.tokenizer.decode(split.tokens) == "".join(f"{text}\n" for text in texts)
    assert len(split.document_starts) == 300
    last = int(split.document_starts[-1])
    assert store.tokenizer.decode(np.asarray(split.tokens[last:])) == f"{texts[-1]}\n"


def test_standard_input_in_records_where_a_field_is_named(tmp_path):
    data = written(["one", "two"], "jsonl")
    for field, expected in (((), [data]), (("text",), [b"one\n", b"two\n"])):
        settings = OwnText(shares=(1.0,), inputs=Inputs(field=field))
        store = prepare_own_text(["-"], out=tmp_path / "store", settings=settings, standard_input=io.BytesIO(data))
        assert stored(store) == expected


@pytest.mark.parametrize(
    ("name", "data", "words", "said"),
    [
        ("a.jsonl", b'{"a": "x y", "b": "z w"}\n', (), "has text in a, b; say which is meant, such as --field a"),
        ("a.jsonl", b'{"a": 1, "b": null}\n', (), "has no field that holds text: a (a number), b (nothing); give records that"),
        ("a.csv", b"n\n1\n", ("--field", "m"), "has no text in m; its fields are n"),
        ("a.jsonl", b'{"n": 0, "a": {"b": [{"c": "x"}, {"d": 1}]}}\n', (), "has text in a.b.c; say which is meant, such as --field a.b.c"),
        ("a.csv", b"hello world this is,a row\nanother,row two\n", (), "a.csv, whose first line names the columns, has text in a row, hello world this is; say which is meant, such as --field 'hello world this is'"),
        ("a.jsonl", b'{"label": "positive", "review": "good thing"}\n', (), "has text in label, review; say which is meant"),
        ("a.jsonl", b'{"text": "x"}\n', ("--field", "text.foo"), "line 1: text is a text and has no field foo"),
        ("a.jsonl", b'{"a": {"b": 7}}\n', ("--field", "a.b.c.d"), "line 1: a.b is a number and has no field c.d"),
        ("a.jsonl", b'[{"text": "x"}]\n', (), "line 1: this is a list, and a record is an object that has a text in it, or a text"),
        ("a.csv", b"text,n\rhello,1\rbye,2\r", (), "line 1 is no row of a table: a carriage return stands in it by itself; end lines"),
        ("a.csv", b"text;n\nhello;1;2\n", (), "line 2 has 3 columns where the first line names 2 (columns are parted by ;)"),
        ("a.tsv", b'text\tn\n"quo\t1\nx\t1\t2\n', (), "line 2 is no row of a table: unexpected end of data"),
        ("a.jsonl", b'{"a": "x"}\n', ("--field", "b"), "a.jsonl has no text in b; its fields are a"),
        ("a.jsonl", b'{"a": {"c": 1}}\n', ("--field", "a.c"), "line 1: a.c is a number there, not text"),
        ("a.jsonl", b'{"a": {"c": 1}}\n', ("--field", "a"), "line 1: a is an object there, not text"),
        ("a.jsonl", b'"x"\n{"a": "x"}\n', (), "line 1: this is a text and has no field a"),
        ("a.jsonl", b'"x"\n' * 200 + b"7\n", (), "line 201: this is a number, and a record is an object"),
        ("a.jsonl", b'{"text": ' + b"[" * 100_000, (), "line 1 is no JSON: it is nested too deeply"),
        ("a.jsonl", b'{"n": ' + b"9" * 5000 + b"}", (), "has no field that holds text: n (a number)"),
        ("a.jsonl", b"\n \n", (), "has no text in it"),
        ("a.csv", b"a,b\n1,2,3\n", (), "line 2 has 3 columns where the first line names 2"),
        ("a.csv", b'text,b\n"x"y,2\n', (), "line 2 is no row of a table"),
        ("a.csv", b'text,b\nx,1\n\n"y\nz', (), "line 4 is no row of a table: unexpected end of data"),
        ("a.csv", b"a,a\n1,2\n", (), "two columns called 'a'"),
        ("a.csv", b"text\nx\n\xe9\n", (), "line 3 is not UTF-8 at its byte 1 (0xe9)"),
        ("a.parquet", b"PAR1 and nothing", (), "a.parquet is damaged or cut short"),
        ("a.parquet.gz", gzip.compress(b"PAR1"), (), "is a compressed .parquet"),
        ("a.txt", b"text\n", ("--field", "b"), "--field b is for .jsonl, .csv, .tsv and .parquet"),
        ("a.jsonl", b'{"a": "x"}\n', ("--field", "a..b"), "--field 'a..b' must be a name"),
        ("a.jsonl", b'{"a": "x"}\n', ("--field", "a", "--field", "a"), "once each"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_sentence(name, data, words, said, txl, tmp_path):
    (tmp_path / name).write_bytes(data)
    code, out, err = txl("prepare", tmp_path / name, *words, "--out", tmp_path / "out")
    assert (code, out) == (2, "")
    assert one_sentence(err), err
    assert said in err
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_parquet_bomb(txl, tmp_path):
    import pyarrow
    from pyarrow import parquet

    text = pyarrow.array(["x" * (1 << 20)]).dictionary_encode()
    many = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 200, pyarrow.int32()), text.dictionary)
    parquet.write_table(pyarrow.table({"text": many}), tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 100_000
    code, _, err = txl("prepare", tmp_path / "a.parquet", "--out", tmp_path / "out")
    assert code == 2
    assert "a.parquet becomes more than 67,108,864 bytes" in err


@pytest.mark.parametrize("form", ["parquet", "jsonl", "csv"])
def test_damaged_records_are_read_or_refused(form, tmp_path):
    chance = random.Random(21)
    sound = written([f"text {n} of it" for n in range(40)], form)
    met = set()
    for _ in range(150):
        (tmp_path / f"a.{form}").write_bytes(mutated(sound, chance))
        try:
            prepare_own_text([tmp_path / f"a.{form}"], out=tmp_path / "store", settings=WHOLE)
            met.add("read")
        except DataError as error:
            met.add("refused" if f"a.{form}" in str(error) else str(error))
    assert met == {"read", "refused"}


def test_a_table_without_rows_is_left_out_of_a_folder_and_refused_by_name(txl, tmp_path):
    folder = tmp_path / "days"
    folder.mkdir()
    (folder / "a.csv").write_text("id,text\n1,hello there\n2,\n3,\n")
    (folder / "b.csv").write_text("id,text\n")
    code, _, err = txl("prepare", folder, "--out", tmp_path / "store", "--split", "1")
    assert code == 0
    assert "b.csv has no text in it" in err
    manifest = open_store(tmp_path / "store").manifest
    assert manifest.origin["skipped"] == "1 empty, 2 record"
    code, out, err = txl("prepare", folder / "b.csv", "--out", tmp_path / "other")
    assert (code, out) == (2, "")
    assert one_sentence(err)
