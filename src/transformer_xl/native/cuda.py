"""The door to the kernels of NVIDIA cards (`tiles.py`): who may use them, what they are given, and the plain products around them.

Torch multiplies queries with every distance, and gradients back; so large a thing stands in memory only while one layer is computed. Triton compiles
a kernel the first time (seconds) and keeps it. Where it cannot, torch's own fused attention computes the same.
"""

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from transformer_xl.console import say
from transformer_xl.errors import InputError
from transformer_xl.native.capabilities import WIDEST
from transformer_xl.native.structures import INPUTS

OLDEST = (8, 0)
"""Compute capability: older cards have neither bfloat16 nor TF32."""
ALIGNED = 16
"""Heads and rows of distances are padded to a multiple of it, and begin at such an address, so that a card reads whole words and multiplies on its tensor
cores, whatever a model's width."""
MOST_NUMBERS = 1 << 31
"""Of one lane: within it kernels count in 32 bits."""
LARGEST_TILE = 64
ROUGHLY = 0.05
"""Of the largest value: more than bfloat16 rounds, and less than any mistake."""
COST = "torch's own fused attention computes instead, and keeps more in memory"


def cuda_usable(like: Tensor) -> bool:
    """Not while torch records a graph, which must consist of its own operations."""
    if not like.is_cuda or torch.version.hip is not None:
        return False
    if torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else like.dtype
    # Products of exact float32 run on no tensor core: there the kernels would gain nothing, and they spill.
    rounded = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    if dtype not in (torch.bfloat16, torch.float16) and not rounded:
        return False
    return torch.cuda.get_device_capability(like.device) >= OLDEST and _right(like.device, dtype)


