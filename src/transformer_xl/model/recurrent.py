"""The recurrent models of the paper's tables behind the same protocol: a state takes the place of memory, and is carried from segment to segment.

lstm   PyTorch's own, with the weights from hidden to hidden dropped as AWD-LSTM does
qrnn   gates of all positions at once, then fo-pooling:  c_t = f_t c_{t-1} + (1 - f_t) z_t,  h_t = o_t c_t
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transformer_xl.config import RecurrentConfig
from transformer_xl.devices import to_device
from transformer_xl.errors import InputError, shown
from transformer_xl.model import products
from transformer_xl.model.dropout import Dropout
from transformer_xl.model.memory import check_fits, in_order
from transformer_xl.model.protocol import Output, check_segment
from transformer_xl.model.scan import linear_scan
from transformer_xl.model.vocabulary import Places, Vocabulary


@dataclass(frozen=True, kw_only=True)
class RecurrentState:
    """What each layer knows of the text so far, detached. All zeros at the start."""

    layers: tuple[Tensor, ...]
    """One [B, P, X] for each layer: the hidden state and the cell of an lstm, the cell of a qrnn; then, with window 2, the last token's embedding."""

    starts_full: ClassVar[bool] = False

    @property
    def lanes(self) -> int:
        return self.layers[0].shape[0]

    def reset(self, lanes: Sequence[int]) -> "RecurrentState":
        index = to_device(torch.as_tensor(lanes, dtype=torch.int64), self.layers[0].device)
        return RecurrentState(layers=tuple(part.index_fill(0, index, 0.0) for part in self.layers))

    def select(self, lanes: Sequence[int]) -> "RecurrentState":
        index = to_device(torch.as_tensor(lanes, dtype=torch.int64), self.layers[0].device)
        return RecurrentState(layers=tuple(part[index] for part in self.layers))

    def to(self, device: torch.device | str | None = None, *, dtype: torch.dtype | None = None) -> "RecurrentState":
        return RecurrentState(layers=tuple(part.to(device=device, dtype=dtype) for part in self.layers))

    def tensors(self) -> dict[str, Tensor]:
        return {f"layer_{number}": part.contiguous() for number, part in enumerate(self.layers)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "RecurrentState":
        """They may come from a file; whether they fit, the model says."""
        return cls(layers=in_order(tensors))


class LstmLayer(nn.Module):
    def __init__(self, width_in: int, width_out: int, *, weight_dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width_in, width_out, batch_first=True)
        self.weight_dropout = weight_dropout

    def forward(self, x_BTX: Tensor, state_BPX: Tensor) -> tuple[Tensor, Tensor]:
        # Called through torch's function and not the module, which would keep the weights it was built with and drop nothing.
        into_XX, recurrent_XX, *biases = [parameter for _, parameter in self.lstm.named_parameters()]
        weights = [into_XX, F.dropout(recurrent_XX, self.weight_dropout, self.training), *biases]
        start = [part_1BX.contiguous() for part_1BX in state_BPX.transpose(0, 1).unsqueeze(1)]
        out_BTX, hidden_1BX, cell_1BX = torch.lstm(x_BTX, start, weights, True, 1, 0.0, self.training, False, True)
        return out_BTX, torch.cat([hidden_1BX, cell_1BX]).transpose(0, 1)


class QrnnLayer(nn.Module):
    def __init__(self, width_in: int, width_out: int, *, window: int, weight_dropout: float) -> None:
        super().__init__()
        self.window = window
        self.gates = nn.Linear(window * width_in, 3 * width_out)
        self.weight_dropout = weight_dropout

    def forward(self, x_BTX: Tensor, state_B1X: Tensor, before_B1X: Tensor | None) -> tuple[Tensor, Tensor]:
        if before_B1X is not None:
            x_BTX = torch.cat([torch.cat([before_B1X, x_BTX[:, :-1]], dim=1), x_BTX], dim=-1)
        weight = F.dropout(self.gates.weight, self.weight_dropout, self.training)
        new_BTX, forget_BTX, output_BTX = products.linear(x_BTX, weight, self.gates.bias).chunk(3, dim=-1)
        forget_BTX = forget_BTX.sigmoid()
        cell_BTX = linear_scan(forget_BTX, (1 - forget_BTX) * new_BTX.tanh(), state_B1X[:, 0])
        return output_BTX.sigmoid() * cell_BTX, cell_BTX[:, -1:]


class Recurrent(nn.Module):
    memory_kind = RecurrentState
    recompute = False
    """Only Transformer-XL can; whoever asks for it here is refused by the configuration."""
    auxiliary_classifiers = ()
    reads_in: torch.dtype | None = None
    """What readers compute products in, where it is less than float32."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        self.vocabulary = Vocabulary(config)
        self.layers = nn.ModuleList(self._layers())
        self.embedding_dropout = Dropout(config.dropout_rate("embedding"), locked=True)
        self.hidden_dropout = Dropout(config.dropout_rate("hidden"), locked=True)
        self.output_dropout = Dropout(config.dropout_rate("output"), locked=True)
        if not self.vocabulary.bias_V.is_meta:  # where torch would import its compiler, 1.8 s, to draw nothing
            self.initialise()

    def _layers(self) -> list[nn.Module]:
        config = self.config
        if config.cell == "lstm":
            return [LstmLayer(*widths, weight_dropout=config.weight_dropout) for widths in config.widths()]
        windows = [config.window, *[1] * (config.n_layer - 1)]
        return [
            QrnnLayer(*widths, window=window, weight_dropout=config.weight_dropout)
            for widths, window in zip(config.widths(), windows, strict=True)
        ]

    def initialise(self) -> None:
        """The layers as PyTorch draws them, the embeddings as Transformer-XL's."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.LSTM):
                module.reset_parameters()
        self.vocabulary.initialise()

    def set_lengths(
        self, *, memory: int | None = None, clamp_len: int | None = None, same_length: bool | None = None
    ) -> None:
        """Only there to refuse them: a state has no length."""
        for name, value in (("memory", memory), ("clamp_len", clamp_len), ("same_length", same_length)):
            if value:
                raise InputError(f"{name}: {value} is for attention, and the {self.config.cell} has none; leave it out")

    def start_memory(self, lanes: int) -> RecurrentState:
        """Nothing read yet."""
        like, parts = self.vocabulary.bias_V, 2 if self.config.cell == "lstm" else 1
        widths = sum(width for _, width in self.config.widths())
        check_fits(
            lanes * parts * widths, like=like, what=f"a state for {shown(lanes)} lanes", way_out="take fewer lanes"
        )
        layers = [like.new_zeros(lanes, parts, width) for _, width in self.config.widths()]
        if self._sees_token_before:
            layers.append(like.new_zeros(lanes, 1, self.config.d_model))
        return RecurrentState(layers=tuple(layers))

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        targets_BT: Tensor | None = None,
        memory: RecurrentState | None = None,
        overlap: int = 0,
        progress: float = 0.0,
        places: Places | None = None,
    ) -> Output[RecurrentState]:
        """One segment of every lane. `overlap` is refused: the state in the middle of a segment is not kept. `progress` changes nothing here.
        `places`: of the clusters of tokens and targets, where the host knows them."""
        places = Places() if places is None else places
        B, T = check_segment(tokens_BT, targets_BT, vocabulary=self.config.vocabulary)
        if overlap:
            raise InputError(
                f"overlap: {overlap} is for memory, and the {self.config.cell} keeps only its last state; set it to 0"
            )
        memory = self._take(memory, lanes=B)
        hidden_BTX = self.embedding_dropout(self.vocabulary.embed(tokens_BT, places=places.tokens), 1)
        embedded_BTD, states = hidden_BTX, []
        for number, layer in enumerate(self.layers):
            state_BPX = memory.layers[number].to(hidden_BTX.dtype)
            if isinstance(layer, QrnnLayer):
                before_B1X = memory.layers[-1] if layer.window == 2 else None
                hidden_BTX, state_BPX = layer(hidden_BTX, state_BPX, before_B1X)
            else:
                hidden_BTX, state_BPX = layer(hidden_BTX, state_BPX)
            states.append(state_BPX.detach())
            hidden_BTX = (self.hidden_dropout if number < len(self.layers) - 1 else self.output_dropout)(hidden_BTX, 1)
        if self._sees_token_before:
            states.append(embedded_BTD[:, -1:].detach())
        scored_BTD = hidden_BTX[:, T - targets_BT.shape[1] :] if targets_BT is not None else hidden_BTX
        loss_BT = None
        if targets_BT is not None:
            loss_BT = self.vocabulary.loss(scored_BTD, targets_BT, places=places.targets)
        return Output(
            loss_BT=loss_BT,
            hidden_BTD=hidden_BTX,
            memory=RecurrentState(layers=tuple(states)),
        )

    def log_probabilities(self, hidden_BTD: Tensor) -> Tensor:
        return self.vocabulary.log_probabilities(hidden_BTD)

    @property
    def _sees_token_before(self) -> bool:
        return self.config.cell == "qrnn" and self.config.window == 2

    def _take(self, memory: RecurrentState | None, *, lanes: int) -> RecurrentState:
        if memory is None:
            return self.start_memory(lanes)
        self.check_memory(memory, lanes=lanes)
        return memory

    def check_memory(self, memory: RecurrentState, *, lanes: int) -> None:
        """Whether this model could have returned it for so many lanes. (In lower precision than its own, under autocast.)"""
        wanted = [list(part.shape) for part in self.start_memory(lanes).layers]
        shapes = [list(part.shape) for part in memory.layers]
        if shapes != wanted:
            raise InputError(
                f"memory: shapes {shapes} where {wanted} are expected; pass what this model returned for these lanes, or none"
            )
        device = self.vocabulary.bias_V.device
        for number, part in enumerate(memory.layers):
            if not part.is_floating_point() or part.device != device:
                raise InputError(
                    f"memory: layer {number} is {part.dtype} on {part.device}, where floating numbers on {device} are expected; pass what this"
                    " model returned, or none"
                )
