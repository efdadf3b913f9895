"""`txl fit`: what it sees in a text, what it chooses, that it stands for the commands it names, goes on where it stopped, and tells the truth."""

import json
import shlex
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import transformer_xl as txl
from transformer_xl.checkpoint import load_checkpoint
from transformer_xl.cli import Parser, main
from transformer_xl.cli.fit import configure, in_one, in_two
from transformer_xl.config import ModelConfig
from transformer_xl.data.corpora.selection import Inputs
from transformer_xl.data.store import open_store
from transformer_xl.errors import CheckpointError, ConfigError
from transformer_xl.fitting import beginning, choosing, looking, prepared
from transformer_xl.fitting.choosing import choose_tokens
from transformer_xl.fitting.looking import Findings, look
from transformer_xl.fitting.plan import Plan, plan_in
from transformer_xl.running import preset_for

LINE = "{:>5} the clocks were striking {} in the town of {}\n"
TOWNS = ("Ulm", "Köln", "Łódź", "Århus", "Oslo")
BRIEF = 0.03
"""Minutes."""


@pytest.fixture(scope="module")
def clocks(tmp_path_factory):
    path = tmp_path_factory.mktemp("clocks") / "clocks.txt"
    path.write_text("".join(LINE.format(n, n * n % 97, TOWNS[n % 5]) for n in range(1200)), encoding="utf-8")
    return path


@pytest.fixture
def small(monkeypatch):
    """Models and batches that take no time; everything else as it is."""
    shape = {"n_layer": 1, "d_model": 16, "n_head": 2, "d_inner": 32}
    monkeypatch.setattr(choosing, "SIZES", ((0, shape),))
    monkeypatch.setattr(choosing, "PAIRS_FROM", 10_000)
    monkeypatch.setattr(choosing, "VOCABULARIES", ((0, 300),))
    monkeypatch.setattr(beginning, "box_is_here", lambda: False)


# --- looking


def test_it_counts_what_there_is(tmp_path):
    (tmp_path / "a.txt").write_text("eins\nzwei\n" * 600, encoding="utf-8")
    (tmp_path / "b.txt").write_bytes("für\n".encode("latin-1") * 10)
    (tmp_path / "c.txt").write_text("eins\nzwei\n" * 600, encoding="utf-8")
    (tmp_path / "d.bin").write_bytes(bytes(range(256)) * 8)
    found = look([tmp_path], inputs=Inputs())
    assert (found.files, found.bytes, found.lines, found.small) == (2, 6040, 1210, (1, 40))
    assert (found.stray_bytes, found.is_text) == (10, True)
    assert sum(found.skipped.values()) == 2
    assert "UTF-8 text but for 10 bytes" in found.in_words
    assert look([tmp_path], inputs=Inputs(binary="keep")).bytes == 6040 + 2048
    assert look([tmp_path / "a.txt"], inputs=Inputs()).in_words.endswith("UTF-8 text")
    (tmp_path / "e.txt").write_text("Über Öl\n" * 900, encoding="latin-1")
    assert "no UTF-8" in look([tmp_path / "e.txt"], inputs=Inputs()).in_words


def test_a_character_cut_by_the_end_of_a_block_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(looking, "READ_AT_ONCE", 7)
    (tmp_path / "a.txt").write_text("Łódź € 😀\n" * 500, encoding="utf-8")
    assert look([tmp_path / "a.txt"], inputs=Inputs()).stray_bytes == 0
    (tmp_path / "b.txt").write_bytes("Łódź € 😀\n".encode() * 500 + "€".encode()[:2])
    assert look([tmp_path / "b.txt"], inputs=Inputs()).stray_bytes == 2


def test_records_are_counted_by_their_text(tmp_path):
    lines = [json.dumps({"id": n, "text": LINE.format(n, n, "Ulm")}) for n in range(200)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines), encoding="utf-8")
    found = look([tmp_path / "log.jsonl"], inputs=Inputs(field=("text",)))
    assert found.records == 200
    assert found.in_words.startswith("200 records")


