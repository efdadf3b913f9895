"""The cases of the campaigns: a file of ours changed by chance, read through the door that everybody uses, and whatever is read is put to work."""

import hashlib
import json
import random
import re
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import torch
from campaign import Case

from mutations import mutated, mutated_table
from tensor_mutations import mutated_safetensors, mutated_tensors, parse, serialise
from transformer_xl.checkpoint import Checkpoint, RunFolder, load_checkpoint
from transformer_xl.checkpoint.folder import CHECKSUMS, read_config
from transformer_xl.data.store import open_store
from transformer_xl.decoding import Sampling, generate
from transformer_xl.errors import TransformerXLError
from transformer_xl.files import digest
from transformer_xl.inference import Reader, make_reader, restore_reader
from transformer_xl.model import AnyModel, Recurrent
from transformer_xl.model.protocol import NOT_FINITE
from transformer_xl.tensor_files import CHECKSUM
from transformer_xl.training.resuming import start_or_resume
from transformer_xl.training.session import Session
from transformer_xl.training.step import take_step

NAMES_A_TENSOR = re.compile(r"tensor \w+(\.\w+)+ that config.json|\w+(\.\w+)+ has shape .* where config.json")
"""A field that is possible, but not that of the weights, shows in the first tensor that is not as it would have it."""
TEXT = b"def f(self, other):\n    return self.value == other.value\n"


def in_a_sentence(attempt: Callable[[], object], *, about: str) -> str:
    """What it was refused with, empty where it was not; any other end is raised. The sentence is one line, and names what it is about."""
    try:
        attempt()
    except TransformerXLError as error:
        said = str(error)
        assert len(said.splitlines()) == 1, repr(said)
        assert re.search(about, said), said
        return said
    return ""


def put_to_work(model: AnyModel, chance: random.Random) -> str:
    """Text is scored and written, now and then with rounded weights, and now and then learned from."""
    tokens_BT = torch.tensor([list(TEXT)]) % model.config.vocabulary
    plain = isinstance(model, Recurrent) or not model.config.remembers or model.vocabulary.bias_V.dtype != torch.float32
    weights = "exact" if plain or chance.random() < 0.75 else "int8"

    def work() -> None:
        make_reader(model, weights=weights).score(tokens_BT)
        sampling = Sampling(
            temperature=chance.choice((0.0, 1.0)), top_k=chance.choice((0, 5)), seed=chance.randrange(9)
        )
        assert len(list(generate(model, tokens_BT[0, :5].numpy(), tokens=8, sampling=sampling, weights=weights))) == 8
        output = model(tokens_BT[:, :-1], targets_BT=tokens_BT[:, 1:])
        with torch.no_grad():
            model(tokens_BT, memory=output.memory)
        if chance.random() < 0.2:
            output.loss_BT.sum().backward()

    return "ran" if not in_a_sentence(work, about=re.escape(NOT_FINITE)) else "ran, but not finite"


class Folder:
    """A checkpoint of which one file at a time is changed, with checksums that are right or, for one case in ten, are not."""

    def __init__(self, path: Path, *, changing: tuple[str, ...]) -> None:
        self.path, self.changing = path, changing
        self.checksums = json.loads((path / CHECKSUMS).read_text())
        self.good = {name: (path / name).read_bytes() for name in self.checksums}

    def put(self, name: str, data: bytes, *, honest: bool = True) -> None:
        for each in self.changing:  # those of an earlier case, too, whatever became of it
            (self.path / each).write_bytes(data if each == name else self.good[each])
        told = {**self.checksums, name: digest(self.path / name)} if honest else self.checksums
        (self.path / CHECKSUMS).write_text(json.dumps(told, indent=2, sort_keys=True) + "\n")


def changed_tensors(good: bytes, chance: random.Random) -> bytes:
    """Mostly files in which no parser finds anything wrong."""
    if chance.random() < 0.25:
        return mutated_safetensors(good, chance)
    tensors, metadata = parse(good)
    return serialise(mutated_tensors(tensors, chance), metadata, padding=chance.choice((0, 0, 0, 1, 2, 3, 4, 5, 7)))


def weights(place: str) -> Case:
    name = "model.safetensors"
    folder = Folder(Path(place), changing=(name,))
    put_to_work(load_checkpoint(place).model, random.Random(0))  # so that children need not load what only work needs

    def case(chance: random.Random) -> str:
        honest, data = chance.random() < 0.9, changed_tensors(folder.good[name], chance)
        folder.put(name, data, honest=honest)
        loaded: list[Checkpoint] = []
        if in_a_sentence(lambda: loaded.append(load_checkpoint(folder.path)), about=name):
            return "refused"
        assert honest or data == folder.good[name], "damage was not found"
        return put_to_work(loaded[0].model, chance)

    return case


