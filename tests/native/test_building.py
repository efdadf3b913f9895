"""Where the kernels come from: built by whatever compiler is named, kept where nobody else can put something, and said where they cannot be had."""

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from transformer_xl.native import building, doors, recipe

needs_compiler = pytest.mark.skipif(building.library() is None, reason="no C++ compiler here")
SMALL = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """`library()` anew, with a cache of its own, of a source that builds at once: these tests ask where the library goes, not what it does."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "small.cpp").write_text(SMALL)
    monkeypatch.setattr(building, "FOLDER", tmp_path / "source")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    building.library.cache_clear()
    yield tmp_path / "cache" / "transformer_xl"
    building.library.cache_clear()


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("kernels-*.so"))


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "there is no C++ compiler"),
        ('g++ "', "No closing quotation"),
        ("broken", "error: nothing works"),
        ("unrunnable", "Exec format error"),
    ],
)
def test_where_they_cannot_be_had_it_is_said_once_with_the_reason_and_the_cost(
    compiler, reason, fresh, tmp_path, monkeypatch, capsys
):
    (tmp_path / "broken").write_text(
        "#!/bin/sh\n[ $1 = --version ] || { echo 'x.cpp:1: error: nothing works' >&2; exit 1; }\n"
    )
    (tmp_path / "unrunnable").write_bytes(b"\x7fELF nothing of the kind")
    for name in ("broken", "unrunnable"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CXX", compiler)
    assert building.library() is None
    assert building.library() is None
    said = capsys.readouterr().err
    assert said.count("the fast kernels cannot be used") == 1
    assert reason in said
    assert "three times slower" in said
    assert not fresh.exists() or not list(fresh.iterdir())  # nothing half-made is left


@needs_compiler
def test_a_compiler_of_several_words_works_and_what_was_built_is_kept(fresh, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "env LANG=C g++")
    assert building.library() is not None
    (path,) = kept(fresh)
    assert fresh.stat().st_mode & 0o077 == 0
    assert path.stat().st_mode & 0o077 == 0
    first, _ = capsys.readouterr(), building.library.cache_clear()
    assert building.library() is not None
    assert "building" in first.err
    assert "building" not in capsys.readouterr().err


@needs_compiler
@pytest.mark.parametrize("size", [0, 100, 4096, -4096, -1])
def test_a_damaged_library_is_built_again(size, fresh, capsys):
    assert building.library() is not None
    (path,) = kept(fresh)
    whole = path.read_bytes()
    path.unlink()  # the process has it mapped: cut in place, it would end us
    path.write_bytes(whole[:size])
    path.chmod(0o700)
    building.library.cache_clear()
    assert building.library() is not None
    assert path.read_bytes() == whole
    assert capsys.readouterr().err.count("building") == 2


PLANTED = 'extern "C" { __attribute__((constructor)) void planted() { __builtin_trap(); } }\n'


@needs_compiler
@pytest.mark.parametrize("where", ["folder others can write to", "file others can write to", "link"])
def test_no_library_is_taken_from_where_others_can_put_one(where, fresh, tmp_path, capsys):
    """The planted one would end this process when loaded."""
    assert building.library() is not None
    (path,) = kept(fresh)
    (tmp_path / "planted.cpp").write_text(PLANTED)
    subprocess.run(["g++", "-shared", "-fPIC", tmp_path / "planted.cpp", "-o", tmp_path / "planted.so"], check=True)
    path.unlink()
    data = (tmp_path / "planted.so").read_bytes()
    (tmp_path / "signed.so").write_bytes(data + hashlib.sha256(data).digest())
    (tmp_path / "signed.so").chmod(0o700)
    if where == "link":
        path.symlink_to(tmp_path / "signed.so")
    else:
        path.write_bytes((tmp_path / "signed.so").read_bytes())
        path.chmod(0o777)
        fresh.chmod(0o777 if where.startswith("folder") else 0o700)
    building.library.cache_clear()
    assert building.library() is not None
    assert ("no kernels are taken from there" in capsys.readouterr().err) == where.startswith("folder")


@needs_compiler
def test_a_folder_that_is_somebody_elses_is_not_used(fresh, tmp_path, capsys, monkeypatch):
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    fresh.mkdir(parents=True)
    os.chown(fresh, 12345, 12345)
    assert building.library() is not None
    assert not list(fresh.iterdir())
    assert kept(tmp_path / "transformer_xl-0")  # the next usual place
    assert f"{fresh} belongs to somebody else" in capsys.readouterr().err


@needs_compiler
def test_without_a_home_they_are_kept_elsewhere(fresh, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", dict[int, object]().__getitem__)  # nor is our number in the system's list
    assert building.library() is not None
    assert kept(tmp_path / f"transformer_xl-{os.getuid()}")


@needs_compiler
def test_where_nothing_can_be_kept_they_are_built_for_this_process(fresh, tmp_path, monkeypatch):
    fresh.parent.write_text("a file where the cache should be")
    (tmp_path / f"transformer_xl-{os.getuid()}").symlink_to(tmp_path / "source")
    assert building.library().answer() == 42
    assert sorted(path.name for path in (tmp_path / "source").iterdir()) == ["small.cpp"]


@needs_compiler
def test_a_library_that_other_words_built_is_another(fresh, monkeypatch):
    """A flag in CXX changes what is built: it must not be there for who gives none."""
    assert building.library() is not None
    building.library.cache_clear()
    monkeypatch.setenv("CXX", "c++ -fvisibility=hidden")
    assert building.library() is not None
    assert len(kept(fresh)) == 2


def test_a_library_without_our_kernels_is_not_used(fresh, capsys):
    assert doors.library.__wrapped__() is None
    assert "not as expected" in capsys.readouterr().err or building.library() is None


def test_a_sanitizer_that_would_end_the_process_is_not_loaded(fresh, monkeypatch, capsys):
    if "libasan" in Path("/proc/self/maps").read_text(encoding="utf-8"):
        pytest.skip("it is here")
    monkeypatch.setenv("TXL_SANITIZE", "address")
    assert building.library() is None
    assert "make test-sanitizers" in capsys.readouterr().err


@needs_compiler
def test_the_source_compiles_without_a_warning(tmp_path):
    # -Wall asks about the source, and -O0 answers in a second.
    flags = [flag for flag in (*recipe.FLAGS, *building.FLAGS, "-shared") if flag != "-O3"]
    sources = [str(path) for path in recipe.sources(building.FOLDER)]
    command = ["c++", *flags, "-Wall", "-Wextra", "-Werror", *sources, "-o", str(tmp_path / "kernels.so")]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
