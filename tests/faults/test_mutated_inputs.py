"""Thousands of damaged files through every door that text, vocabularies, tokenizers and foreign configurations come in by: used, or refused in a sentence."""

import bz2
import gzip
import io
import json
import lzma
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mutations import mutated, mutated_table

LONGEST_SECONDS = 5
TEXT = b" a b c \n d e \n caf\xc3\xa9 \n" * 40
NAMES = ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt")
Door = Callable[[random.Random, Path], None]


class TooLong(BaseException):
    """Nothing in the library catches this one."""


# --- archives


def zipped(method: int) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as archive:
        for name in NAMES:
            archive.writestr(f"folder/{name}", TEXT)
    return made.getvalue()


def tarred(mode: str, form: int) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode=mode, format=form) as archive:
        for name in NAMES:
            member = tarfile.TarInfo(f"{'long' * 40}/{name}")
            member.size = len(TEXT)
            archive.addfile(member, io.BytesIO(TEXT))
    return made.getvalue()


def archives() -> list[bytes]:
    return [
        gzip.compress(TEXT),
        lzma.compress(TEXT),
        bz2.compress(TEXT),
        *(zipped(method) for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)),
        tarred("w", tarfile.GNU_FORMAT),
        tarred("w", tarfile.PAX_FORMAT),
        *(tarred(f"w:{kind}", tarfile.PAX_FORMAT) for kind in ("gz", "bz2", "xz")),
    ]


ARCHIVES = archives()


def own_text(chance: random.Random, place: Path) -> None:
    from transformer_xl.data.corpora.own_text import OwnText, prepare_own_text

    path = place / "text"
    path.write_bytes(mutated(chance.choice(ARCHIVES), chance))
    prepare_own_text([path], out=place / "out", settings=OwnText(tokenizer=chance.choice(("byte", "char"))))


def known_corpus(chance: random.Random, place: Path) -> None:
    from transformer_xl.data.corpora.recipes import PTB
    from transformer_xl.data.corpora.sources import find_known

    path = place / "text"
    path.write_bytes(mutated(chance.choice(ARCHIVES), chance))
    (place / "scratch").mkdir()
    files = tuple(replace(file, bytes=len(TEXT) + 100, md5=None) for file in PTB.files[: chance.choice((1, 3))])
    for found in find_known(files, source=path, scratch=place / "scratch").values():
        for source in found:
            source.read()


# --- vocabularies and tokenizers


def vocabulary(chance: random.Random, place: Path) -> None:
    from transformer_xl.data.corpora.vocabulary import read_vocabulary
    from transformer_xl.interop.importing import read_vocabulary_file

    strange = ["9" * 5000, "²", "٣", "-1", "1e9", "0x10", "\0", "", "<eos>", "255", "256", "\u2028"]
    words = ["<eos>", "<unk>", *(str(n) for n in range(20))] if chance.random() < 0.5 else [str(n) for n in range(256)]
    counted = chance.random() < 0.5
    lines = [f"{word} {chance.choice((n, *strange))}" if counted else word for n, word in enumerate(words)]
    lines[chance.randrange(len(lines))] = chance.choice(strange)
    text = "\n".join(lines).encode() + b"\n"
    path = place / "vocab.txt"
    path.write_bytes(text if chance.random() < 0.5 else mutated(text, chance))
    refused = 0
    for read in (lambda: read_vocabulary(path, specials=("<eos>",)), lambda: read_vocabulary_file(path, scratch=place)):
        refused += bool(said(read))
    if refused == 2:
        read()


def tokenizer(chance: random.Random, place: Path) -> None:
    from transformer_xl.data.text.tokenizers import (
        BytePairTokenizer,
        ByteTokenizer,
        CharTokenizer,
        WordTokenizer,
        load_tokenizer,
    )

    made = chance.choice(
        (
            lambda: ByteTokenizer(b"abc"),
            lambda: CharTokenizer("abc\u00e9"),
            lambda: WordTokenizer(["<eos>", "a", "b"]),
            lambda: BytePairTokenizer.learn(iter(["some text"]), size=260, lower=False, show=False),
        )
    )()
    made.save(place)
    path = chance.choice(sorted(place.iterdir()))
    if path.suffix == ".json" and chance.random() < 0.5:
        path.write_text(json.dumps(mutated_table(json.loads(path.read_text()), chance)[1]))
    else:
        path.write_bytes(mutated(path.read_bytes(), chance))
    loaded = load_tokenizer(place)
    loaded.decode(loaded.encode(" ".join("abc")))


# --- foreign configurations and optimisers


