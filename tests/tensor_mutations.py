"""Safetensors files changed by chance that are still safetensors files: types, shapes, values and names, which no parser finds anything wrong with."""

import json
import math
import random
from dataclasses import dataclass, replace

import numpy as np

from mutations import mutated, mutated_table

NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1"}
NUMPY |= {"BOOL": "?"}
OTHERS = {"BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "U32": 4, "U64": 8}
SIZES = {**{name: np.dtype(kind).itemsize for name, kind in NUMPY.items()}, **OTHERS}
VALUES = (math.nan, math.inf, -math.inf, 3e38, -3e38, 6e4, 1e-42, 5e-324, 0.0, -0.0, -1.0, 1.0)
WHOLE = (-(2**63), -(2**40), -1, 0, 1, 2, 7, 2**31, 2**33, 2**62, 2**63 - 1)
STRANGE_NAMES = (
    "",
    "x",
    "layers",
    "layers.",
    "layers.0",
    "weight",
    "\n",
    "\x1b[31m",
    "a" * 3000,
    "__metadata",
    "\u202e",
)


@dataclass(frozen=True)
class Raw:
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def parse(data: bytes) -> tuple[dict[str, Raw], dict[str, str]]:
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    metadata = header.pop("__metadata__", {})
    body = data[end:]
    return {
        name: Raw(told["dtype"], tuple(told["shape"]), body[slice(*told["data_offsets"])])
        for name, told in header.items()
    }, metadata


def serialise(tensors: dict[str, Raw], metadata: dict[str, str], *, padding: int = 0) -> bytes:
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    begin = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, begin + len(tensor.data)]}
        begin += len(tensor.data)
    text = json.dumps(header).encode() + b" " * padding
    return len(text).to_bytes(8, "little") + text + b"".join(tensor.data for tensor in tensors.values())


def mutated_tensors(tensors: dict[str, Raw], chance: random.Random) -> dict[str, Raw]:
    """One or two changes."""
    changed = dict(tensors)
    for _ in range(chance.choice((1, 1, 1, 2))):
        change = chance.choice((_other_dtypes, _other_shape, _other_values, _other_values, _other_names))
        changed = change(changed, chance)
    return changed


def mutated_safetensors(good: bytes, chance: random.Random) -> bytes:
    """Damage that a parser may find: mostly in the header, where everything that can be wrong stands; or anywhere."""
    end = 8 + int.from_bytes(good[:8], "little")
    match chance.randrange(3):
        case 0:
            return mutated(good, chance)
        case 1:
            return mutated(good[:end], chance) + good[end:]
        case _:
            _, table = mutated_table(json.loads(good[8:end]), chance)
            header = json.dumps(table).encode()
            return len(header).to_bytes(8, "little") + header + good[end:]


def _chosen(tensors: dict[str, Raw], chance: random.Random) -> list[str]:
    """One, those of one kind, all but one, or all."""
    names = sorted(tensors)
    if not names:
        return []
    one = chance.choice(names)
    alike = [name for name in names if len(tensors[name].shape) == len(tensors[one].shape)]
    return chance.choice(([one], [one], alike, [name for name in names if name != one], names))


def _other_dtypes(tensors: dict[str, Raw], chance: random.Random) -> dict[str, Raw]:
    """The same numbers as another type, or the same bytes called another type."""
    dtype = chance.choice((*NUMPY, *OTHERS, "BF16", "F16", "F64"))
    recast = chance.random() < 0.8
    return {**tensors, **{name: _as(tensors[name], dtype, recast=recast) for name in _chosen(tensors, chance)}}


def _as(tensor: Raw, dtype: str, *, recast: bool) -> Raw:
    if recast and tensor.dtype in NUMPY and dtype in NUMPY:
        with np.errstate(all="ignore"):
            array = np.frombuffer(tensor.data, NUMPY[tensor.dtype]).astype(NUMPY[dtype])
        return Raw(dtype, tensor.shape, array.tobytes())
    if recast:
        return Raw(dtype, tensor.shape, b"\x3c" * (math.prod(tensor.shape) * SIZES[dtype]))
    whole = len(tensor.data) // SIZES[dtype] * SIZES[dtype]
    return Raw(dtype, (whole // SIZES[dtype],), tensor.data[:whole])


def _other_shape(tensors: dict[str, Raw], chance: random.Random) -> dict[str, Raw]:
    names = _chosen(tensors, chance)[:1] if chance.random() < 0.7 else _chosen(tensors, chance)
    how = chance.randrange(8)
    return {**tensors, **{name: _reshaped(tensors[name], how, chance) for name in names}}


def _reshaped(tensor: Raw, how: int, chance: random.Random) -> Raw:
    shape, size = list(tensor.shape), SIZES[tensor.dtype]
    match how:
        case 0:
            shape = shape[::-1]
        case 1:
            shape = [math.prod(shape)]
        case 2:
            shape.insert(chance.randrange(len(shape) + 1), 1)
        case 3:
            shape = shape[1:]
        case 4 if shape:
            shape[chance.randrange(len(shape))] = 0
        case 5 if shape:
            shape[chance.randrange(len(shape))] += chance.choice((-1, 1, 7))
        case 6 if shape:
            shape[chance.randrange(len(shape))] *= 2
        case 7:
            shape = [2**40, 0, *shape]
    shape = [max(0, side) for side in shape]
    wanted = math.prod(shape) * size
    data = (tensor.data * (1 + wanted // max(1, len(tensor.data))))[:wanted] if tensor.data else b"\0" * wanted
    return Raw(tensor.dtype, tuple(shape), data)


def _other_values(tensors: dict[str, Raw], chance: random.Random) -> dict[str, Raw]:
    value, whole, all_of_it = chance.choice(VALUES), chance.choice(WHOLE), chance.random() < 0.4
    changed = dict(tensors)
    for name in _chosen(tensors, chance):
        tensor = tensors[name]
        if tensor.dtype not in NUMPY or not tensor.data:
            continue
        array = np.frombuffer(tensor.data, NUMPY[tensor.dtype]).copy()
        place = slice(None) if all_of_it else chance.randrange(len(array))
        with np.errstate(all="ignore"):
            if array.dtype.kind == "f":
                array[place] = value
            else:
                array[place] = np.int64(whole).astype(array.dtype)
        changed[name] = replace(tensor, data=array.tobytes())
    return changed


def _other_names(tensors: dict[str, Raw], chance: random.Random) -> dict[str, Raw]:
    names = sorted(tensors)
    changed = dict(tensors)
    if not names:
        return changed
    one, two = chance.choice(names), chance.choice(names)
    match chance.randrange(6):
        case 0:
            del changed[one]
        case 1:
            changed[chance.choice((one + "x", one[:-1], one.upper(), *STRANGE_NAMES))] = changed.pop(one)
        case 2:
            changed[one], changed[two] = changed[two], changed[one]
        case 3:
            changed[chance.choice((one + ".1", one.replace("0", "7") + "_", *STRANGE_NAMES))] = changed[two]
        case 4:
            changed[one] = changed[two]
        case 5:
            for name in chance.sample(names, chance.randrange(1, len(names) + 1)):
                del changed[name]
    return changed
