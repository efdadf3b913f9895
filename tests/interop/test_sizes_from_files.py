"""Numbers that come with a file and say how large things are: compared with the tensors that are there, before anything is made that large."""

import json
import os
import resource
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from transformer_xl.checkpoint import About, RunFolder, load_checkpoint, write_checkpoint
from transformer_xl.checkpoint.folder import CHECKSUMS
from transformer_xl.config import ModelConfig, RunConfig
from transformer_xl.data.text.tokenizers import NumberTokenizer, load_tokenizer
from transformer_xl.errors import CheckpointError, DataError, ImportRefused, InputError, TransformerXLError
from transformer_xl.files import digest
from transformer_xl.inference import make_reader
from transformer_xl.interop.formats.foreign_model import Lengths
from transformer_xl.interop.formats.huggingface import (
    config_to_huggingface,
    weights_from_huggingface,
    weights_to_huggingface,
)
from transformer_xl.interop.formats.original import constructor_arguments, state_to_original
from transformer_xl.interop.importing import import_run
from transformer_xl.library import load
from transformer_xl.model import TransformerXL

HUGE = 2**31 - 2
SPARE_MEMORY = 512 << 20
"""Bytes beyond what the process has before the first case: everything here must do with them."""
CONFIG = ModelConfig(
    vocabulary=60, n_layer=2, n_head=2, d_head=4, d_model=8, d_inner=10, d_embed=6, cutoffs=(20, 40), memory=5
)
OURS = ("vocabulary", "n_layer", "n_head", "d_head", "d_model", "d_inner", "d_embed", "auxiliary_targets")
HUGGINGFACE = ("vocab_size", "n_layer", "n_head", "d_head", "d_model", "d_inner", "d_embed")
ORIGINAL = ("n_token", *HUGGINGFACE[1:])


def wrong_tables(told: dict[str, object], names: tuple[str, ...], projections: str) -> Iterator[dict[str, object]]:
    for name in names:
        yield {**told, name: HUGE}
        yield {**told, name: 4000}
    yield {**told, **dict.fromkeys(("d_model", "d_embed"), HUGE)}
    yield {**told, names[0]: 200_000, "cutoffs": list(range(1, 100_001)), projections: [False] * 100_001}
    yield {**told, names[0]: 5000, "cutoffs": list(range(1, 4001)), projections: [True] * 4001}


def huggingface_folder(place: Path) -> Iterator[str]:
    model = TransformerXL(CONFIG)
    told = config_to_huggingface(replace(CONFIG, initial_memory="zeros"))
    save_file(
        weights_to_huggingface(model.state_dict(), replace(CONFIG, initial_memory="zeros")), place / "model.safetensors"
    )
    (place / "config.json").write_text(json.dumps(told))
    yield "good"
    for table in wrong_tables(told, HUGGINGFACE, "tie_projs"):
        (place / "config.json").write_text(json.dumps(table))
        yield "wrong"


def authors_folder(place: Path) -> Iterator[str]:
    model = TransformerXL(CONFIG)
    told = constructor_arguments(CONFIG, segment=4, context=0)
    torch.save(state_to_original(model.state_dict(), CONFIG), place / "state_dict.pt")
    (place / "constructor.json").write_text(json.dumps(told))
    yield "good"
    for table in wrong_tables(told, ORIGINAL, "tie_projs"):
        (place / "constructor.json").write_text(json.dumps(table))
        yield "wrong"


def saved_folder(place: Path) -> Iterator[str]:
    model = TransformerXL(CONFIG)
    save_file({f"transformer.{name}": value for name, value in model.state_dict().items()}, place / "model.safetensors")
    told = asdict(CONFIG)
    (place / "config.json").write_text(json.dumps({"model_type": "transformer-xl", "model": told}))
    yield "good"
    for table in wrong_tables(told, OURS, "tie_projections"):
        (place / "config.json").write_text(json.dumps({"model_type": "transformer-xl", "model": table}))
        yield "wrong"


