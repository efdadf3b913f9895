"""One token of every lane through all layers, with shapes and addresses that never change: so that `torch.compile` or a CUDA graph takes the whole step,
where a card would otherwise be told several hundred small things for each token. The engine asks it on CUDA; elsewhere it has kernels of its own.

slots of a buffer   . . m m m m 0 . .      what is new goes where `end` says; a slot's distance from there says which product it gets,
distance                4 3 2 1 0          and all slots are looked at, whatever they hold: what is not seen gets no share
"""

from typing import Any, cast

import torch
from torch import Tensor

from transformer_xl.console import say
from transformer_xl.inference.cache import Cache
from transformer_xl.model import TransformerXL
from transformer_xl.model.attention import heads, queries_and_positions
from transformer_xl.model.encodings import Distances
from transformer_xl.model.layer import Layer, Product
from transformer_xl.model.products import at_least_float32

STEADY = 16
"""So many steps with the same lanes, and a graph is worth recording."""
SAME = 1e-2
"""Of the largest value, by which a graph may differ from the operations that it was recorded of."""


class OneToken:
    def __init__(
        self, model: TransformerXL, kept: Cache, distances: list[Distances], *, reach: int, product: Product
    ) -> None:
        """`distances`: of each layer the nearest M+1. `reach`: how far a token sees, at most M."""
        self.model, self.distances, self.reach, self.product = model, distances, reach, product
        self.kept, self.buffers, self.steps = kept, kept.keys, 0
        self._graph: Any = None
        """Inputs, output and recording; False where it could not be recorded."""

    def fits(self, kept: Cache) -> bool:
        """Whether the lanes still lie where they lay."""
        return kept is self.kept and kept.keys is self.buffers

    def __call__(self, hidden_B1D: Tensor) -> Tensor:
        """New keys and values are kept at the cache's `end`; counting on is the caller's."""
        end_1 = torch.tensor([self.kept.end])
        lowest_B = end_1 - self.kept.valid_B
        given = (hidden_B1D, *(told.to(hidden_B1D.device, non_blocking=True) for told in (end_1, lowest_B)))
        self.steps += 1
        if hidden_B1D.is_cuda and self.steps > STEADY and self._graph is None:
            self._graph = self._recorded(given)
        if not self._graph:
            return self.step(*given)
        return self._replayed(given)

    def step(self, hidden_B1D: Tensor, end_1: Tensor, lowest_B: Tensor) -> Tensor:
        """The last layer's output. Nothing here depends on a number that the host would have to wait for, and no shape on where a text has got to."""
        slot_W = torch.arange(self.buffers[0].shape[2], device=hidden_B1D.device)
        distance_W = end_1 - slot_W
        mask_BW = (distance_W < 0) | (distance_W > self.reach) | (slot_W < lowest_B[:, None])

        def attend_kept(layer: Layer, query_B1X: Tensor, _: Tensor | None, key_value_B1X: Tensor) -> Tensor:
            (query_BH1K,), new = heads(layer, query_B1X), heads(layer, key_value_B1X)
            key_BHWK, value_BHWK = self.kept.keys[layer.number], self.kept.values[layer.number]
            for buffer_BHWK, new_BH1K in zip((key_BHWK, value_BHWK), new, strict=True):
                buffer_BHWK.index_copy_(2, end_1, new_BH1K)
            content_BH1K, position_BH1R = queries_and_positions(query_BH1K, self.distances[layer.number])
            score_BH1W = at_least_float32(content_BH1K @ key_BHWK.transpose(-1, -2))
            if position_BH1R is not None:
                farthest = position_BH1R.shape[-1] - 1
                score_BH1W = score_BH1W + position_BH1R.index_select(3, (farthest - distance_W).clamp(0, farthest))
            share_BH1W = score_BH1W.masked_fill(mask_BW[:, None, None], float("-inf")).softmax(-1)
            mixed_B1X = (share_BH1W.to(value_BHWK.dtype) @ value_BHWK).transpose(1, 2).reshape(query_B1X.shape)
            if layer.neighbours_WX is None:
                return mixed_B1X
            return mixed_B1X + self._neighbours(layer.neighbours_WX, value_BHWK, end_1, lowest_B)

        return self.model.through_layers(hidden_B1D, attend_kept, product=self.product)

    def _neighbours(self, weight_NX: Tensor, value_BHWK: Tensor, end_1: Tensor, lowest_B: Tensor) -> Tensor:
        """As `from_neighbours` adds them."""
        seen = min(len(weight_NX), self.reach + 1)
        slot_N = end_1 - torch.arange(seen, device=end_1.device)
        value_BNX = value_BHWK.index_select(2, slot_N.clamp(min=0)).transpose(1, 2).flatten(2)
        value_BNX = value_BNX.masked_fill((slot_N < lowest_B[:, None])[..., None], 0.0)
        return (weight_NX[:seen] * value_BNX).sum(1, keepdim=True)

    # --- as a CUDA graph

    def _recorded(self, given: tuple[Tensor, ...]) -> Any:
        """What is asked of the card in one step, recorded once; and compared once, for a recording that is wrong would be wrong silently."""
        try:
            inputs = tuple(tensor.clone() for tensor in given)
            expected_B1D = self.step(*inputs)  # also makes whatever torch makes at the first call
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out_B1D = self.step(*inputs)
            graph.replay()
            off = (out_B1D - expected_B1D).abs().max() / expected_B1D.abs().max()
            if not float(off) < SAME:
                raise RuntimeError(f"it is {float(off):.2g} off")
        except RuntimeError as error:
            said = str(error).strip().partition("\n")[0]
            say(f"one token's step cannot be recorded as a CUDA graph ({said}); it is computed without, more slowly")
            return False
        return inputs, out_B1D, graph

    def _replayed(self, given: tuple[Tensor, ...]) -> Tensor:
        inputs, out_B1D, graph = self._graph
        for place, tensor in zip(inputs, given, strict=True):
            place.copy_(tensor)
        graph.replay()
        return cast(Tensor, out_B1D.clone())
