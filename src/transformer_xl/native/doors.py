"""The one door to the kernels: nothing passes whose type, shape and layout are not what C++ takes them for.

Tensors are checked here, and structures against C++'s own, field by field, when the library is loaded. Numbers inside a tensor that say where to
read (where a lane begins) the kernels check themselves, before they touch anything, and refuse.
"""

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_double, c_int, c_int64, c_uint64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from transformer_xl.console import say
from transformer_xl.errors import InputError
from transformer_xl.native import building
from transformer_xl.native.structures import (
    INPUTS,
    MATRICES,
    OF_A_LAYER,
    OPTIONAL,
    Choice,
    Inputs,
    Layer,
    Moving,
    Ngrams,
    PortableLayer,
    PortableSizes,
    PortableWords,
    Shape,
    Sizes,
    Words,
)

DTYPES = {torch.float32: "float32", torch.float64: "float64"}
UNLIMITED = 1 << 40
"""A distance that nothing reaches."""
FEW = 64
"""Up to so many vectors the kernels multiply faster than torch, and a vector's result is the same bits whatever the others are."""
BYTES_OF_A_THREAD = 1 << 19
"""Of one layer's matrices. Threads of a small model would spend their time waiting for each other, and much of it on a busy machine."""
BYTES_OF_A_CALL = 1 << 27
"""Of weights that are read while tokens are written: a few milliseconds."""


class _Field(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("offset", c_int64))


STRUCTURES = {
    "fields_of_inference": (Layer, Sizes, Words, Ngrams, Choice),
    "fields_of_training": (Shape, Inputs),
    "fields_of_adapting": (Moving,),
    "fields_of_portable": (PortableLayer, PortableSizes, PortableWords),
}
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "step": (POINTER(Sizes), c_double, POINTER(Layer), *[c_void_p] * 4),
    "write": (
        POINTER(Sizes),
        c_double,
        POINTER(Layer),
        *[c_void_p] * 2,
        POINTER(Words),
        POINTER(Ngrams),
        POINTER(Choice),
        *[c_void_p] * 2,
        c_int64,
        *[c_void_p] * 3,
    ),
    "attend": (POINTER(Sizes), POINTER(Layer), c_int64, *[c_void_p] * 4),
    "linear": (*[c_void_p] * 5, *[c_int64] * 3),
    "drop": (*[c_void_p] * 2, c_int64, c_double, c_uint64),
    "relu_drop": (*[c_void_p] * 2, c_int64, c_double, c_uint64),
    "relu_drop_backward": (*[c_void_p] * 3, c_int64, c_double),
    "few_backward": (*[c_void_p] * 5, *[c_int64] * 3),
    "attend_forward": (POINTER(Shape), POINTER(Inputs), *[c_void_p] * 2),
    "attend_backward": (POINTER(Shape), POINTER(Inputs), *[c_void_p] * 10),
    "move_weights": (POINTER(Moving), c_int64, c_double, c_double, c_void_p),
    "recall": (*[c_void_p] * 4, *[c_int64] * 4, c_double),
    "softmax_loss": (*[c_void_p] * 5, *[c_int64] * 2),
    "rounded_softmax_loss": (*[c_void_p] * 5, *[c_int64] * 2),
    "portable_read": (
        POINTER(PortableSizes),
        POINTER(PortableLayer),
        POINTER(PortableWords),
        c_void_p,
        c_int64,
        c_void_p,
    ),
    "portable_product": (*[c_void_p] * 4, *[c_int64] * 3),
    "portable_known_answer": (c_void_p,),
}
"""What each kernel takes, before the number of threads."""
DONE, OUT_OF_BOUNDS, NO_MEMORY = range(3)