def huggingface(chance: random.Random, place: Path) -> None:
    from safetensors.torch import save_file

    from transformer_xl.config import ModelConfig
    from transformer_xl.interop.formats.foreign_model import Lengths
    from transformer_xl.interop.formats.huggingface import config_to_huggingface, weights_to_huggingface
    from transformer_xl.interop.importing import read_model
    from transformer_xl.interop.sources import find_source
    from transformer_xl.model import TransformerXL

    sizes = {"vocabulary": 60, "n_layer": 2, "n_head": 2, "d_head": 4, "d_model": 8, "d_inner": 10, "d_embed": 6}
    config = ModelConfig(**sizes, cutoffs=(20, 40), memory=5, initial_memory="zeros")
    save_file(weights_to_huggingface(TransformerXL(config).state_dict(), config), place / "model.safetensors")
    table = config_to_huggingface(config)
    for _ in range(chance.choice((1, 1, 2, 5))):
        table = mutated_table(table, chance)[1] or table
    text = json.dumps(table)
    if chance.random() < 0.2:
        text = chance.choice(
            (text.replace(": 8", ": " + "9" * 5000), "[" * 100_000, mutated(text.encode(), chance).decode("latin-1"))
        )
    (place / "config.json").write_text(text, encoding="utf-8")
    read_model(find_source(place), lengths=Lengths(), scratch=place)


def optimiser(chance: random.Random, place: Path) -> None:
    import torch

    from transformer_xl.interop.formats.original import optimiser_state

    group = {"amsgrad": False, "betas": [0.9, 0.999], "eps": 1e-8, "lr": 0.1, "weight_decay": 0.0, "momentum": 0.0}
    facts = {"groups": [mutated_table(group, chance)[1]], "parameters": 1, "others": []}
    strange = (3, 3.0, float("nan"), float("inf"), -1, 10**30, 10**400, True, 1e300)
    tensors = {"0.exp_avg": torch.zeros(2)}
    if chance.random() < 0.5:
        value = chance.choice((float("nan"), float("inf"), 1e300, -1.0, 2.0))
        kind = chance.choice((torch.float32, torch.float64, torch.float16, torch.int64, torch.bool))
        tensors["0.step"] = torch.tensor(value if kind.is_floating_point else 7).to(kind)
    steps = {"0": chance.choice(strange)} if chance.random() < 0.7 else {}
    optimiser_state({**facts, "steps": steps}, tensors, order=["w"], mapped=lambda theirs: theirs, called=None)


DOORS: dict[str, Door] = {
    "own_text": own_text,
    "known_corpus": known_corpus,
    "vocabulary": vocabulary,
    "tokenizer": tokenizer,
    "huggingface": huggingface,
    "optimiser": optimiser,
}


# --- the campaign


def said(door: Callable[[], object]) -> str:
    """The sentence of a refusal; empty for what was taken. Anything else ends this process."""
    from transformer_xl.errors import TransformerXLError

    try:
        door()
    except TransformerXLError as error:
        sentence = str(error)
        if not sentence or "\n" in sentence or len(sentence) > 2010:
            raise AssertionError(f"no sentence: {sentence[:3000]!r}") from error
        return sentence
    return ""


def go_through(name: str, count: int, seed: int, folder: Path) -> dict[str, float]:
    outcomes, slowest = Counter(), 0.0
    os.fsync = lambda descriptor: None  # whether it reaches the disk is not asked here
    for number in range(count):
        place = folder / name
        place.mkdir()
        begun = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, LONGEST_SECONDS)
        try:
            sentence = said(lambda: DOORS[name](random.Random(seed * 1_000_000 + number), place))  # noqa: B023
        except BaseException:
            print(f"{name}, case {number} of seed {seed}", file=sys.stderr)
            raise
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        outcomes["refused" if sentence else "taken"] += 1
        slowest = max(slowest, time.process_time() - begun)
        shutil.rmtree(place)
    return {**outcomes, "slowest_seconds": round(slowest, 3)}


LIMITED = """
import json, resource, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[4:]
import torch
torch.set_num_threads(1)
import transformer_xl.console
transformer_xl.console.be_quiet()
import test_mutated_inputs as inputs
def stop(*_): raise inputs.TooLong
signal.signal(signal.SIGPROF, stop)
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
for name, count in json.loads(sys.argv[1]).items():
    print(json.dumps({"door": name, **inputs.go_through(name, count, int(sys.argv[2]), Path(sys.argv[3]))}))
"""


def run_mutations(counts: dict[str, int], seed: int, folder: Path) -> None:
    """In a process of its own with limits: a crash of the interpreter is seen, and so is a file that asks for too much."""
    here = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    command = [sys.executable, "-c", LIMITED, json.dumps(counts), str(seed), str(folder), *here, *sys.path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    answer = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert answer.returncode == 0, answer.stderr[-3000:]
    found = [json.loads(line) for line in answer.stdout.splitlines()]
    assert [each["door"] for each in found] == list(counts)
    for each in found:
        assert each.get("taken", 0) + each.get("refused", 0) == counts[each["door"]]
        assert each["door"] == "optimiser" or each["refused"] > counts[each["door"]] // 10
    print(found)


def test_damaged_inputs_are_taken_or_refused(tmp_path):
    run_mutations(dict.fromkeys(DOORS, 60), 1, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("door", DOORS)
def test_thousands_of_damaged_inputs_are_taken_or_refused(door, tmp_path):
    run_mutations({door: 3000}, 2, tmp_path)
