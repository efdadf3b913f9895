"""Folders and archives: what is taken and what is left out, and that nothing in an archive reaches anywhere."""

import errno
import io
import os
import random
import shutil
import socket
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
from data_helpers import one_sentence, patient
from hypothesis import given
from hypothesis import strategies as st

from mutations import mutated
from transformer_xl.data.corpora.inputs import gather, is_binary
from transformer_xl.data.corpora.own_text import OwnText, prepare_own_text
from transformer_xl.data.corpora.selection import Inputs
from transformer_xl.data.corpora.unpacking import zstd
from transformer_xl.data.store import open_store
from transformer_xl.errors import DataError

PICTURE = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256)) * 8
NAMES = st.sampled_from(["a.py", "b.py", "c.txt", "d.md", "é.txt"])
PLACES = st.sampled_from(["", "x/", "x/y/", "node_modules/", "build/", ".git/"])
TREES = st.dictionaries(
    st.builds("{}{}".format, PLACES, NAMES), st.binary(max_size=30).map(lambda data: data + b"."), min_size=1, max_size=12
)  # fmt: skip


def make(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def tar_of(files: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return made.getvalue()


def zip_of(files: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return made.getvalue()


def taken(path: Path, scratch: Path, **inputs: object) -> list[tuple[str, bytes]]:
    """(name, content) of what is gathered; archives and folders call their files alike."""
    scratch.mkdir(exist_ok=True)
    found = gather([path], scratch=scratch, inputs=Inputs(**inputs))
    names = [source.name.removeprefix(f"{path}").lstrip(":/") for source in found.sources]
    contents = [source.path.read_bytes() for source in found.sources]
    return list(zip(names, contents, strict=True))


@patient
@given(files=TREES, options=st.sampled_from([{}, {"include": ("*.py", "/x/*.md")}, {"exclude": ("node_modules", "y")}]))
def test_an_archive_is_a_folder(tmp_path_factory, files, options):
    place = tmp_path_factory.mktemp("trees")
    folder = make(place / "folder", files)
    archives = {"a.tar": tar_of(files), "a.zip": zip_of(files), "a.tar.zst": zstd.compress(tar_of(files))}

    def told(path: Path) -> object:
        try:
            return taken(path, place / f"scratch {path.name}", **options)
        except DataError as error:
            return str(error).removeprefix(str(path)).lstrip(":/")

    expected = told(folder)
    for name, data in archives.items():
        (place / name).write_bytes(data)
        assert told(place / name) == expected


PATTERNS = [
    "*.py",
    "!a.py",
    "build/",
    "/x/*.md",
    "x/**",
    "!x/y/",
    "c.txt",
    "**/y/d.md",
    "# no",
    "node_modules",
    "é.txt",
    "[a-c].py",
    "!*.md",
]


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("git") is None, reason="git is the oracle")
@pytest.mark.parametrize("seed", range(60))
def test_gitignore_is_what_git_makes_of_it(seed, tmp_path):
    chance = random.Random(seed)
    names = [
        f"{place}{name}"
        for place in ("", "x/", "x/y/", "build/", "node_modules/")
        for name in ("a.py", "c.txt", "d.md", "é.txt")
    ]
    folder = make(tmp_path / "folder", {name: name.encode() for name in names})
    for place in chance.sample(["", "x", "x/y", "build"], chance.randint(1, 4)):
        lines = chance.sample(PATTERNS, chance.randint(1, 5))
        (folder / place / ".gitignore").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    git = ["git", "-c", "core.quotepath=off", "-C", str(folder)]
    subprocess.run([*git, "init", "-q"], check=True)
    listed = subprocess.run([*git, "ls-files", "-o", "--exclude-standard"], check=True, capture_output=True, text=True)
    expected = sorted(name for name in listed.stdout.splitlines() if not Path(name).name.startswith("."))
    if expected:
        assert sorted(name for name, _ in taken(folder, tmp_path / "scratch", gitignore=True)) == expected
    if any(name.startswith("x/") for name in expected):  # the repository's own .gitignore speaks of what lies in it
        inside = [name for name, _ in taken(folder / "x", tmp_path / "scratch", gitignore=True)]
        assert sorted(f"x/{name}" for name in inside) == [name for name in expected if name.startswith("x/")]


def test_what_is_no_text_is_skipped_and_listed(txl, tmp_path):
    files = {
        "a.txt": b"some text\n",
        "b.txt": b"some text\n",
        "c.txt": b"other text\n",
        "empty": b"",
        "picture.png": PICTURE,
        "data.jsonl": b'{"text": "of a record"}\n',
        ".hidden": b"hidden\n",
        "more.tar": tar_of({"d.txt": b"in an archive\n", "e.png": PICTURE, "sub/f.txt": b"other text\n"}),
    }
    folder = make(tmp_path / "folder", files)
    code, _, err = txl("prepare", folder, "--split", "1", "--out", tmp_path / "store")
    assert code == 0, err
    store = open_store(tmp_path / "store")
    text = store.tokenizer.decode(store.split("train").tokens)
    assert text == "some text\nother text\nof a record\nin an archive\n"
    assert store.split("train").document_starts.tolist() == [0, 10, 21, 33]
    assert store.manifest.origin["skipped"] == "2 binary, 2 duplicate, 1 empty"
    listed = (tmp_path / "store" / "skipped.txt").read_text()
    assert f"duplicate\t{folder}/b.txt is {folder}/a.txt\n" in listed
    assert f"binary\t{folder}/more.tar:e.png\n" in listed
    for name in ("picture.png", "empty", "b.txt", "f.txt"):
        assert name in err
    code, _, err = txl("prepare", folder, "--split", "1", "--binary", "keep", "--out", tmp_path / "kept")
    assert code == 0
    assert "png is" in err  # one of two that are the same
    assert PICTURE in open_store(tmp_path / "kept").tokenizer.decode_bytes(
        open_store(tmp_path / "kept").split("train").tokens
    )


def test_a_long_list_is_cut_and_stands_whole_in_the_store(txl, tmp_path):
    folder = make(tmp_path / "folder", {"a.txt": b"text\n", **{f"{n:03}": b"" for n in range(50)}})
    code, _, err = txl("prepare", folder, "--split", "1", "--out", tmp_path / "store")
    assert code == 0
    assert err.count("skipped empty") == 10
    assert "... and 40 more; all stand in the store's skipped.txt" in err
    assert len((tmp_path / "store" / "skipped.txt").read_text().splitlines()) == 50


def test_our_own_stores_and_runs_are_no_text(txl, tmp_path):
    run = {"runs/a/config.json": b"{}", "runs/a/metrics.jsonl": b'{"a": 1, "b": 2}\n', "runs/a/checkpoints/b/c": b"x"}
    folder = make(tmp_path / "folder", {"a.txt": b"some text\n" * 20, **run})
    for _ in range(2):
        code, _, err = txl("prepare", folder, "--split", "1", "--out", folder / "store")
        assert code == 0, err
        assert f"skipped ours: {folder}/runs/a is a data store or a run" in err
        assert len(open_store(folder / "store").split("train")) == 200


@pytest.mark.parametrize(
    ("head", "binary"),
    [
        (PICTURE, True),
        ("plain".encode("utf-16"), True),
        (bytes(range(1, 256)), True),
        ("Привет, мир".encode("koi8-r"), False),
        ("café\r\n".encode("latin-1"), False),
        ("日本".encode(), False),
        (b"\x1b[31mred\x1b[0m\f", False),
        (b"a", False),
    ],
)
def test_binary(head, binary):
    assert is_binary(head) == binary


@pytest.mark.parametrize("code", ["utf-16", "utf-16-be", "utf-32", "utf-32-be"])
def test_a_text_in_another_code_is_named_so(code, txl, tmp_path):
    mark = "" if code in ("utf-16", "utf-32") else "\ufeff"
    folder = make(tmp_path / "folder", {"a.txt": (mark + "日本 text\n").encode(code), "b.txt": b"text\n"})
    name = code[:6].upper()
    code, _, err = txl("prepare", folder, "--split", "1", "--out", tmp_path / "store")
    assert code == 0
    assert f"skipped {name}: {folder}/a.txt; convert it to UTF-8\n" in err
    assert open_store(tmp_path / "store").manifest.origin["skipped"] == f"1 {name}"
    code, _, err = txl("prepare", folder / "a.txt", "--out", tmp_path / "out")
    assert code == 2
    assert f"was skipped (1 {name}); convert what is not UTF-8, as by: iconv -f {name} -t UTF-8" in err
    assert txl("prepare", folder, "--binary", "keep", "--split", "1", "--out", tmp_path / "store")[0] == 0
    assert len(open_store(tmp_path / "store").split("train")) == (folder / "a.txt").stat().st_size + 5


def test_what_is_no_file_is_listed(txl, tmp_path):
    folder = make(tmp_path / "folder", {"a.txt": b"text\n", "sub/b.txt": b"more\n"})
    os.mkfifo(folder / "pipe")
    (folder / "broken").symlink_to("nowhere")
    (folder / "round").symlink_to("round")
    (folder / "around").symlink_to("sub")
    (folder / "to a.txt").symlink_to("a.txt")
    (folder / ".hidden").symlink_to("nowhere")
    (folder / "left").symlink_to("sub")
    with socket.socket(socket.AF_UNIX) as place:
        here = Path.cwd()
        os.chdir(folder)  # a socket's path may not be long
        try:
            place.bind("door")
        finally:
            os.chdir(here)
        code, _, err = txl("prepare", folder, "--exclude", "left", "--split", "1", "--out", tmp_path / "store")
    assert code == 0
    assert (tmp_path / "store" / "skipped.txt").read_text().splitlines() == [
        f"link\t{folder}/around leads to a folder",
        f"link\t{folder}/broken leads nowhere",
        f"special\t{folder}/door is a socket",
        f"special\t{folder}/pipe is a pipe",
        f"link\t{folder}/round leads nowhere",
        f"duplicate\t{folder}/to a.txt is {folder}/a.txt",
    ]
    assert "skipped special" in err


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions of another kind")
def test_a_folder_that_may_not_be_read_is_not_passed_over(tmp_path, monkeypatch):
    folder = make(tmp_path / "folder", {"a.txt": b"text\n", "locked/b.txt": b"more\n"})
    scan = os.scandir

    def refusing(path: str) -> object:
        if str(path).endswith("locked"):  # root may read anything
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(DataError, match="locked cannot be read: Permission denied; leave it out with `exclude=`"):
        taken(folder, tmp_path / "scratch")
    assert taken(folder, tmp_path / "scratch", exclude=("locked",)) == [("a.txt", b"text\n")]


# --- paths that a person names


def test_patterns_hold_for_what_is_named_too(txl, tmp_path, monkeypatch):
    files = {"a.log": b"of a\n", "debug.log": b"of debug\n", "tests/c.log": b"of c\n", "notes": b"of notes\n"}
    files |= {"a.tar": tar_of({"d.log": b"of d\n", "e.txt": b"of e\n"}), "build/f.log": b"of f\n", "g.tmp": b"of g\n"}
    make(tmp_path / "folder", {**files, ".gitignore": b"*.tmp\n", ".h.log": b"of h\n"})
    monkeypatch.chdir(tmp_path / "folder")

    def text(*words: str) -> tuple[str, list[str]]:
        code, _, err = txl("prepare", *words, "--split", "1", "--out", tmp_path / "store")
        assert code == 0, err
        store = open_store(tmp_path / "store")
        unwanted = [line.removeprefix("skipped unwanted: ") for line in err.splitlines() if "unwanted" in line]
        return store.tokenizer.decode(store.split("train").tokens), unwanted

    assert text("a.log", "debug.log", "--exclude", "debug.log") == ("of a\n", ["debug.log"])
    assert text("a.log", "notes", "--include", "*.log") == ("of a\n", ["notes"])
    assert text("a.log", "tests/c.log", "build", "--exclude", "tests", "--exclude", "build") == (
        "of a\n",
        ["tests/c.log", "build"],
    )
    # An archive is a folder: which of its files are wanted is asked of them.
    assert text("a.tar", "a.log", "--include", "*.txt") == ("of e\n", ["a.log"])
    assert text("a.tar", "a.log", "--exclude", "a.tar") == ("of a\n", ["a.tar"])
    assert text("a.log", "g.tmp", "--gitignore") == ("of a\n", ["g.tmp"])
    assert text(".", "--include", "*.log")[0] == "of a\nof f\nof debug\nof c\n"
    assert text(".h.log") == ("of h\n", [])  # hidden, and named
    # Where a folder lies is no name of what is in it.
    assert text(str(tmp_path / "folder" / "a.log"), "--exclude", "folder") == ("of a\n", [])
    code, _, err = txl("prepare", "a.log", "debug.log", "--exclude", "*.log", "--out", tmp_path / "out")
    assert (code, one_sentence(err)) == (2, True)
    assert "a.log and debug.log holds no text: --exclude *.log left out 2 files" in err


def test_a_file_that_is_named_twice_is_taken_once(txl, tmp_path):
    folder = make(tmp_path / "folder", {"a.txt": b"some text\n"})
    code, _, err = txl("prepare", folder / "a.txt", folder / "a.txt", folder, "--split", "1", "--out", tmp_path / "s")
    assert code == 0
    assert err.count(f"skipped duplicate: {folder}/a.txt is {folder}/a.txt again\n") == 2
    assert len(open_store(tmp_path / "s").split("train")) == 10


def test_valid_that_is_train_is_told(txl, tmp_path):
    files = {f"{name}.txt": b"text of " + name.encode() for name in ("a", "b", "c", "d")}
    folder = make(tmp_path / "folder", {**files, "again.txt": files["b.txt"]})
    a, b, c, again = (folder / f"{name}.txt" for name in ("a", "b", "c", "again"))
    words = ("--out", tmp_path / "store")
    code, _, err = txl("prepare", "--train", a, b, "--valid", again, c, "--test", a, *words)
    assert code == 0
    assert err == f"also in train: {again} (valid), {a} (test); figures made on it say nothing of new text\n"
    code, _, err = txl("prepare", "--train", a, b, "--valid", c, "--test", folder / "d.txt", *words)
    assert (code, err) == (0, "")


# --- archives that mean harm


def hostile_tar() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, data in {
            "../../escaped.txt": b"up\n",
            "/tmp/escaped-absolute.txt": b"root\n",
            "a\nb.txt": b"line\n",
        }.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for kind, name in (
            (tarfile.SYMTYPE, "link"),
            (tarfile.LNKTYPE, "hard"),
            (tarfile.CHRTYPE, "zero"),
            (tarfile.FIFOTYPE, "pipe"),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
    return made.getvalue()


def test_nothing_in_a_tar_reaches_anywhere(txl, tmp_path):
    inner = tmp_path / "deep" / "inner"
    inner.mkdir(parents=True)
    (inner / "a.tar").write_bytes(hostile_tar())
    code, _, err = txl("prepare", inner / "a.tar", "--split", "1", "--out", inner / "store")
    assert code == 0, err
    store = open_store(inner / "store")
    assert store.tokenizer.decode(store.split("train").tokens) == "line\nup\nroot\n"
    assert err.count("skipped link") == 2
    assert f"skipped special: {inner}/a.tar:pipe is a pipe\n" in err
    assert f"skipped special: {inner}/a.tar:zero is a device\n" in err
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file() and path.parent != inner / "store") == [
        "a.tar"
    ]
    assert not Path("/tmp/escaped-absolute.txt").exists()


@pytest.mark.parametrize(("name", "data"), [("a.tar", tar_of({})), ("a.zip", zip_of({}))])
def test_an_archive_of_nothing_is_empty(name, data, txl, tmp_path):
    folder = make(tmp_path / "folder", {name: data, "b.txt": b"text\n"})
    code, _, err = txl("prepare", folder, "--split", "1", "--out", tmp_path / "store")
    assert (code, err) == (0, f"skipped empty: {folder}/{name}\n")
    code, _, err = txl("prepare", folder / name, "--out", tmp_path / "out")
    assert code == 2
    assert f"{name} holds no text: all that is there was skipped (1 empty)" in err


def test_a_link_in_a_zip_is_no_text(txl, tmp_path):
    link = zipfile.ZipInfo("link")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.txt", "text\n")
        archive.writestr(link, "/etc/passwd")
    code, _, err = txl("prepare", tmp_path / "a.zip", "--split", "1", "--out", tmp_path / "store")
    assert code == 0
    assert "skipped link" in err
    assert len(open_store(tmp_path / "store").split("train")) == 5


@pytest.mark.processes
def test_a_file_of_holes_is_not_filled(txl, tmp_path):
    (tmp_path / "holes").touch()
    os.truncate(tmp_path / "holes", 1 << 40)
    tar = shutil.which("tar")
    if tar is None:
        pytest.skip("nothing here writes files with holes")
    subprocess.run([tar, "-S", "-cf", tmp_path / "a.tar", "-C", tmp_path, "holes"], check=True)
    assert (tmp_path / "a.tar").stat().st_size < 100_000
    code, _, err = txl("prepare", tmp_path / "a.tar", "--binary", "keep", "--out", tmp_path / "out")
    assert code == 2
    assert "holds no text: all that is there was skipped (1 special)" in err


@pytest.mark.parametrize("packed", [tar_of, zip_of], ids=["tar", "zip"])
def test_damaged_archives_are_read_or_refused(packed, tmp_path):
    chance = random.Random(21)
    sound = packed({f"{n}.txt": b"text %d\n" % n * 9 for n in range(6)})
    path, met = tmp_path / f"a.{packed.__name__[:3]}", set()
    for _ in range(200):
        path.write_bytes(mutated(sound, chance))
        try:
            prepare_own_text([path], out=tmp_path / "store", settings=OwnText(shares=(1.0,)))
            met.add("read")
        except DataError:
            met.add("refused")
    assert met == {"read", "refused"}
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name, "store"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--include", "*.rs"), "holds no text: --include *.rs left out 2 files (patterns are as in .gitignore"),
        (("--include", "./a.txt", "--include", "[a-"), "--include ./a.txt and --include [a- left out 2 files"),
        (("--include", "{a,b}.txt", "--exclude", "b.*"), "--include {a,b}.txt and --exclude b.* left out 2 files"),
        (("--exclude", "*"), "holds no text: --exclude * left out 1 folder"),
        (("--gitignore", "--exclude", "*.*"), "--exclude *.* and what .gitignore says left out 2 files"),
        (("--exclude", " "), "--exclude ' ' is no pattern"),
        (("--include", "!a"), "--include '!a' is no pattern"),
        (
            ("--include", "*.png"),
            "left out 1 file (patterns are as in .gitignore, such as *.txt or docs/); all else that",
        ),
        (("--include", "*.png"), "was skipped (1 binary); --binary keep takes those that are binary"),
    ],
)
def test_what_leaves_nothing_is_one_sentence(words, said, txl, tmp_path):
    folder = make(tmp_path / "folder", {"a.txt": b"text\n", "b.png": PICTURE})
    code, out, err = txl("prepare", folder, *words, "--out", tmp_path / "out")
    assert (code, out) == (2, "")
    assert one_sentence(err), err
    assert said in err
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("name", ["field", "include", "exclude"])
def test_one_word_is_no_list_of_words(name):
    for words in ("*.py", (1,), None):
        with pytest.raises(DataError, match=f"`{name}=` .* must be a list of words, even where it is one"):
            Inputs(**{name: words})
