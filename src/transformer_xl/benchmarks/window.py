"""The vanilla model's step, as fast as we can make it: what memory is compared with must not be slow for want of care.

The lower layers read the window with an engine that starts anew; in the last one only the last position asks. Relative keys are projected once.
"""

from dataclasses import replace

import torch
from torch import Tensor

from transformer_xl.inference import Engine
from transformer_xl.model import TransformerXL
from transformer_xl.model.attention import Mask, backend_of, segment_attention
from transformer_xl.model.encodings import Distances


class WindowReader:
    def __init__(self, model: TransformerXL) -> None:
        """For a model with the paper's encoding, u and v shared, and at least two layers."""
        if model.config.encoding != "relative" or not model.config.share_biases or model.final_norm is not None:
            raise NotImplementedError("the fast window is written for the shapes that are timed")
        self.model = model
        with torch.device("meta"):
            lower = TransformerXL(replace(model.config, n_layer=model.config.n_layer - 1))
        shared = model.state_dict()
        lower.load_state_dict({name: shared[name] for name in lower.state_dict()}, assign=True)
        self._lower = Engine(lower.eval(), memory=0, sight="segment")
        self._distances: dict[int, list[Distances]] = {}

    @torch.inference_mode()
    def step(self, tokens_BT: Tensor) -> Tensor:
        """The last layer's output at the last position of a window without memory, [B, D]."""
        T = tokens_BT.shape[1]
        self._lower.reset(range(len(tokens_BT)))
        hidden_BTD = self._lower.read(tokens_BT)
        if T not in self._distances:
            self._distances = {T: self.model.encoding.distances(T)}
        mask = Mask(memory=T - 1, segment=1, valid_B=None, visible_distance=None, device=tokens_BT.device)
        by = backend_of("attention", self.model.config, hidden_BTD)
        # To the last layer all positions but one are memory: that one asks, and nothing is computed for the others but keys and values.
        attend = segment_attention(by, self._distances[T], mask)
        answer_B1D: Tensor = self.model.layers[-1](hidden_BTD[:, -1:], hidden_BTD[:, :-1], attend)
        return answer_B1D[:, 0]