def our_checkpoint(place: Path) -> Iterator[str]:
    about = About(corpus="none", rule="none", unit="perplexity_per_word", data="", step=1)
    run, weights = RunConfig(model=CONFIG), TransformerXL(CONFIG).state_dict()
    folder = RunFolder(place / "run").checkpoint_at(1)
    tokenizer = NumberTokenizer(CONFIG.vocabulary)
    write_checkpoint(folder, config=run, about=about, weights=weights, tokenizer=tokenizer)
    yield "good"
    told, checksums = asdict(run), json.loads((folder / CHECKSUMS).read_text())
    for table in wrong_tables(told["model"], OURS, "tie_projections"):
        (folder / "config.json").write_text(json.dumps({**told, "model": table}))
        checksums["config.json"] = digest(folder / "config.json")
        (folder / CHECKSUMS).write_text(json.dumps(checksums, indent=2, sort_keys=True) + "\n")
        yield "wrong"


FOLDERS = {
    "huggingface": huggingface_folder,
    "authors": authors_folder,
    "saved": saved_folder,
    "ours": our_checkpoint,
}


def open_all(kind: str, place: Path) -> dict[str, int]:
    """Every wrong table is a sentence of ours; anything else ends this process."""
    counts = {"good": 0, "refused": 0}
    for expected in FOLDERS[kind](place):
        out = place / f"out-{sum(counts.values())}"
        try:
            if kind == "ours":
                load_checkpoint(place / "run")
            else:
                import_run(place, out, lengths=Lengths())
        except TransformerXLError as error:
            if expected == "good" or "\n" in str(error) or len(str(error)) > 1000:
                raise
            counts["refused"] += 1
        else:
            if expected == "wrong":
                raise AssertionError(f"{kind} {counts}: taken")
            counts["good"] += 1
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + SPARE_MEMORY, resource.RLIM_INFINITY))
    return counts


