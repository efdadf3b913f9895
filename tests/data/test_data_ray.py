"""A text prepared by a Ray cluster: the store is that of one machine, byte for byte, also when a machine of the cluster is lost on the way."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from transformer_xl.cli import main

pytestmark = pytest.mark.timeout(600)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Lines of words of one to nine letters, two bytes each now and then; a tenth of them seen once."""
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyzé", k=draw.randint(1, 9))) for _ in range(3000)]
    file = tmp_path_factory.mktemp("ray") / "text"
    file.write_text("\n".join(" ".join(draw.choices(words, k=9)) for _ in range(70_000)), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def seen(text, tmp_path_factory) -> dict:
    pytest.importorskip("ray")
    folder = tmp_path_factory.mktemp("cluster")
    answer = subprocess.run(
        [sys.executable, Path(__file__).with_name("on_three_nodes.py"), text, folder],
        capture_output=True,
        text=True,
        env={**os.environ, **ONE_THREAD},
        start_new_session=True,
        timeout=300,
    )
    assert answer.returncode == 0, answer.stderr
    return {**json.loads(answer.stdout.splitlines()[-1]), "folder": folder}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_store_is_that_of_one_machine(seen, text, tmp_path):
    assert seen["words"][0] == 0, seen["words"]
    assert main(["prepare", str(text), "--tokenizer", "word", "--split", "1", "--out", str(tmp_path / "here")]) == 0
    assert files(seen["folder"] / "words") == files(tmp_path / "here")


def test_a_machine_lost_on_the_way_costs_no_byte(seen, text, tmp_path):
    assert seen["alive"] == 2
    assert seen["pieces"]["all"] > 2 * seen["pieces"]["before"]
    assert seen["finished pieces lost"] >= 1
    assert seen["bytes"][0] == 0, seen["bytes"]
    assert main(["prepare", str(text), "--out", str(tmp_path / "here")]) == 0
    assert files(seen["folder"] / "bytes") == files(tmp_path / "here")


def test_all_machines_work_and_the_order_is_kept(seen):
    assert seen["nodes that worked"] == 3
    assert seen["in order"]


def the_sentence(said: str) -> str:
    """The last line; where a machine is slow, lines before it say how far it is."""
    *before, sentence = said.splitlines()
    assert sentence.startswith("txl: ")
    assert not [line for line in before if not line.startswith(("encoding ", "counting ", "collecting "))]
    return sentence


def test_what_goes_wrong_on_a_worker_is_said_as_if_here(seen):
    code, said = seen["latin"]
    assert code == 2
    assert "latin is not UTF-8 at byte 3 (0xe9)" in the_sentence(said)
    code, said = seen["other version"]
    assert code == 2
    sentence = "where this machine has 0.1, and could make other tokens; install the same on all machines"
    assert sentence in the_sentence(said)
    assert seen["nothing left"]


def test_the_cluster_of_the_tests_is_for_this_machine_alone(seen):
    assert seen["listening"] == []
    assert seen["left connected"] is False


def test_small_known_corpora_do_not_ask_for_a_cluster(txl, tmp_path):
    code, _, said = txl("prepare", "enwik8", "--out", tmp_path / "out", "--engine", "ray")
    assert (code, said) == (2, "txl: enwik8 is 100 MB, which one process encodes in seconds; leave out --engine ray\n")


def test_without_ray_one_sentence_says_how_to_get_it(txl, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "text").write_text("hello\n" * 99)
    code, _, said = txl("prepare", tmp_path / "text", "--out", tmp_path / "out", "--engine", "ray")
    assert (code, said) == (2, "txl: --engine ray needs ray; install it with: pip install 'transformer-xl[ray]'\n")
    assert not (tmp_path / "out").exists()


def test_without_a_cluster_one_sentence_says_so(tmp_path):
    pytest.importorskip("ray")
    (tmp_path / "text").write_text("hello\n" * 99)
    words = ["prepare", tmp_path / "text", "--out", tmp_path / "out", "--engine", "ray"]
    answer = subprocess.run(
        [sys.executable, "-m", "transformer_xl", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "RAY_ADDRESS": "", "RAY_TMPDIR": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"},
        timeout=120,
    )
    assert answer.returncode == 2
    assert "start one with `ray start`, or name one in RAY_ADDRESS" in the_sentence(answer.stderr)
    assert not (tmp_path / "out").exists()