@cache
def _right(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton is here, builds what the card runs, and the card then computes the formula; if not, it is said. Asked once, before anything depends on it."""
    if find_spec("triton") is None:
        say(f"the kernels for {device} cannot be had (there is no triton; install it with: pip install triton); {COST}")
        return False
    try:
        off = _off_the_formula(device, dtype)
    except Exception as error:  # whatever Triton, a compiler or a driver may say: none of it may stop a training
        said = str(error).strip().partition("\n")[0]
        say(f"the kernels for {device} cannot be had ({type(error).__name__}: {said}); {COST}")
        return False
    if not off < ROUGHLY:
        say(f"the kernels for {device} are wrong there, by {off:.2g} of the largest value in {dtype}; {COST}")
        return False
    return True


def _off_the_formula(device: torch.device, dtype: torch.dtype) -> float:
    """The worst of one small attention and of its gradients, as a share of the largest value of each; the formula is computed in float64 by the processor."""
    (B, T, M, H, K), limit, lowest_B = (2, 40, 27, 2, 41), 60, torch.tensor([0, 9])
    shapes = ((B, T, H, K), (B, M, 2, H, K), (B, T, 2, H, K), (M + T, H, K), (H, K), (H, K), (B, T, H, K))
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.enable_grad():
        *given, weight_BTHK = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        leaves = [tensor.double().requires_grad_() for tensor in given]
        query, memory, segment, relative_SHK, content_bias, position_bias = leaves
        key_BSHK, value_BSHK = torch.cat([memory, segment], dim=1).unbind(2)
        distance_TS = M + torch.arange(T)[:, None] - torch.arange(M + T)
        relative_TSHK = relative_SHK[(M + T - 1 - distance_TS).clamp(max=M + T - 1)]
        score_BHTS = torch.einsum("bthk,bshk->bhts", query + content_bias, key_BSHK)
        score_BHTS = score_BHTS + torch.einsum("bthk,tshk->bhts", query + position_bias, relative_TSHK)
        unreal_BS = torch.arange(M + T) < lowest_B[:, None]
        mask_BTS = (distance_TS < 0) | (distance_TS > limit) | unreal_BS[:, None]
        probability_BHTS = (score_BHTS * K**-0.5).masked_fill(mask_BTS[:, None], float("-inf")).softmax(-1)
        expected = torch.einsum("bhts,bshk->bthk", probability_BHTS, value_BSHK)
        gradients = torch.autograd.grad((expected * weight_BTHK.double()).sum(), leaves)
    inputs = (*(tensor.to(device) for tensor in given), None, lowest_B.to(device))
    attention = TiledAttention(dict(zip(INPUTS, inputs, strict=True)), limit=limit, dropout=0.0, seed=0)
    total_BHT, out_BTHK = attention.forward()
    found = [out_BTHK, *attention.backward(total_BHT, out_BTHK, weight_BTHK.to(device))[:-1]]
    pairs = zip((expected.detach(), *gradients), found, strict=True)
    return max(float((ours.cpu().double() - theirs).abs().max() / theirs.abs().max()) for theirs, ours in pairs)


def tile_sizes(kernel: str, *, queries: int, width: int, itemsize: int) -> dict[str, int]:
    """How many queries and keys a program takes at a time: the most that fit its registers, as compilers count them. Nobody has measured their speed."""
    row_bytes = width * itemsize
    most = 32 if row_bytes > 256 else LARGEST_TILE
    return {
        "I": min(most, max(16, 1 << (queries - 1).bit_length())),
        "J": LARGEST_TILE if kernel == "forward" and row_bytes <= 128 else 32,
        "num_warps": 4,
        "num_stages": 2,
        "maxnreg": 255,  # all there are: otherwise registers are spilled to make room for one more program
        "enable_fp_fusion": True,  # as all versions of Triton did before it became a question
    }


class TiledAttention:
    """One attention on a card: forwards, and backwards over the same inputs."""

    def __init__(self, inputs: Mapping[str, Tensor | None], *, limit: int, dropout: float, seed: int) -> None:
        """As `Attention` of the compiled kernels takes them, but no neighbours. Relative keys and biases may be more precise than the rest, and where all of
        memory is real, lowest is None."""
        query_BTHK, memory_BM2HK = inputs["query"], inputs["memory_key_value"]
        assert query_BTHK is not None
        assert memory_BM2HK is not None
        self.dtype, self.given = query_BTHK.dtype, inputs
        B, T, H, K = query_BTHK.shape
        M = memory_BM2HK.shape[1]
        shapes = ((B, T, H, K), (B, M, 2, H, K), (B, T, 2, H, K), (M + T, H, K), (H, K), (H, K), (0, H, K), (B,))
        for name, shape in zip(INPUTS, shapes, strict=True):
            _check(name, inputs[name], shape, like=query_BTHK)
        self.sizes, self.length, self.reach = (B, T, M, H, K), _aligned(M + T), min(limit, M + T)
        if K > WIDEST or max(2 * (M + T) * H * _aligned(K), T * self.length) >= MOST_NUMBERS:
            raise InputError(
                f"attention on a card takes heads up to {WIDEST} wide and less than {MOST_NUMBERS:,} numbers of a lane; this is {T:,} queries and"
                f" {M + T:,} keys of {H} heads, {K} wide; read shorter segments, or give a smaller `memory=`"
            )
        if not 0 <= dropout < 1:
            raise InputError(f"a dropout of {dropout} leaves nothing; it must be at least 0 and below 1")
        self.dropped = dropout > 0
        # A draw is a whole number of 32 bits, and stays from the border on.
        self.drawing = {"raised": 1 / (1 - dropout), "seed": seed, "border": int(dropout * 2**32) - 2**31}

    def forward(self) -> tuple[Tensor, Tensor]:
        """The logarithm of each softmax's sum, [B, H, T], and what each query gathers."""
        B, T, _, H, K = self.sizes
        given = self._inputs(*self._position_factors())
        out_BTHK = torch.empty_like(given[0])
        total_BHT = out_BTHK.new_empty(B, H, T, dtype=torch.float32)
        self._launch("forward", T, *given, out_BTHK, total_BHT)
        return total_BHT, out_BTHK[..., :K].contiguous()

    def backward(self, total_BHT: Tensor, out_BTHK: Tensor, gradient_BTHK: Tensor) -> list[Tensor]:
        """Gradients of queries, both parts of keys and values, relative keys, both biases and the weights of no neighbours."""
        B, T, M, H, K = self.sizes
        asking_HXK, relative_HLK = self._position_factors()
        given = query_BTHK, memory_BM2HK, segment_BT2HK, *_ = self._inputs(asking_HXK, relative_HLK)
        known = (_padded(out_BTHK), total_BHT, _padded(gradient_BTHK), torch.empty_like(total_BHT))
        content_BTHK, found_HXL = torch.empty_like(query_BTHK), query_BTHK.new_zeros(H, B * T, self.length)
        self._launch("backward_queries", T, *given, *known, content_BTHK, found_HXL)
        memory_gradient, segment_gradient = torch.empty_like(memory_BM2HK), torch.empty_like(segment_BT2HK)
        self._launch("backward_keys", M + T, *given, *known[1:], memory_gradient, segment_gradient)
        with torch.autocast(query_BTHK.device.type, enabled=False):
            position_HXK = torch.bmm(found_HXL, relative_HLK) * K**-0.5
            relative_gradient_HLK = torch.bmm(found_HXL.transpose(1, 2), asking_HXK)
        position_BTHK = position_HXK.transpose(0, 1).reshape(B, T, H, -1)
        own = (content_BTHK + position_BTHK, memory_gradient, segment_gradient)
        # Many rounded numbers are added up here: in float32.
        biases = (part.sum((0, 1), dtype=torch.float32) for part in (content_BTHK, position_BTHK))
        return [
            *(part[..., :K] for part in (*own, relative_gradient_HLK.transpose(0, 1)[: M + T], *biases)),
            out_BTHK.new_empty(0, H, K),
        ]

    def _position_factors(self) -> tuple[Tensor, Tensor]:
        """Queries of terms (b) and (d), scaled, and relative keys, in the queries' type: [H, B*T, K] and [H, L, K]."""
        B, T, M, H, K = self.sizes
        query_BTHK, relative_SHK, bias_HK = (self.given[name] for name in ("query", "relative", "position_bias"))
        assert query_BTHK is not None
        assert relative_SHK is not None
        asking_BTHK = query_BTHK.float() if bias_HK is None else query_BTHK.float() + bias_HK.float()
        asking_BTHK = _padded((asking_BTHK * K**-0.5).to(self.dtype))
        relative_LHK = F.pad(relative_SHK.to(self.dtype), (0, _aligned(K) - K, 0, 0, 0, self.length - M - T))
        return asking_BTHK.view(B * T, H, -1).transpose(0, 1), relative_LHK.transpose(0, 1)

    def _inputs(self, asking_HXK: Tensor, relative_HLK: Tensor) -> tuple[Any, ...]:
        """As the kernels take them: heads padded, and the products with every distance, [H, B, T, L]."""
        H, X, L = *asking_HXK.shape[:2], self.length
        # Tiles reach beyond the last row, and what they read there nobody sees; but it must be there.
        room = asking_HXK.new_empty(H * X * L + LARGEST_TILE * (L + 1))
        position_HXL = room[: H * X * L].view(H, X, L)
        with torch.autocast(room.device.type, enabled=False):
            torch.bmm(asking_HXK, relative_HLK.transpose(1, 2), out=position_HXL)
        query, *rest = (_padded(self.given[name]) for name in ("query", "memory_key_value", "key_value"))
        return query, *rest, position_HXL, _padded(self.given["content_bias"]), self.given["lowest"]

    def _launch(self, name: str, positions: int, *tensors: Tensor | None) -> None:
        """With the tiles of so many positions of every lane and head."""
        from transformer_xl.native import tiles

        B, T, M, H, K = self.sizes
        fixed = fixed_sizes(name, queries=T, heads=H, width=K, dtype=self.dtype)
        programs = -(-positions // fixed["J" if name == "backward_keys" else "I"]) * B * H
        lengths = {"B": B, "T": T, "M": M, "L": self.length, "reach": self.reach}
        kernel: Any = getattr(tiles, name)
        kernel[(programs,)](*tensors, K**-0.5, **self.drawing, **lengths, **fixed, dropped=self.dropped)


def fixed_sizes(kernel: str, *, queries: int, heads: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    """What a kernel is compiled for."""
    K = _aligned(width)
    power = 1 << (K - 1).bit_length()
    sizes = tile_sizes(kernel, queries=queries, width=power, itemsize=dtype.itemsize)
    return {"H": heads, "K": K, "width": power, "precision": "tf32" if dtype == torch.float32 else "ieee", **sizes}


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _padded(tensor: Tensor | None) -> Any:
    """With zeros at the end of each head, and at a whole word."""
    if tensor is None:
        return None
    missing = _aligned(tensor.shape[-1]) - tensor.shape[-1]
    if missing:
        return F.pad(tensor, (0, missing))
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % ALIGNED else tensor


def _check(name: str, tensor: Tensor | None, shape: tuple[int, ...], *, like: Tensor) -> None:
    """The kernels trust what they are given."""
    if tensor is None:
        if name in ("content_bias", "position_bias", "neighbours", "lowest"):
            return
        raise InputError(f"attention on a card was given no {name}")
    exact = {"memory_key_value": like.dtype, "key_value": like.dtype, "lowest": torch.int64}
    dtype = exact.get(name, tensor.dtype)
    if tensor.dtype != dtype or tensor.shape != shape or tensor.device != like.device:
        raise InputError(
            f"attention on a card was given {name} as {tensor.dtype} {list(tensor.shape)} on {tensor.device}, where it takes {dtype} {list(shape)} on"
            f" {like.device}; give the whole model one device, and its weights their own shapes"
        )