LIMITED = """
import json, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
import torch
torch.set_num_threads(1)
import test_sizes_from_files as sizes
for kind in sizes.FOLDERS:
    place = Path(sys.argv[1]) / kind
    place.mkdir()
    print(json.dumps(sizes.open_all(kind, place)))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@pytest.mark.timeout(300)
def test_no_number_of_a_configuration_makes_anything_large(tmp_path):
    """Four kinds of folders, each with every size wrong in turn, in a process that may take half a gigabyte more than a good one took."""
    here = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    command = [sys.executable, "-c", LIMITED, str(tmp_path), *here, *sys.path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert answer.returncode == 0, answer.stderr[-3000:]
    found = [json.loads(line) for line in answer.stdout.splitlines()]
    cases = {"huggingface": HUGGINGFACE, "authors": ORIGINAL, "saved": OURS, "ours": OURS}
    assert found == [{"good": 1, "refused": 2 * len(names) + 3} for names in cases.values()]


def test_one_tensor_under_many_names_is_not_many():
    config = replace(CONFIG, initial_memory="zeros")
    theirs = dict(weights_to_huggingface(TransformerXL(config).state_dict(), config))
    weights_from_huggingface(theirs, config)
    shared = theirs["transformer.layers.0.pos_ff.CoreNet.0.weight"]
    with pytest.raises(CheckpointError, match=r"the configuration makes [\d,]+ numbers and the checkpoint has"):
        weights_from_huggingface({**theirs, "transformer.layers.1.pos_ff.CoreNet.0.weight": shared}, config)


def test_a_memory_larger_than_the_machine_is_refused_where_it_would_be_made(tmp_path):
    """No tensor bounds it, so that the import cannot; whoever would make it says so, and how to do with less."""
    for _ in huggingface_folder(tmp_path):
        break
    told = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**told, "mem_len": HUGE}))
    import_run(tmp_path, tmp_path / "run", lengths=Lengths())
    loaded = load(tmp_path / "run")
    for use in (loaded.engine, lambda: loaded.model.start_memory(1), lambda: make_reader(loaded.model)):
        with pytest.raises(
            InputError, match=r"a memory of 2147483646 positions for 1 lanes takes .* give a smaller `memory=`"
        ):
            use()
    assert load(tmp_path / "run", memory=4).engine().memory == 4


@pytest.mark.parametrize("name", ["archive/data.pkl", "archive/data/0"])
def test_a_compressed_checkpoint_is_refused_before_it_grows(name, tmp_path):
    """torch never compresses: what is compressed was made to grow, here from 300 kB to 300 MB."""
    torch.save({"weight": torch.zeros(3)}, tmp_path / "good.pt")
    with zipfile.ZipFile(tmp_path / "good.pt") as good, zipfile.ZipFile(tmp_path / "model.pt", "w") as bomb:
        for entry in good.infolist():
            inside = "archive/" + entry.filename.partition("/")[2]
            grown = inside == name
            method = zipfile.ZIP_DEFLATED if grown else zipfile.ZIP_STORED
            bomb.writestr(inside, bytes(300 << 20) if grown else good.read(entry), compress_type=method)
    assert (tmp_path / "model.pt").stat().st_size < 1_000_000
    with pytest.raises(ImportRefused, match=f"{name} is compressed, which torch never does"):
        import_run(tmp_path / "model.pt", tmp_path / "run", lengths=Lengths())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "description",
    [
        {"kind": "byte", "values": 300_000_000, "dropped": []},
        {"kind": "byte", "values": list(range(256)), "dropped": 300_000_000},
        {"kind": "byte", "values": [1, 1], "dropped": []},
        {"kind": "char", "code_points": [97, 97], "lower": False},
        {"kind": "char", "code_points": {"97": 1}, "lower": False},
        {"kind": "char", "code_points": [97], "lower": "no"},
        {"kind": "number", "size": 10**12},
        {"kind": "number", "size": 0},
        {"kind": "number", "size": "7"},
        {"kind": ["byte"]},
    ],
    ids=lambda description: json.dumps(description)[:40],
)
def test_a_tokenizer_that_asks_for_too_much_or_for_nonsense(description, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(DataError, match=r"no tokenizer|cannot be"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "part",
    [
        {
            "padding": {
                "strategy": {"Fixed": 10**9},
                "direction": "Left",
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "a",
            }
        },
        {"truncation": {"max_length": 1, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}},
        {"normalizer": {"type": "Lowercase"}},
    ],
    ids=lambda part: next(iter(part)),
)
def test_byte_pairs_have_no_parts_but_their_own(part, tmp_path):
    from transformer_xl.data.text.tokenizers import BytePairTokenizer

    BytePairTokenizer.learn(iter(["some text " * 50]), size=260, lower=False, show=False).save(tmp_path)
    assert load_tokenizer(tmp_path).size >= 256
    table = json.loads((tmp_path / "bpe.json").read_text())
    (tmp_path / "bpe.json").write_text(json.dumps({**table, **part}))
    with pytest.raises(DataError, match=f"its {next(iter(part))} (is none|has type 'Split')"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_of_another_size_than_the_model_is_refused(tmp_path):
    for _ in our_checkpoint(tmp_path):
        break
    folder = RunFolder(tmp_path / "run").checkpoint_at(1)
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps({"kind": "number", "size": 61}))
    checksums = json.loads((folder / CHECKSUMS).read_text())
    checksums["tokenizer/tokenizer.json"] = digest(folder / "tokenizer" / "tokenizer.json")
    (folder / CHECKSUMS).write_text(json.dumps(checksums, indent=2, sort_keys=True) + "\n")
    with pytest.raises(CheckpointError, match=r"has 61 tokens where config\.json says 60"):
        load_checkpoint(folder)