def usable(like: Tensor) -> bool:
    """Also not while torch records a graph, which must consist of its own operations."""
    if torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return False
    return like.device.type == "cpu" and like.dtype in DTYPES and library() is not None


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, once their structures are known to be ours; None where they cannot be had, which is said."""
    found = building.library()
    if found is None:
        return None
    try:
        for table, structures in STRUCTURES.items():
            if (theirs := _layout_there(found, table)) != _layout(structures):
                raise ValueError(f"{table}: C++ has {theirs}, Python has {_layout(structures)}")
        found.panel_width.argtypes, found.panel_width.restype = [c_int], c_int
    except (ValueError, AttributeError) as error:  # the second for a symbol that is not there
        say(f"the fast kernels cannot be used (they are not as expected: {error}); {building.COST}")
        return None
    return found


def _layout_there(found: ctypes.CDLL, table: str) -> dict[str, int]:
    fields = {}
    for field in (_Field * 256).in_dll(found, table):
        if field.name is None:
            break
        fields[field.name.decode()] = field.offset
    return fields


def _layout(structures: Sequence[type[ctypes.Structure]]) -> dict[str, int]:
    found = {kind.__name__: ctypes.sizeof(kind) for kind in structures}
    for kind in structures:
        found |= {f"{kind.__name__}.{field[0]}": getattr(kind, field[0]).offset for field in kind._fields_}
    return found


def _there() -> ctypes.CDLL:
    found = library()
    assert found is not None, "ask usable() first"
    return found


@cache
def _kernel(name: str, dtype: torch.dtype) -> Any:
    if dtype not in DTYPES:
        raise InputError(f"the kernel {name} computes in {' or '.join(DTYPES.values())}, and was given {dtype}")
    kernel = getattr(_there(), f"{name}_{DTYPES[dtype]}")
    kernel.argtypes, kernel.restype = [*SIGNATURES[name], c_int], c_int
    return kernel


def _call(name: str, dtype: torch.dtype, *arguments: object, threads: int | None = None) -> None:
    """By torch's own number of threads, unless it is told."""
    answer = _kernel(name, dtype)(*arguments, torch.get_num_threads() if threads is None else threads)
    if answer == NO_MEMORY:
        raise MemoryError(
            f"the kernel {name} found no memory for its work; read fewer lanes or shorter pieces at a time"
        )
    if answer != DONE:
        raise InputError(
            f"the kernel {name} was given positions that lie outside of its memory; start with a fresh memory"
        )