def tables(place: str) -> Case:
    """config.json and about.json."""
    folder = Folder(Path(place), changing=("config.json", "about.json"))

    def case(chance: random.Random) -> str:
        name, key = chance.choice(("config.json", "config.json", "about.json")), ""
        if chance.random() < 0.5:
            data = mutated(folder.good[name], chance)
        else:
            key, table = mutated_table(json.loads(folder.good[name]), chance)
            data = json.dumps(table).encode()
        honest = chance.random() < 0.9
        folder.put(name, data, honest=honest)
        loaded: list[Checkpoint] = []
        said = in_a_sentence(lambda: loaded.append(load_checkpoint(folder.path)), about=re.escape(name))
        if said:
            assert not (key and honest) or key in said or NAMES_A_TENSOR.search(said), f"{key}: {said}"
            return "refused"
        assert honest or data == folder.good[name], "damage was not found"
        return "loaded"

    return case


def engines(place: str, *runs: str) -> Case:
    """Engines of several kinds of model, saved in the middle of a text. Restored, they score, write, and go on beside others."""
    path = Path(place) / "engine.safetensors"
    saved: list[tuple[AnyModel, bytes]] = []
    for run in runs:
        recurrent = read_config(RunFolder(run).chosen_checkpoint() / "config.json").model.recurrent
        for changes in ({},) if recurrent else ({}, {"same_length": True}, {"memory": 5}):
            model = load_checkpoint(run).model
            model.set_lengths(**changes)
            for lanes, tokens in ((1, 30), (2, 3), (1, 0)):
                engine = make_reader(model, lanes=lanes)
                if tokens:
                    engine.read(torch.tensor([list(TEXT[:tokens])] * lanes))
                engine.save(path)
                saved.append((model, path.read_bytes()))

    def case(chance: random.Random) -> str:
        model, good = chance.choice(saved)
        data = changed_engine(good, chance)
        path.write_bytes(data)
        restored: list[Reader] = []
        if in_a_sentence(lambda: restored.append(restore_reader(model, path)), about=path.name):
            return "refused"
        (engine,) = restored
        lanes, text_BT = engine.lanes, torch.tensor([list(TEXT)]).expand(engine.lanes, -1)

        def work() -> None:
            engine.fork().score(text_BT)
            engine.feed(text_BT[:, :1])
            both = engine.joined([engine, make_reader(model)])
            both.read(torch.cat([text_BT, text_BT[:1]])[:, :7])
            both.save(path)
            assert restore_reader(model, path, lanes=lanes + 1).lanes == lanes + 1

        return "ran" if not in_a_sentence(work, about=re.escape(NOT_FINITE)) else "ran, but not finite"

    return case


def changed_engine(good: bytes, chance: random.Random) -> bytes:
    """With a checksum that is right for what was changed, with none (as older ones are), or with the old one."""
    if chance.random() < 0.15:
        return mutated_safetensors(good, chance)
    tensors, metadata = parse(good)
    changed, told = mutated_tensors(tensors, chance), dict(metadata)
    if chance.random() < 0.1:
        told[chance.choice(("sight", "sha256", "other"))] = chance.choice(("segment", "last", "", "x" * 64))
    kind = chance.random()
    if kind < 0.6:
        del told[CHECKSUM]
        told[CHECKSUM] = own_checksum(serialise(changed, told))
    elif kind < 0.8:
        told.pop(CHECKSUM, None)
    return serialise(changed, told, padding=chance.choice((0, 0, 1, 4)))


def own_checksum(data: bytes) -> str:
    """As our own files have it, of a file without one; computed here from its bytes alone."""
    from transformer_xl.tensor_files import DTYPES

    tensors, metadata = parse(data)
    kinds = [[name, str(DTYPES.get(one.dtype, one.dtype)), list(one.shape)] for name, one in sorted(tensors.items())]
    found = hashlib.sha256(json.dumps([sorted(metadata.items()), kinds]).encode())
    for _, one in sorted(tensors.items()):
        found.update(one.data)
    return found.hexdigest()


def training(store_folder: str, *runs: str) -> Case:
    """Training states of several kinds of run. Whatever is resumed takes a step."""
    store = open_store(store_folder)
    files = ("training.safetensors", "training.json")
    folders = [Folder(RunFolder(run).checkpoint_at(RunFolder(run).steps()[-1]), changing=files) for run in runs]
    configs = [read_config(folder.path / "config.json") for folder in folders]

    def resume(number: int) -> Session:
        run, folder = RunFolder(runs[number]), folders[number].path
        with redirect_stderr(StringIO()):
            return start_or_resume(run, configs[number], store=store, resume=str(folder), device=torch.device("cpu"))

    for number in range(len(runs)):  # so that children need not load what only training needs
        session = resume(number)
        assert take_step(session, session.lanes.next()).taken

    def case(chance: random.Random) -> str:
        number, name = chance.randrange(len(runs)), chance.choice(("training.safetensors", *files))
        good = folders[number].good[name]
        if name == "training.json":
            data = json.dumps(mutated_table(json.loads(good), chance)[1]).encode()
        else:
            data = changed_tensors(good, chance)
        folders[number].put(name, data)
        resumed: list[Session] = []
        if in_a_sentence(lambda: resumed.append(resume(number)), about=r"training\.(json|safetensors)"):
            return "refused"
        (session,) = resumed
        return "ran" if take_step(session, session.lanes.next()).taken else "ran, but not finite"

    return case
