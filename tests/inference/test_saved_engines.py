"""Saved engines come from files that anybody may have written: what cannot have been saved by this model is refused before an engine is made of it."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from small_models import build, random_tokens
from transformer_xl.config import RecurrentConfig
from transformer_xl.errors import CheckpointError
from transformer_xl.inference import Engine, make_reader, restore_reader
from transformer_xl.model import build_model
from transformer_xl.tensor_files import write_tensors

READ = 4


@pytest.fixture
def path(tmp_path):
    return tmp_path / "engine.safetensors"


def saved(path, model, *, lanes=1, tokens=READ):
    engine = make_reader(model, lanes=lanes)
    if tokens:
        engine.read(random_tokens(model, lanes=lanes, length=tokens))
    engine.save(path)
    return load_file(path)


def metadata_of(path):
    with safe_open(path, framework="pt") as file:
        return {name: value for name, value in (file.metadata() or {}).items() if name != "sha256"}


def with_value(tensor, value):
    changed = tensor.clone()
    changed.view(-1)[0] = value
    return changed


def recurrent():
    torch.manual_seed(0)
    return build_model(RecurrentConfig(vocabulary=13, cell="lstm", n_layer=2, d_model=8, d_hidden=6)).double().eval()


WRONG = {
    "far below": ("valid", lambda t: with_value(t, -(2**40)), "valid is"),
    "more than there is": ("valid", lambda t: with_value(t, 2**33), "valid is"),
    "more than was read": ("valid", lambda t: with_value(t, 5), "valid is"),
    "fewer than were read": ("valid", lambda t: with_value(t, 1), "valid is"),
    "valid of another type": ("valid", lambda t: t.double(), "valid holds float64 where int64"),
    "read nothing yet, less": ("read", lambda t: with_value(t, -1), "read is -1 in lane 0"),
    "read too much": ("read", lambda t: with_value(t, 2**63 - 1), "read is 9223372036854775807"),
    "lanes of another number": ("read", lambda t: t.repeat(3), r"has shape \[1, 2, 6, 3\] where this model asks for"),
    "read without lanes": ("read", lambda t: t[:0], "does not say what each lane has read"),
    "a narrow last state": ("last_hidden", lambda t: t[:, :1], r"last_hidden has shape \[1, 1\]"),
    "no last state": ("last_hidden", None, "lacks last_hidden"),
    "a last state of another type": ("last_hidden", lambda t: t.float(), "last_hidden holds float32 where float64"),
    "a last state that is no number": (
        "last_hidden",
        lambda t: with_value(t, float("nan")),
        "last_hidden holds numbers",
    ),
    "keys of another type": ("keys.1", lambda t: t.float(), "keys.1 holds float32 where float64"),
    "keys of another length": ("keys.1", lambda t: t[:, :, :2], r"keys.1 has shape \[1, 2, 2, 3\]"),
    "values of another width": ("values.0", lambda t: t[..., :1], r"values.0 has shape \[1, 2, 6, 1\]"),
    "infinite values": ("values.0", lambda t: with_value(t, float("inf")), "values.0 holds numbers"),
    "a layer too few": ("values.1", None, "lacks the tensor values.1"),
    "something else": ("keys.7", lambda t: torch.zeros(1), "has a tensor keys.7 that this model does not know"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("checksum", [True, False])
def test_engines_that_cannot_have_been_saved_are_refused(wrong, checksum, path):
    """With a checksum that is right for what was written, and as older files are, without one."""
    model = build(memory=6)
    tensors = saved(path, model)
    name, change, said = WRONG[wrong]
    changed = {**tensors, name: tensors.get(name)}
    del changed[name]
    if change is not None:
        changed[name] = change(tensors.get(name)).contiguous()
    if checksum:
        write_tensors(path, changed, metadata=metadata_of(path))
    else:
        save_file(changed, path, metadata=metadata_of(path))
    with pytest.raises(CheckpointError, match=said):
        Engine.restore(model, path)


@pytest.mark.parametrize("model", [build(memory=6, initial_memory="zeros"), recurrent()])
def test_no_kind_of_engine_takes_what_it_cannot_have(model, path):
    tensors = saved(path, model)
    first = "state.layer_0" if "state.layer_0" in tensors else "keys.0"
    wrong = {"read": torch.tensor([-1]), first: tensors[first].float(), "last_hidden": tensors["last_hidden"][:, :1]}
    wrong |= {first: tensors[first] * float("nan")} | ({"valid": torch.tensor([READ])} if "valid" in tensors else {})
    for name, value in wrong.items():
        write_tensors(path, {**tensors, name: value.contiguous()}, metadata=metadata_of(path))
        with pytest.raises(CheckpointError, match=name):
            restore_reader(model, path)


def test_damage_is_found_by_the_files_own_checksum(path):
    model = build(memory=6)
    saved(path, model)
    good = path.read_bytes()
    path.write_bytes(good[:-3] + bytes([good[-3] ^ 1]) + good[-2:])
    with pytest.raises(CheckpointError, match=r"engine.safetensors is damaged \(its checksum is another\)"):
        Engine.restore(model, path)
    path.write_bytes(good.replace(b'"sha256"', b'"sha257"'))
    with pytest.raises(CheckpointError, match="a field sha257 in its header that is none of ours"):
        Engine.restore(model, path)
    path.write_bytes(good.replace(b'"read"', b'"raed"'))
    with pytest.raises(CheckpointError, match="does not say what each lane has read"):
        Engine.restore(model, path)


@pytest.mark.parametrize("model", [build(memory=6), recurrent()])
def test_a_file_of_before_checksums_is_taken_if_everything_fits(model, path):
    tokens = random_tokens(model, lanes=1, length=9)
    tensors = saved(path, model)
    newer = restore_reader(model, path).score(tokens)
    save_file(tensors, path, metadata=metadata_of(path) or None)
    assert torch.equal(restore_reader(model, path).score(tokens), newer)


def test_lanes_memory_and_sight_are_those_asked_for(path):
    model = build(memory=6)
    saved(path, model, lanes=2)
    with pytest.raises(CheckpointError, match="has 2 lanes where 1 are asked for; give lanes=2"):
        restore_reader(model, path, lanes=1)
    with pytest.raises(
        CheckpointError, match=r"keys.0 has shape \[2, 2, 6, 3\] where this model asks for \[2, 2, 9, 3\]"
    ):
        restore_reader(model, path, memory=9)
    with pytest.raises(CheckpointError, match="saved under the rule of sight 'last', not 'segment'"):
        Engine.restore(model, path, sight="segment")
    Engine(model, memory=9, sight="segment").save(path)
    assert Engine.restore(model, path, memory=9, sight="segment").memory == 9


def test_lanes_that_no_machine_has_room_for_are_a_sentence(path):
    """A lane without memory takes sixteen bytes of the file, and a buffer here."""
    model = build(memory=0, d_head=3000, n_head=64)
    lanes = 1 << 18
    nothing = torch.zeros(lanes, 64, 0, 3000, dtype=torch.float64)
    kept = {f"{part}.{number}": nothing.clone() for part in ("keys", "values") for number in range(2)}
    counts = {"valid": torch.zeros(lanes, dtype=torch.int64), "read": torch.zeros(lanes, dtype=torch.int64)}
    write_tensors(path, {**kept, **counts}, metadata={"sight": "last"})
    with pytest.raises(CheckpointError, match="has 262,144 lanes, for which there is no memory here"):
        Engine.restore(model, path)


def test_a_reader_that_joins_one_that_has_read_nothing_keeps_what_it_predicts_from():
    model = build(memory=6)
    tokens = random_tokens(model, lanes=1, length=12)
    alone = make_reader(model)
    alone.read(tokens[:, :READ])
    both = Engine.joined([alone, make_reader(model)])
    scores = both.score(tokens[:, READ:].expand(2, -1))
    torch.testing.assert_close(scores[:1], alone.score(tokens[:, READ:]), rtol=0, atol=1e-10)
