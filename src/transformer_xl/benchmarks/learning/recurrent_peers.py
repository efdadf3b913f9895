"""Our own LSTM and QRNN as peers: our models, learning as the other peers do."""

from typing import Any

import torch
from torch import Tensor

from transformer_xl.config import RecurrentConfig
from transformer_xl.config.fields import read
from transformer_xl.model import Recurrent, RecurrentState

READ_AT_ONCE = 1024


class RecurrentPeer:
    def __init__(self, model: dict[str, Any], feed: dict[str, Any]) -> None:
        self.model = Recurrent(read(RecurrentConfig, model, name="model"))
        self.state: RecurrentState | None = None

    def loss(self, tokens_BT: Tensor, *, fresh: bool) -> Tensor:
        output = self.model(tokens_BT[:, :-1], targets_BT=tokens_BT[:, 1:], memory=None if fresh else self.state)
        self.state = output.memory
        mean: Tensor = output.loss_BT.mean()
        return mean

    def score(self, tokens_T: Tensor) -> float:
        state, total = None, 0.0
        for start in range(0, len(tokens_T) - 1, READ_AT_ONCE):
            text_1T = tokens_T[None, start : start + READ_AT_ONCE + 1]
            output = self.model(text_1T[:, :-1].contiguous(), targets_BT=text_1T[:, 1:].contiguous(), memory=state)
            state = output.memory
            total += float(output.loss_BT.sum(dtype=torch.float64))
        return total
