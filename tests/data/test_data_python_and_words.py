"""The corpus every machine has, and text made readable again."""

import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from transformer_xl.data.corpora.python import python_files, split_of
from transformer_xl.data.store import open_store
from transformer_xl.data.text.display import detokenize

LIBRARY = Path(sysconfig.get_paths()["stdlib"])


def test_the_python_corpus(txl, tmp_path):
    code, _, err = txl("prepare", "python", "--out", tmp_path / "store")
    assert code == 0, err
    store = open_store(tmp_path / "store", verify=True)
    assert store.manifest.origin["python"] == platform.python_version()
    assert store.manifest.unit == "bits_per_byte"
    assert store.tokenizer.size == 256
    files = python_files(LIBRARY)
    for name in store.splits:
        split = store.split(name)
        mine = [file for file in files if split_of(file) == name and (LIBRARY / file).stat().st_size]
        assert len(split.document_starts) == len(mine)
        assert store.tokenizer.decode_bytes(split.tokens) == b"".join((LIBRARY / file).read_bytes() for file in mine)
    shares = [split.tokens for split in store.manifest.splits]
    assert sum(shares) > 4_000_000
    assert shares[0] > 5 * shares[1] > 0


def test_tests_and_what_differs_between_machines_are_left_out():
    files = python_files(LIBRARY)
    assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= set(files)
    assert not [name for name in files if {"test", "tests", "idle_test", "site-packages"} & set(name.split("/"))]
    assert not [name for name in files if name.startswith("_sysconfigdata")]
    assert files == sorted(files)


@pytest.mark.parametrize(
    ("tokens", "readable"),
    [
        (" = Robert Boulter = \n", "# Robert Boulter"),
        (" = = = Early life = = = \n", "### Early life"),
        ("a role @-@ playing game", "a role-playing game"),
        ("1 @,@ 234 @.@ 5", "1,234.5"),
        ('he said " yes " , then left .', 'he said "yes", then left.'),
        ("( a ) [ b ] ; c : d", "(a) [b]; c: d"),
        ("it 's the dogs ' and we don 't", "it's the dogs ' and we don't"),
        ("she did n't , for $ 5 or 6 %", "she didn't, for $5 or 6%"),
        (" \n a \n \n \n \n b \n", "a\n\nb"),
        ("x = y = z", "x = y = z"),
    ],
)
def test_text_for_people(tokens, readable):
    assert detokenize(tokens) == readable


@pytest.mark.processes
def test_the_data_room_needs_no_torch():
    code = "import sys; import transformer_xl.cli.prepare, transformer_xl.cli.data; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