@given(pieces=st.lists(st.binary(max_size=70), max_size=60), cut=st.integers(1, 50))
def test_a_sample_is_spread_over_the_text_however_it_comes(pieces, cut):
    text = b"".join(pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(looking, "PIECES", 3)
        patch.setattr(looking, "PIECE_BYTES", 7)
        whole, parts = looking.Sample(), looking.Sample()
        whole.add(text)
        for start in range(0, len(text), cut):
            parts.add(text[start : start + cut])
    assert whole.pieces == parts.pieces
    assert len(whole.pieces) <= 6
    assert len(whole.pieces) >= min(3, -(-len(text) // 7))
    for number, piece in enumerate(whole.pieces):
        assert piece == text[number * whole.apart :][:7]


# --- choosing

TEXT = Findings(files=1, records=0, bytes=10_000_000, small=(0, 0), lines=9, stray_bytes=0, skipped={})


@pytest.mark.parametrize(
    ("size", "stray", "tokenizer", "vocabulary"),
    [
        (10_000_000, 0, "bpe", 4096),
        (10_000_000, 900_000, "bpe", 4096),
        (3_000_000, 0, "bpe", 2048),
        (500_000, 0, "bpe", 1024),
        (100_000, 0, "byte", None),
        (10_000_000, 1_100_000, "byte", None),
    ],
)
def test_tokens_by_how_much_text_there_is(size, stray, tokenizer, vocabulary):
    found = choose_tokens(replace(TEXT, bytes=size, stray_bytes=stray))
    assert (found["tokenizer"], found["vocabulary_size"]) == (tokenizer, vocabulary)
    assert all(found["reasons"])


def test_many_files_are_held_out_whole():
    many = replace(TEXT, files=50, small=(40, 3_000_000))
    assert choose_tokens(many)["split_by"] == "file"
    assert choose_tokens(replace(many, small=(40, 1_000_000)))["split_by"] == "share"
    assert choose_tokens(replace(many, small=(10, 9_000_000)))["split_by"] == "share"
    assert choose_tokens(TEXT)["split_by"] == "share"


@pytest.mark.parametrize(
    ("speed", "minutes", "width", "dropout"),
    [(20_000, 4, 192, 0.3), (20_000, 10, 256, 0.3), (10, 4, 192, 0.0), (20_000, 60, 384, 0.3)],
)
def test_the_size_follows_what_this_machine_reads_in_the_time(
    clocks, tmp_path, monkeypatch, speed, minutes, width, dropout
):
    """A text this short is read many times, unless the machine is very slow."""
    store = txl.prepare(clocks, out=tmp_path / "data")
    monkeypatch.setattr(
        choosing, "seconds_of_a_step", lambda config, **_: config.training.lanes * config.training.segment / speed
    )
    preset = preset_for(store)
    config, reasons = choosing.choose_model(store, txl.find_preset(preset).run, minutes=minutes, device="cpu")
    assert (preset, config.model.d_model, config.model.dropout) == ("bytes", width, dropout)
    assert isinstance(config.model, ModelConfig)
    assert config.training.minutes == minutes
    assert f"{width} wide" in reasons[0]
    smaller, larger = (run.model.n_layer * run.model.d_model for run in (txl.find_preset(preset).run, config))
    steps = 60 * minutes * speed / choosing.tokens_of_a_step(config)
    often = 12 if dropout else 4
    assert 1 <= config.training.validate_every <= max(1, 1.05 * steps / often)
    if smaller == larger:
        assert config.training.validate_every == pytest.approx(max(1, steps / often), rel=0.1)
    assert config.training.learning_rate == txl.find_preset(preset).run.training.learning_rate


def test_weights_that_exist_move_less_in_a_text_that_is_read_again_and_again(monkeypatch, old_run):
    store, base, found = open_store(old_run / "data"), load_checkpoint(old_run).config, []
    for minutes in (0.02, 20):
        tokens = base.training.lanes * base.training.segment
        monkeypatch.setattr(choosing, "seconds_of_a_step", lambda config, tokens=tokens, **_: tokens / 2000)
        config, reasons = choosing.choose_model(store, base, minutes=minutes, device="cpu", origin="runs/old")
        found.append(config.training.learning_rate / base.training.learning_rate)
        assert ("of the rate that runs/old was trained with" in reasons[-1]) == (found[-1] < 1)
    assert found == [1.0, pytest.approx(0.3)]


# --- the plan


def test_it_stands_for_the_commands_it_names(clocks, tmp_path, small, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, plan, store = prepared(clocks, minutes=BRIEF, run="runs/a b")
    assert plan.preset == "text"
    prepare, train = (shlex.split(command)[1:] for command in in_two(plan, run))
    prepare[prepare.index("--out") + 1] = "again"
    assert main(prepare) == 0
    assert open_store("again").fingerprint() == store.fingerprint()
    train[train.index("--run") + 1] = "trained"
    assert main(train) == 0
    assert txl.Run("trained").config.model == plan.config(store).model
    same = {"steps": 1, "precision": "float32", "validation_tokens": 1}
    assert replace(txl.Run("trained").config.training, **same) == replace(plan.config(store).training, **same)


def test_the_command_is_typed_as_it_was_asked_for(tmp_path):
    inputs = Inputs(field=("text",), include=("*.jsonl",), exclude=("old ones",), gitignore=True, binary="keep")
    some = {"tokenizer": "byte", "vocabulary_size": None, "split_by": "share", "reasons": ()}
    plan = Plan(paths=("a b", "c"), minutes=4.0, inputs=inputs, **some)
    words = shlex.split(in_one(plan, tmp_path))[2:]
    parser = Parser()
    configure(parser)
    found = parser.parse_all(words)
    assert (tuple(found.paths), found.minutes, found.run) == (plan.paths, 4.0, str(tmp_path))
    assert (found.field, found.include, found.exclude) == (["text"], ["*.jsonl"], ["old ones"])
    assert (found.gitignore, found.binary) == (True, "keep")


def test_what_was_begun_goes_on_and_nothing_else_does(clocks, tmp_path, small):
    run, plan, _ = prepared(clocks, minutes=BRIEF, run=tmp_path / "run")
    assert prepared(clocks, minutes=BRIEF, run=run)[1] == plan
    with pytest.raises(ConfigError, match=r"was begun with .*clocks.txt for 0.03 minutes; ask for just the same"):
        prepared(clocks, minutes=1, run=run)
    with pytest.raises(ConfigError, match="was begun with"):
        prepared(clocks, minutes=BRIEF, run=run, inputs=Inputs(binary="keep"))


def test_what_differs_from_what_was_begun_is_told(clocks, tmp_path, small):
    prepared(clocks, minutes=BRIEF, run=tmp_path / "run")
    prepared(clocks.parent / "." / clocks.name, minutes=BRIEF, run=tmp_path / "run")
    with pytest.raises(ConfigError, match="and binary skip; ask for just the same"):
        prepared(clocks, minutes=BRIEF, run=tmp_path / "run", inputs=Inputs(binary="keep"))


def test_the_bytes_of_words_are_counted_with_their_spaces(word_store):
    from transformer_xl.evaluation.references import judged_by

    found = judged_by(word_store, "test", 10**6)
    decode = word_store.tokenizer.decode_bytes
    tokens = word_store.split("test").tokens
    assert found["tokens"] == len(tokens)
    assert found["bytes"] == len(decode(tokens)) - len(decode(tokens[:1]))


def test_a_text_that_has_changed_meanwhile_is_said(clocks, tmp_path, small, capsys):
    text = tmp_path / "grown.txt"
    text.write_bytes(clocks.read_bytes())
    run, plan, store = prepared(text, minutes=BRIEF, run=tmp_path / "run")
    capsys.readouterr()
    prepared(text, minutes=BRIEF, run=run)
    assert "is not what it was" not in capsys.readouterr().err
    with text.open("ab") as file:
        file.write(b"one more line\n")
    again = prepared(text, minutes=BRIEF, run=run)
    assert again[1] == plan
    assert again[2].fingerprint() == store.fingerprint()
    said = capsys.readouterr().err
    assert (
        f"1 files of {plan.disk[1]:,} bytes then, 1 of {plan.disk[1] + 14:,} now; going on with what was read then"
        in said
    )


def test_stopped_and_called_again_it_goes_on(clocks, tmp_path, small):
    steps = []
    how = {"minutes": 10 * BRIEF, "run": tmp_path / "run", "device": "cpu"}
    first = txl.fit(clocks, **how, on_step=lambda now: steps.append(now.step) or now.stop())
    assert first.stopped
    assert steps == [1]
    second = txl.fit(clocks, **how, on_step=lambda now: steps.append(now.step))
    assert not second.stopped
    assert steps[1] == 2


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ("", "plan.json"),
        ('{"paths": 3}', "plan.json"),
        ("[]", "plan.json"),
        ('{"bytes": 3}', "no field bytes"),
    ],
)
def test_a_damaged_plan_is_one_sentence(clocks, tmp_path, small, damage, sentence):
    run, _, _ = prepared(clocks, minutes=BRIEF, run=tmp_path / "run")
    (run / "plan.json").write_text(damage)
    with pytest.raises(ConfigError, match=sentence):
        plan_in(run, {})


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["-"], "standard input can be read once"),
        (["missing.txt"], "missing.txt"),
        (["clocks.txt", "--minutes", "0"], "--minutes 0 is no time"),
        (["clocks.txt", "--minutes", "nan"], "--minutes nan is no time"),
        (["short.txt"], "there are 7 bytes of text, too few to learn from; give 5,000 or more"),
        (["clocks.txt", "--run", "full"], "full is not empty, and nothing was fitted there; choose another --run"),
        (["folder", "--run", "folder/run"], "folder/run lies in folder, whose text goes into it"),
        (["clocks.txt", "--field", "text"], "--field text is for .jsonl"),
    ],
)
def test_what_cannot_be_fitted_is_one_sentence_and_leaves_nothing(
    clocks, tmp_path, monkeypatch, capsys, words, sentence
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clocks.txt").write_bytes(clocks.read_bytes())
    (tmp_path / "short.txt").write_text("a short")
    for name in ("full", "folder"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "there.txt").write_bytes(clocks.read_bytes())
    before = sorted(tmp_path.rglob("*"))
    assert main(["fit", *words]) == 2
    shown = capsys.readouterr().err.strip().splitlines()[-1]
    assert sentence in shown
    assert shown.startswith("txl: ")
    assert sorted(tmp_path.rglob("*")) == before


# --- beginning with a run


@pytest.fixture
def old_run(clocks, tmp_path, small):
    """In byte pairs, so that its tokens are its own."""
    return txl.fit(clocks, minutes=BRIEF, run=tmp_path / "old run", device="cpu").path


@pytest.fixture
def bells(tmp_path):
    path = tmp_path / "bells.txt"
    path.write_text("".join(f"{n % 7} bells rang {n % 12} times in Ulm\n" for n in range(900)), encoding="utf-8")
    return path


def test_it_begins_with_a_run_as_the_commands_it_names_do(old_run, bells, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in old_run.rglob("*") if path.is_file()}
    words = ["fit", str(bells), "--minutes", str(BRIEF), "--from", str(old_run)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    for text in (f"tokens: those of {old_run}", f"weights: it begins with those of {old_run}", "the run it began with"):
        assert text in shown
    assert "1 layers, 16 wide, as" in shown
    # What it was before, by a second way; and the run it began with is as it was.
    found = json.loads((tmp_path / "runs/bells/evaluations/fit.json").read_text())
    store = open_store("runs/bells/data")
    test = store.tokenizer.decode_bytes(store.split("test").tokens)
    first = len(store.tokenizer.decode_bytes(store.split("test").tokens[:1]))
    bits = txl.load(old_run).score(test.decode()).bits
    assert found["before"] == pytest.approx(
        float(bits[1:].sum()) / (len(test) - first), rel=0.03
    )  # in other segments, so roughly
    assert found["bits_per_byte"] < found["before"]
    assert {path: path.read_bytes() for path in old_run.rglob("*") if path.is_file()} == before
    # The two commands, as printed.
    run, plan, _ = prepared(bells, minutes=BRIEF, run="runs/bells", from_=old_run)
    prepare, train = (shlex.split(command)[1:] for command in in_two(plan, run))
    prepare[prepare.index("--out") + 1] = "again"
    assert main(prepare) == 0
    assert open_store("again").fingerprint() == store.fingerprint()
    train[train.index("--run") + 1] = "trained"
    assert main(train) == 0
    assert txl.Run("trained").config.model == plan.config(store).model == txl.Run(run).config.model
    counters = [
        json.loads((txl.load(made).checkpoint.folder / "training.json").read_text()) for made in ("trained", run)
    ]
    assert counters[0]["origin"] == counters[1]["origin"]


def test_stopped_and_called_again_it_goes_on_from_the_run(old_run, bells, tmp_path):
    steps = []
    how = {"minutes": BRIEF, "run": tmp_path / "run", "device": "cpu", "from_": old_run}
    assert txl.fit(bells, **how, on_step=lambda now: steps.append(now.step) or (now.step == 3 and now.stop())).stopped
    assert not txl.fit(bells, **how, on_step=lambda now: steps.append(now.step)).stopped
    assert steps[:4] == [1, 2, 3, 4]
    with pytest.raises(ConfigError, match=r"was begun with .* minutes from .*old run; ask for just the same"):
        prepared(bells, minutes=BRIEF, run=tmp_path / "run")


def test_a_run_that_cannot_be_begun_with_is_one_sentence(clocks, tmp_path, recurrent_run):
    with pytest.raises(CheckpointError, match="there is no run"):
        prepared(clocks, run=tmp_path / "run", from_=tmp_path / "none")
    with pytest.raises(ConfigError, match="is no Transformer-XL; go on with it by txl prepare and txl train"):
        prepared(clocks, run=tmp_path / "run", from_=recurrent_run)
    assert not (tmp_path / "run").exists()


# --- telling


def test_the_command_from_a_file_to_figures(clocks, tmp_path, small, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["fit", str(clocks), "--minutes", str(BRIEF)]) == 0
    shown = capsys.readouterr().out
    for words in (
        "== Plan",
        "txl prepare",
        "txl train text",
        "this model",
        "xz -9",
        "Surprised it most",
        "txl generate runs/clocks",
    ):
        assert words in shown
    assert main(["fit", str(clocks), "--minutes", str(BRIEF), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["report"]
    assert f"{found['bits_per_byte']:.3f}" in shown
    kept = json.loads((tmp_path / "runs/clocks/evaluations/fit.json").read_text())
    assert kept["bits_per_byte"] == found["bits_per_byte"]
    # By a second way: the loss of every token of test, over its bytes.
    loaded, store = txl.load("runs/clocks"), open_store("runs/clocks/data")
    test = store.tokenizer.decode_bytes(store.split("test").tokens)
    bits = loaded.score(test.decode()).bits
    first = len(store.tokenizer.decode_bytes(store.split("test").tokens[:1]))
    assert found["bits_per_byte"] == pytest.approx(
        float(bits[1:].sum()) / (len(test) - first), rel=0.03
    )  # other segments
    assert (
        found["most"][0]["bits"] / found["most"][0]["bytes"] >= found["least"][0]["bits"] / found["least"][0]["bytes"]
    )


def test_bytes_that_are_no_text(tmp_path, small, capsys):
    path = tmp_path / "noise.bin"
    path.write_bytes(bytes((n * n + 7 * n) % 251 for n in range(20_000)))
    assert main(["fit", str(path), "--minutes", str(BRIEF), "--binary", "keep", "--run", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "single bytes: it is no UTF-8 text" in shown
    assert "txl train bytes" in shown
