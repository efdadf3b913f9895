"""What tests of several rooms share: one thread, a small store of real bytes and of real words, and a small trained run.

`make quick` runs what stays in its process and takes little: neither slow, nor thorough, nor processes. That it stays there is held here.
"""

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from small_run import SMALL, prepare
from transformer_xl import native
from transformer_xl.config import EvaluationConfig, RecurrentConfig, RunConfig
from transformer_xl.data.store import Store
from transformer_xl.training import train

TESTS = Path(__file__).parent
PROCESSES = (
    *("benchmarks/*", "test_docs.py", "test_cli.py", "test_notebook.py", "test_package.py", "test_systems.py"),
    *("faults/test_killed_*", "faults/test_failing_disks.py", "faults/test_locales.py", "faults/test_mutated_*"),
    *("faults/test_replaced_folders.py", "faults/test_same_bits.py", "faults/test_source_gate.py"),
    *(
        "interop/*",
        "native/test_building.py",
        "native/test_tiles.py",
        "native/test_compiled_tiles.py",
        "training/test_ranks.py",
        "training/test_rank_work.py",
        "training/test_shards.py",
        "training/test_cluster_scripts.py",
        "training/test_large_presets.py",
    ),
    *("data/test_data_bad_input.py", "data/test_data_bombs.py", "data/test_data_pieces.py", "data/test_data_ray.py"),
    "data/test_data_remote.py",
)
THOROUGH = (
    *(
        "studies/*",
        "doctor/*",
        "huggingface/*",
        "faults/*",
        "training/test_footprint.py",
        "analysis/test_recl_command.py",
    ),
    "data/test_data_corpora.py",
)
ALONE = (
    *("serving/test_page*", "serving/test_requests_given_up.py", "serving/test_stays_responsive.py"),
    *("serving/test_threads_and_memory.py", "serving/test_under_load.py"),
)
"""By file below this folder; what is marked where it stands, is marked there."""
LONGEST_FIRST = (
    *(
        "test_docs.py",
        "training/test_ranks.py",
        "training/test_rank_work.py",
        "training/test_shards.py",
        "training/test_cluster_scripts.py",
        "data/test_data_ray.py",
        "faults/test_mutated_checkpoints.py",
        "benchmarks/*",
    ),
    *("faults/test_killed_*", "data/test_data_corpora.py", "interop/test_exports.py", "huggingface/*", "faults/*"),
    *("studies/*", "training/*", "test_cli.py", "test_package.py", "interop/*", "data/*", "serving/*"),
)
"""By processor time. What is long and begins last keeps one core busy while the other has nothing left."""
STARTS = {"subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec", "pty.spawn"}
quick = {"watched": False}


def pytest_configure(config):
    quick["config"] = "not processes" in (config.getoption("markexpr") or "")
    if quick["config"]:
        native.library()  # built by a compiler, where nobody has built it yet
        sys.addaudithook(_watch)


def pytest_collection_modifyitems(items):
    for item in items:
        where = item.path.relative_to(TESTS)
        for mark, files in (("processes", PROCESSES), ("thorough", THOROUGH), ("alone", ALONE)):
            if any(where.match(pattern) for pattern in files):
                item.add_marker(mark)
    order = {path: _place(path) for path in {item.path for item in items}}
    items.sort(key=lambda item: order[item.path])


def _place(path):
    where = path.relative_to(TESTS)
    return next((place for place, pattern in enumerate(LONGEST_FIRST) if where.match(pattern)), len(LONGEST_FIRST))


def _watch(event, arguments):
    if quick["watched"] and event in STARTS:
        raise AssertionError(f"this test starts a process ({arguments[0]}); mark it with pytest.mark.processes")


@pytest.fixture(autouse=True)
def stays_in_its_process():
    quick["watched"] = quick["config"]
    yield
    quick["watched"] = False


# Small tensors gain nothing from more threads, and results do not depend on the machine's cores. The same for processes that tests start: where two
# of them each have as many threads as there are cores, these wait for each other by turning in circles, and minutes pass. Tests of several threads
# ask for them by name, and those wait asleep.
torch.set_num_threads(1)
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


@pytest.fixture(scope="session")
def byte_store(tmp_path_factory) -> Store:
    folder = tmp_path_factory.mktemp("bytes")
    shutil.copy(Path(json.__file__).parent / "decoder.py", folder / "text.txt")
    return prepare(folder / "text.txt", folder / "store", "byte")


@pytest.fixture(scope="session")
def word_store(tmp_path_factory) -> Store:
    folder = tmp_path_factory.mktemp("words")
    shutil.copy(Path(json.__file__).parent / "__init__.py", folder / "text.txt")
    return prepare(folder / "text.txt", folder / "store", "word")


@pytest.fixture(scope="session")
def word_config(word_store) -> RunConfig:
    return replace(SMALL, model=replace(SMALL.model, vocabulary=word_store.manifest.vocabulary_size, cutoffs=(20, 60)))


@pytest.fixture(scope="session")
def trained_run(byte_store, tmp_path_factory) -> Path:
    """A run of twenty steps; read it, never write over it."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    train(SMALL, store=byte_store, folder=folder, command="txl train small")
    return folder


@pytest.fixture(scope="session")
def recurrent_run(byte_store, tmp_path_factory) -> Path:
    """An LSTM of a few steps; read it, never write over it."""
    model = RecurrentConfig(vocabulary=256, cell="lstm", n_layer=2, d_model=16, d_hidden=20)
    training = replace(SMALL.training, steps=3)
    folder = tmp_path_factory.mktemp("runs") / "lstm"
    config = RunConfig(model=model, training=training, evaluation=EvaluationConfig(segment=12))
    train(config, store=byte_store, folder=folder, command="txl train lstm")
    return folder


@pytest.fixture(scope="module")
def without_pictures(trained_run):
    """Drawing takes longer than the smallest runs, and changes no weight. The run that everybody shares is made first, with its picture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformer_xl.training.loop.draw_curve", lambda run, unit: None)
        yield
