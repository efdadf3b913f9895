"""Structures that Python and C++ both know. `doors.py` compares them field by field with C++'s own when the library is loaded."""

import ctypes
from ctypes import c_double, c_int64, c_uint64, c_void_p

MATRICES = ("query", "key_value", "output", "inner", "outer")
OF_A_LAYER = (
    *("inner_bias", "outer_bias", "attention_norm", "attention_norm_bias", "feed_norm", "feed_norm_bias"),
    *("keys", "values", "content_bias", "position_bias", "relative", "distance_bias", "neighbours"),
)
OPTIONAL = {"content_bias", "position_bias", "relative", "distance_bias", "neighbours"}
"""What a layer may lack."""
INPUTS = (
    *("query", "memory_key_value", "key_value", "relative", "content_bias", "position_bias", "neighbours", "lowest"),
)
"""Of attention in training."""


class Layer(ctypes.Structure):
    """Every pointer of one layer; a matrix has a second, the scales of its rows, where it is kept as bytes."""

    _fields_ = tuple(
        (name, c_void_p)
        for name in (*(part for matrix in MATRICES for part in (matrix, f"{matrix}_scale")), *OF_A_LAYER)
    )


class Sizes(ctypes.Structure):
    _fields_ = tuple(
        (name, c_int64)
        for name in (
            *("layers", "lanes", "heads", "width", "model", "inner"),
            *("room", "end", "limit", "distances", "panels", "pre_norm", "neighbours"),
        )
    )


class Words(ctypes.Structure):
    """Of a plain softmax."""

    _fields_ = (
        *((name, c_void_p) for name in ("embedding", "output", "output_scale", "bias")),
        ("count", c_int64),
        ("scale", c_double),
    )


class Ngrams(ctypes.Structure):
    """Runs of tokens, embedded together: `longest` is the longest order, whose last tokens a lane brings along."""

    _fields_ = (
        *((name, c_void_p) for name in ("tables", "projection", "orders")),
        *((name, c_int64) for name in ("count", "rows", "width", "longest")),
    )


class Choice(ctypes.Structure):
    """How one lane draws its next word; `share` is its chance, from 0 to 1."""

    _fields_ = (*((name, c_double) for name in ("temperature", "top_p", "min_p", "share")), ("top_k", c_int64))


class Shape(ctypes.Structure):
    """Of attention in training."""

    _fields_ = (
        *(
            (name, c_int64)
            for name in ("lanes", "queries", "memory", "heads", "width", "limit", "neighbours", "groups")
        ),
        ("dropout", c_double),
        ("seed", c_uint64),
    )


class Inputs(ctypes.Structure):
    _fields_ = tuple((name, c_void_p) for name in INPUTS)


class Moving(ctypes.Structure):
    """One tensor of weights that learn while a text is read."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "trained", "gradient", "inverse", "back")),
        ("count", c_int64),
    )


class PortableLayer(ctypes.Structure):
    """Of a reader whose bits are the same everywhere (`portable.py`), as the two after it."""

    _fields_ = tuple(
        (name, c_void_p)
        for name in (
            *("query_key_value", "output", "inner", "outer", "inner_bias", "outer_bias"),
            *("attention_norm", "attention_norm_bias", "feed_norm", "feed_norm_bias"),
            *("content_bias", "position_bias", "relative", "neighbours", "keys", "values"),
        )
    )


class PortableWords(ctypes.Structure):
    _fields_ = tuple(
        (name, c_void_p)
        for name in (
            *("embedding", "head", "bias", "norm", "norm_bias", "tables", "projection"),
            *("orders", "clock", "history"),
        )
    )


class PortableSizes(ctypes.Structure):
    _fields_ = (
        *(
            (name, c_int64)
            for name in (
                *("layers", "lanes", "heads", "width", "model", "inner", "vocabulary", "ring", "reach", "distances"),
                *("pre_norm", "neighbours", "orders", "run_rows", "run_width"),
            )
        ),
        *((name, c_double) for name in ("eps", "scale")),
    )