def _place(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Where the tensor lies, once it is what the kernel will take it for."""
    if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_cpu or not tensor.is_contiguous():
        layout = "" if tensor.is_contiguous() else ", not contiguous,"
        raise InputError(
            f"a kernel was given {name} as {tensor.dtype} {list(tensor.shape)}{layout} on {tensor.device}, where it takes {dtype} {list(shape)}"
            " on the cpu; give the whole model one dtype, and its weights their own shapes"
        )
    return tensor.data_ptr()


def _sizes(name: str, tensor: Tensor, axes: int) -> tuple[int, ...]:
    if tensor.dim() != axes:
        raise InputError(f"a kernel was given {name} of shape {list(tensor.shape)}, where it takes {axes} axes")
    return tuple(tensor.shape)


def _optional(name: str, tensor: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> int | None:
    return None if tensor is None else _place(name, tensor, dtype, shape)


# --- reading


def panel_width(dtype: torch.dtype) -> int:
    """How many distances stand in one panel of relative keys."""
    return int(_there().panel_width(dtype.itemsize))


class Layers:
    """The layers of a model with the keys and values that they keep, as `step` and `attend` read them. What is pointed at stays alive with it."""

    def __init__(
        self,
        matrices: Sequence[Mapping[str, tuple[Tensor, Tensor | None]]],
        others: Sequence[Mapping[str, Tensor | None]],
        *,
        norm: tuple[Tensor | None, Tensor | None],
        eps: float,
        dtype: torch.dtype,
        distances: int,
        pre_norm: bool,
        **lengths: int,
    ) -> None:
        """For each layer its MATRICES, with a scale for each row where they are bytes, and all that is OF_A_LAYER. `norm`: weight and bias of the
        one after the last layer. `lengths`: lanes, heads, width, model, inner, room and neighbours."""
        self.dtype, self.eps, self._alive = dtype, eps, list[object]([matrices, others, norm])
        self.sizes = Sizes(layers=len(matrices), distances=distances, pre_norm=pre_norm, **lengths)
        self.sizes.panels = -(-distances // panel_width(dtype))
        shapes = self._shapes()
        self.layers = (Layer * len(matrices))()
        for layer, given, parts in zip(self.layers, matrices, others, strict=True):
            for name in MATRICES:
                weight, scale = given[name]
                setattr(layer, name, _place(name, weight, dtype if scale is None else torch.int8, shapes[name]))
                setattr(layer, f"{name}_scale", _optional(name, scale, torch.float32, shapes[name][:1]))
                if scale is not None and dtype is not torch.float32:
                    raise InputError(f"{name} is kept as bytes, which only float32 models are; this one is {dtype}")
            for name in OF_A_LAYER:
                place = _optional if name in OPTIONAL else _place
                setattr(layer, name, place(name, parts[name], dtype, shapes[name]))  # type: ignore[arg-type]
        self._norm = [_optional("the last norm", part, dtype, (self.sizes.model,)) for part in norm]
        self._words: Words | None = None
        self._ngrams = Ngrams(longest=1)
        bytes_of_a_layer = sum(given[name][0].nbytes for given in matrices[:1] for name in MATRICES)
        self.threads = max(1, bytes_of_a_layer // BYTES_OF_A_THREAD)
        self.most_steps = max(1, BYTES_OF_A_CALL // (bytes_of_a_layer * len(matrices)))
        """Tokens to write in one call: what a call itself costs shows only where a token costs little."""

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        z, P = self.sizes, panel_width(self.dtype)
        B, H, K, D, F = z.lanes, z.heads, z.width, z.model, z.inner
        return {
            "query": (H * K, D),
            "key_value": (2 * H * K, D),
            "output": (D, H * K),
            "inner": (F, D),
            "outer": (D, F),
            "inner_bias": (F,),
            "outer_bias": (D,),
            **dict.fromkeys(("attention_norm", "attention_norm_bias", "feed_norm", "feed_norm_bias"), (D,)),
            **dict.fromkeys(("keys", "values"), (B, H, z.room, K)),
            **dict.fromkeys(("content_bias", "position_bias"), (H, K)),
            "relative": (H, z.panels, K, P),
            "distance_bias": (H, z.panels, P),
            "neighbours": (z.neighbours, H * K),
        }

    def _at(self, end: int, limit: int) -> Sizes:
        """`end`: where new positions are kept. `limit`: how far back a token sees."""
        self.sizes.end, self.sizes.limit = end, limit
        return self.sizes

    def step(self, hidden_BD: Tensor, lowest_B: Tensor, *, end: int, limit: int) -> None:
        """One token of every lane through all layers, kept at `end`; `hidden_BD` is changed in place."""
        z = self._at(end, limit)
        hidden = _place("hidden states", hidden_BD, self.dtype, (z.lanes, z.model))
        lowest = _place("lowest positions", lowest_B, torch.int64, (z.lanes,))
        _call(
            "step",
            self.dtype,
            z,
            self.eps,
            self.layers,
            *self._norm,
            hidden,
            lowest,
            threads=min(self.threads, torch.get_num_threads()),
        )

    def take_words(
        self, embedding_VD: Tensor, output_VD: tuple[Tensor, Tensor | None], bias_V: Tensor, *, scale: float
    ) -> None:
        """The words of a plain softmax, for `write`. `scale`: what embeddings are multiplied by."""
        (weight_VD, scale_V), D, V = output_VD, self.sizes.model, len(bias_V)
        self._alive += [embedding_VD, output_VD, bias_V]
        self._words = Words(
            embedding=_place("embeddings", embedding_VD, self.dtype, (V, D)),
            output=_place("output words", weight_VD, self.dtype if scale_V is None else torch.int8, (V, D)),
            output_scale=_optional("output words' scales", scale_V, torch.float32, (V,)),
            bias=_place("output biases", bias_V, self.dtype, (V,)),
            count=V,
            scale=scale,
        )

    def take_ngrams(self, tables_GRE: Tensor, projection_DX: Tensor, *, orders: Sequence[int]) -> None:
        """Of a model that embeds runs of tokens, for `write`."""
        (G, R, E), orders_G = _sizes("n-grams", tables_GRE, 3), torch.tensor(orders)
        self._alive += [tables_GRE, projection_DX, orders_G]
        self._ngrams = Ngrams(
            tables=_place("n-grams", tables_GRE, self.dtype, (len(orders), R, E)),
            projection=_place("n-grams' projection", projection_DX, self.dtype, (self.sizes.model, G * E)),
            orders=orders_G.data_ptr(),
            count=G,
            rows=R,
            width=E,
            longest=max(orders),
        )

    def write(
        self,
        tokens_B: Tensor,
        choices: ctypes.Array[Choice],
        lowest_B: Tensor,
        recent_BP: Tensor,
        *,
        steps: int,
        end: int,
        limit: int,
    ) -> tuple[Tensor, Tensor]:
        """Each lane reads its token, kept at `end`, draws the next one, and so on, [steps, B]; -1 where there are no numbers to draw from, and then there are no
        more. And the hidden states of the last that were read. `choices`: for each step those of all lanes. `recent_BP`: the tokens before the first, for
        runs of tokens."""
        z = self._at(end, limit)
        assert self._words is not None, "take_words() first"
        if not 0 < steps * z.lanes <= len(choices):
            raise InputError(f"the kernel write was given {len(choices)} choices for {steps} x {z.lanes} tokens")
        hidden_BD = torch.empty(z.lanes, z.model, dtype=self.dtype)
        drawn_NB = torch.full((steps, z.lanes), -1)
        tokens = _place("tokens", tokens_B, torch.int64, (z.lanes,))
        lowest = _place("lowest positions", lowest_B, torch.int64, (z.lanes,))
        recent_BP = recent_BP.contiguous()
        recent = _place("recent tokens", recent_BP, torch.int64, (z.lanes, self._ngrams.longest - 1))
        given = (z, self.eps, self.layers, *self._norm, self._words, self._ngrams, choices, recent, tokens, steps)
        written = (drawn_NB.data_ptr(), hidden_BD.data_ptr(), lowest)
        _call("write", self.dtype, *given, *written, threads=min(self.threads, torch.get_num_threads()))
        return drawn_NB, hidden_BD

    def attend(
        self, number: int, query_BTX: Tensor, key_value_BTX: Tensor, lowest_B: Tensor, *, end: int, limit: int
    ) -> Tensor:
        """Keeps new keys and values, [B, T, 2*H*K], from `end` on; what each query, [B, T, H*K], gathers from all that it sees."""
        z = self._at(end, limit)
        T, X = _sizes("queries", query_BTX, 3)[1], z.heads * z.width
        out_BTX = torch.empty_like(query_BTX)
        places = (
            _place("queries", query_BTX, self.dtype, (z.lanes, T, X)),
            _place("keys and values", key_value_BTX, self.dtype, (z.lanes, T, 2 * X)),
            _place("lowest positions", lowest_B, torch.int64, (z.lanes,)),
            out_BTX.data_ptr(),
        )
        _call("attend", self.dtype, z, ctypes.byref(self.layers[number]), T, *places)
        return out_BTX


def linear(x_PI: Tensor, weight_OI: Tensor, scale_O: Tensor | None, bias_O: Tensor | None) -> Tensor:
    """A matrix, exact or as bytes with a scale for each row, times a few vectors."""
    dtype, (P, columns), (rows, _) = x_PI.dtype, _sizes("vectors", x_PI, 2), _sizes("a matrix", weight_OI, 2)
    if not 0 < P <= FEW or (scale_O is not None and dtype is not torch.float32):
        raise InputError(f"the kernel linear takes 1 to {FEW} vectors, of float32 for bytes; this is {P} of {dtype}")
    out_PO = x_PI.new_empty(P, rows)
    places = (
        _place("a matrix", weight_OI, dtype if scale_O is None else torch.int8, (rows, columns)),
        _optional("scales", scale_O, torch.float32, (rows,)),
        _optional("a bias", bias_O, dtype, (rows,)),
        _place("vectors", x_PI, dtype, (P, columns)),
        out_PO.data_ptr(),
    )
    _call("linear", dtype, *places, P, rows, columns)
    return out_PO


# --- training


def drop(values: Tensor, rate: float, seed: int, *, relu: bool = False) -> Tensor:
    """Dropout of the values, or of what a ReLU makes of them."""
    _check_rate(rate)
    result = torch.empty_like(values)
    places = (_place("values", values, values.dtype, values.shape), result.data_ptr())
    _call("relu_drop" if relu else "drop", values.dtype, *places, values.numel(), rate, seed)
    return result


def relu_drop_backward(result: Tensor, gradient: Tensor, rate: float) -> Tensor:
    _check_rate(rate)
    found = torch.empty_like(result)
    named = {"dropped values": result, "their gradient": gradient}
    places = (_place(name, tensor, result.dtype, result.shape) for name, tensor in named.items())
    _call("relu_drop_backward", result.dtype, *places, found.data_ptr(), result.numel(), rate)
    return found


def _check_rate(rate: float) -> None:
    if not 0 <= rate < 1:
        raise InputError(f"a dropout of {rate} leaves nothing; it must be at least 0 and below 1")


def few_backward(gradient_PV: Tensor, x_PE: Tensor, matrix_VE: Tensor, matrix_gradient_VE: Tensor) -> Tensor:
    """The gradient of a few vectors that a matrix was multiplied by; that of the matrix is written where it shall stand."""
    dtype, (P, E), (V, _) = x_PE.dtype, _sizes("vectors", x_PE, 2), _sizes("a matrix", matrix_VE, 2)
    found_PE = torch.empty_like(x_PE)
    places = (
        _place("a gradient", gradient_PV, dtype, (P, V)),
        _place("vectors", x_PE, dtype, (P, E)),
        _place("a matrix", matrix_VE, dtype, (V, E)),
        _place("a matrix' gradient", matrix_gradient_VE, dtype, (V, E)),
        found_PE.data_ptr(),
    )
    _call("few_backward", dtype, *places, P, V, E)
    return found_PE


class Attention:
    """One attention of training: forwards, and backwards over the same inputs."""

    def __init__(self, inputs: Mapping[str, Tensor | None], *, limit: int, dropout: float, seed: int) -> None:
        """query [B, T, H, K]; memory_key_value [B, M, 2, H, K] and key_value [B, T, 2, H, K]; relative [M+T, H, K], the last row for distance 0;
        content_bias and position_bias [H, K], neighbours [W, H, K], or None; lowest [B], the first key of each lane that is real."""
        query_BTHK, memory_BM2HK = inputs["query"], inputs["memory_key_value"]
        assert query_BTHK is not None
        assert memory_BM2HK is not None
        self.dtype, (B, T, H, K) = query_BTHK.dtype, _sizes("query", query_BTHK, 4)
        M = _sizes("memory_key_value", memory_BM2HK, 5)[1]
        # Lanes of a head are dealt to as many tasks as keep all threads busy, each with gradients of its own to be added up.
        groups = min(B, max(1, -(-torch.get_num_threads() // H)))
        neighbours = inputs["neighbours"]
        near = 0 if neighbours is None else len(neighbours)
        lengths = {"lanes": B, "queries": T, "memory": M, "heads": H, "width": K, "neighbours": near}
        self.shape = Shape(**lengths, limit=limit, groups=groups, dropout=dropout, seed=seed)
        self._given, self._inputs = inputs, Inputs()
        shapes = ((B, T, H, K), (B, M, 2, H, K), (B, T, 2, H, K), (M + T, H, K), (H, K), (H, K), (near, H, K), (B,))
        for name, shape in zip(INPUTS, shapes, strict=True):
            place = _optional if name in OPTIONAL else _place
            dtype = torch.int64 if name == "lowest" else self.dtype
            setattr(self._inputs, name, place(name, inputs[name], dtype, shape))  # type: ignore[arg-type]

    def forward(self) -> tuple[Tensor, Tensor]:
        """Probabilities [B, H, T, M+T], and what each query gathers."""
        z, query_BTHK = self.shape, self._given["query"]
        assert query_BTHK is not None
        probability_BHTS = query_BTHK.new_empty(z.lanes, z.heads, z.queries, z.memory + z.queries)
        out_BTHK = torch.empty_like(query_BTHK)
        _call("attend_forward", self.dtype, z, self._inputs, probability_BHTS.data_ptr(), out_BTHK.data_ptr())
        return probability_BHTS, out_BTHK

    def backward(self, probability_BHTS: Tensor, out_BTHK: Tensor, gradient_BTHK: Tensor) -> list[Tensor]:
        """Gradients of queries, both parts of keys and values, relative keys, both biases and the weights of neighbours."""
        z = self.shape
        B, T, M, H, K, G = z.lanes, z.queries, z.memory, z.heads, z.width, z.groups
        given = (
            _place("probabilities", probability_BHTS, self.dtype, (B, H, T, M + T)),
            _place("results", out_BTHK, self.dtype, (B, T, H, K)),
            _place("a gradient", gradient_BTHK, self.dtype, (B, T, H, K)),
        )
        own = [out_BTHK.new_empty(shape) for shape in ((B, T, H, K), (B, M, 2, H, K), (B, T, 2, H, K))]
        grouped = [out_BTHK.new_empty(G, *shape) for shape in ((M + T, H, K), (H, K), (H, K), (z.neighbours, H, K))]
        places = (*given, *(part.data_ptr() for part in (*own, *grouped)))
        _call("attend_backward", self.dtype, z, self._inputs, *places)
        return [*own, *(part.sum(0) for part in grouped)]
