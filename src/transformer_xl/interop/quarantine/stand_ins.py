"""The names a pickle may use, each by its whole dotted name, and the inert thing that stands in for it. Whatever is not here is refused.

No name stands for the class or function it names: an object becomes an `Object` (a name and a table of attributes), a dictionary of any kind a
plain dictionary, a tensor a `TensorPlace` (which numbers of a storage it has), and what has no use here an `Object` that nobody looks into.
Once the file is known to the end, a tensor is `Bytes`: where its numbers lie in which file, whatever the format.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from transformer_xl.errors import ImportRefused

MOST_AXES = 8
MOST_ELEMENTS = 1 << 40


@dataclass(frozen=True)
class Name:
    """A dotted name of the file, known and inert."""

    text: str


@dataclass(eq=False)
class Object:
    """An instance of a class that is not here: what it was called, and its attributes."""

    name: str
    arguments: tuple[Any, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Storage:
    """Numbers in a row, somewhere in the file."""

    key: str
    dtype: str
    elements: int
    start: int = 0
    """In elements, for a storage that is a part of another."""


@dataclass(frozen=True)
class TensorPlace:
    """Which numbers of a storage a tensor is made of; checked to lie inside it."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """A tensor whose numbers lie in a row in some file."""

    path: Path
    start: int
    dtype: str
    shape: tuple[int, ...]
    length: int
    strides: tuple[int, ...] | None = None
    """Where they do not lie in the order of the tensor; `length` then is that of the whole storage."""


_KINDS = (
    ("float32", "F32", 4, "FloatStorage"),
    ("float16", "F16", 2, "HalfStorage"),
    ("bfloat16", "BF16", 2, "BFloat16Storage"),
    ("float64", "F64", 8, "DoubleStorage"),
    ("int64", "I64", 8, "LongStorage"),
    ("int32", "I32", 4, "IntStorage"),
    ("int16", "I16", 2, "ShortStorage"),
    ("int8", "I8", 1, "CharStorage"),
    ("uint8", "U8", 1, "ByteStorage"),
    ("bool", "BOOL", 1, "BoolStorage"),
)
DTYPES = {dtype: (kind, width) for dtype, kind, width, _ in _KINDS}
"""As safetensors calls them, and how many bytes an element has."""
STORAGE_NAMES = {f"{module} {name}": dtype for module in ("torch", "torch.cuda") for dtype, _, _, name in _KINDS}

_CLASSES = {
    "__main__": "Corpus",
    "apex.fp16_utils.loss_scaler": "LossScaler DynamicLossScaler",
    "argparse": "Namespace",
    "builtins": "object list dict int float str bool tuple",
    "data_utils": "Corpus Vocab",
    "log_uniform_sampler": "LogUniformSampler",
    "mem_transformer": "MemTransformerLM AdaptiveEmbedding PositionalEmbedding PositionwiseFF MultiHeadAttn DecoderLayer"
    " RelMultiHeadAttn RelLearnableMultiHeadAttn RelLearnableDecoderLayer RelPartialLearnableMultiHeadAttn"
    " RelPartialLearnableDecoderLayer",
    "numpy": "ndarray dtype",
    "proj_adaptive_softmax": "ProjectedAdaptiveLogSoftmax",
    "sacremoses.normalize": "MosesPunctNormalizer",
    "sacremoses.tokenize": "MosesTokenizer MosesDetokenizer",
    "tokenizers": "AddedToken",
    "torch": " ".join(DTYPES),
    "torch.nn.modules.activation": "ReLU",
    "torch.nn.modules.container": "ModuleList ParameterList Sequential",
    "torch.nn.modules.dropout": "Dropout",
    "torch.nn.modules.linear": "Linear",
    "torch.nn.modules.normalization": "LayerNorm",
    "torch.nn.modules.sparse": "Embedding",
    "torch.nn.parallel.data_parallel": "DataParallel",
    "transformers.tokenization_utils": "Trie",
    "transformers.tokenization_utils_base": "AddedToken",
    "utils.data_utils": "Corpus",
    "utils.log_uniform_sampler": "LogUniformSampler",
    "utils.proj_adaptive_softmax": "ProjectedAdaptiveLogSoftmax",
    "utils.vocabulary": "Vocab",
    "vocabulary": "Vocab",
}
CLASSES = {f"{module} {name}" for module, names in _CLASSES.items() for name in names.split()} | STORAGE_NAMES.keys()
"""Names that are only ever looked at, or whose instances are tables of attributes."""

KEYS = frozenset((str, int, float, bool, bytes, type(None)))
"""What a key of a dictionary may be: text and numbers. These cannot be nested, so that finding a place for one never takes long."""

Reduction = Callable[[tuple[Any, ...]], Any]


def resolve(module: str, name: str) -> Name:
    """The one door through which a name of the file comes in."""
    module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
    text = f"{module} {name}"
    if text not in CLASSES and text not in FUNCTIONS:
        shown = ascii(f"{module}.{name}"[:100])[1:-1]
        raise ImportRefused(f"it asks for {shown}, which no Transformer-XL checkpoint needs")
    return Name(text)


def call(name: object, arguments: object) -> Any:
    """What a pickle's call of a known name stands for."""
    if not isinstance(name, Name) or not isinstance(arguments, tuple):
        raise ImportRefused("it calls something that is no name")
    if name.text in FUNCTIONS:
        return FUNCTIONS[name.text](arguments)
    return Object(name.text, arguments)


