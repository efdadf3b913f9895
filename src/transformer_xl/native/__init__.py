"""Kernels for what is done most, built on this machine: C++ for processors behind one door, Triton for NVIDIA cards behind another. Where they cannot be
had, callers compute the same with torch's own operations."""

from transformer_xl.native.adapting import MovingWeights, recall
from transformer_xl.native.capabilities import Kernel, supports, unsupported
from transformer_xl.native.cuda import TiledAttention, cuda_usable
from transformer_xl.native.doors import (
    DTYPES,
    FEW,
    UNLIMITED,
    Attention,
    Layers,
    drop,
    few_backward,
    library,
    linear,
    panel_width,
    relu_drop_backward,
    usable,
)
from transformer_xl.native.losses import softmax_loss
from transformer_xl.native.structures import INPUTS, Choice

__all__ = [
    "DTYPES",
    "FEW",
    "INPUTS",
    "UNLIMITED",
    "Attention",
    "Choice",
    "Kernel",
    "Layers",
    "MovingWeights",
    "TiledAttention",
    "cuda_usable",
    "drop",
    "few_backward",
    "library",
    "linear",
    "panel_width",
    "recall",
    "relu_drop_backward",
    "softmax_loss",
    "supports",
    "unsupported",
    "usable",
]