def build(target: object, state: object) -> None:
    """Attributes given to an object. Those of a dictionary (torch notes versions there) have no use here."""
    if isinstance(target, Object):
        plain, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        for part in (plain, slots):
            if isinstance(part, dict):
                target.attributes.update((str(key), value) for key, value in part.items())
            elif part is not None and not isinstance(state, tuple):
                raise ImportRefused(f"the attributes of {target.name.replace(' ', '.')} are no table")
    elif not isinstance(target, dict) or not isinstance(state, dict):
        raise ImportRefused("it gives attributes to a thing that has none")


# --- calls


def _dictionary(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    """OrderedDict, Counter, defaultdict and dict: their content, if any, is the last argument."""
    source = arguments[-1] if arguments else {}
    if isinstance(source, (dict, Name)) or source is None:
        return dict(source) if isinstance(source, dict) else {}
    if not isinstance(source, list):
        raise ImportRefused("it makes a dictionary of something else than pairs")
    pairs = {}
    for pair in source:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or type(pair[0]) not in KEYS:
            raise ImportRefused("it makes a dictionary of something else than pairs")
        pairs[pair[0]] = pair[1]
    return pairs


def _set(arguments: tuple[Any, ...]) -> list[Any]:
    """Nobody here needs a set to be one."""
    if arguments and isinstance(arguments[0], (list, tuple)):
        return list(arguments[0])
    return []


def _inert(arguments: tuple[Any, ...]) -> Object:
    return Object("unused", arguments)


def _reconstructor(arguments: tuple[Any, ...]) -> Object:
    if len(arguments) != 3 or not isinstance(arguments[0], Name):
        raise ImportRefused("it rebuilds an object without saying of which class")
    return Object(arguments[0].text)


def _size(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arguments[0]) if len(arguments) == 1 and isinstance(arguments[0], (tuple, list)) else ()


def _tensor(arguments: tuple[Any, ...]) -> TensorPlace:
    """storage, offset, shape, strides, then what only training needs."""
    if len(arguments) < 4 or not isinstance(arguments[0], Storage):
        raise ImportRefused("a tensor of it has no storage")
    storage, offset, shape, strides = arguments[:4]
    numbers = [offset, *_numbers(shape), *_numbers(strides)]
    if any(type(number) is not int or not 0 <= number <= MOST_ELEMENTS for number in numbers):
        raise ImportRefused(f"a tensor over its storage {storage.key} has sizes that are no counts")
    if len(shape) != len(strides) or len(shape) > MOST_AXES:
        raise ImportRefused(f"a tensor over its storage {storage.key} has {len(shape)} axes and {len(strides)} strides")
    place = TensorPlace(storage, offset, tuple(shape), tuple(strides))
    if place.elements > storage.elements:
        raise ImportRefused(
            f"a tensor of {place.elements:,} elements stands over storage {storage.key}, which has {storage.elements:,}"
        )
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if place.elements and last >= storage.elements:
        raise ImportRefused(f"a tensor reaches past the end of storage {storage.key} ({storage.elements:,} elements)")
    return place


def _numbers(value: object) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (None,)


def _parameter(arguments: tuple[Any, ...]) -> TensorPlace:
    if not arguments or not isinstance(arguments[0], TensorPlace):
        raise ImportRefused("a parameter of it is no tensor")
    return arguments[0]


FUNCTIONS: Mapping[str, Reduction] = {
    **dict.fromkeys(("collections OrderedDict", "collections Counter", "collections defaultdict"), _dictionary),
    **dict.fromkeys(("builtins set", "builtins frozenset"), _set),
    "copyreg _reconstructor": _reconstructor,
    "torch Size": _size,
    **dict.fromkeys(("torch._utils _rebuild_tensor", "torch._utils _rebuild_tensor_v2"), _tensor),
    **dict.fromkeys((f"torch._utils _rebuild_parameter{state}" for state in ("", "_with_state")), _parameter),
    "torch.nn.parameter Parameter": _parameter,
    **dict.fromkeys(("torch device", "torch.nn.backends.thnn _get_thnn_function_backend"), _inert),
    **dict.fromkeys(("re _compile", "_codecs encode"), _inert),
    **dict.fromkeys((f"numpy.{core}.multiarray _reconstruct" for core in ("core", "_core")), _inert),
    **dict.fromkeys((f"numpy.{core}.multiarray scalar" for core in ("core", "_core")), _inert),
}
