"""A Transformer-XL as an ONNX graph for every number of lanes, tokens and remembered positions, checked against torch by onnxruntime.

tokens [B, T]   memory_0 ... memory_N-1 [B, M, D]   ->   log_probabilities [B, T, V]   new_memory_0 ... [B, min(M + T, memory), D]

A model that embeds runs of tokens has recent [B, P], its last tokens (-1: none), beside them, and new_recent.
"""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from transformer_xl.config import RunConfig
from transformer_xl.console import progress
from transformer_xl.errors import CheckpointError
from transformer_xl.model import Memory, TransformerXL

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
LONGEST = 1 << 24
TOLERANCE = 3e-5
"""Largest difference of log-probabilities, or of remembered values, as a share of the largest of them (of 1, if that is more): rounding only."""
CHECKED_SEGMENTS = (4, 1, 7)
OTHERS_CHATTER = (r"# The axis name", r"`isinstance\(treespec, LeafSpec\)` is deprecated")


def require_onnx() -> None:
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise CheckpointError(
            f"exporting to ONNX needs {' and '.join(missing)}; install with: pip install 'transformer-xl[onnx]'"
        )


class Graph(nn.Module):
    """What the graph computes: no checks, and memory as plain tensors that are all real."""

    def __init__(self, model: TransformerXL) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens_BT: Tensor, memory: Sequence[Tensor] = (), recent_BP: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        config = self.model.config
        nothing = self.model.vocabulary.bias_V.new_zeros(tokens_BT.shape[0], 0, config.d_model)
        layers = memory or [nothing] * config.n_layer
        inputs: list[Tensor] = []
        hidden_BTD = self.model.pass_through(tokens_BT, layers, valid_B=None, recent_BP=recent_BP, inputs=inputs)
        new = [
            torch.cat([old_BMD, new_BTD], dim=1)[:, -config.memory :]
            for old_BMD, new_BTD in zip(memory, inputs, strict=False)
        ]
        if recent_BP is not None:
            new.append(torch.cat([recent_BP, tokens_BT], dim=1)[:, tokens_BT.shape[1] :])
        return self.model.log_probabilities(hidden_BTD), new


def write_graph(model: TransformerXL, path: Path) -> None:
    """Traced on a processor, wherever the model is."""
    config = model.config
    model = model if model.vocabulary.bias_V.is_cpu else deepcopy(model).cpu()
    remembered = config.n_layer if config.memory else 0
    longest = config.learned_positions if config.encoding == "per_layer" else LONGEST
    lanes, segment, memory = Dim("lanes", max=LONGEST), Dim("segment", max=longest), Dim("memory", max=LONGEST)
    example: tuple[Any, ...] = (torch.zeros(2, min(3, longest), dtype=torch.int64),)
    shapes: tuple[Any, ...] = ({0: lanes, 1: segment},)
    if remembered:
        example += ([torch.zeros(2, 5, config.d_model) for _ in range(remembered)],)
        shapes += ([{0: lanes, 1: memory}] * remembered,)
    runs = [("recent", "new_recent")] if remembered and config.recent else []
    if runs:
        example += (torch.full((2, config.recent), -1),)
        shapes += ({0: lanes},)
    with torch.no_grad(), progress("tracing for ONNX", total=1, unit="graphs") as advance, _quiet():
        program = torch.onnx.export(
            Graph(model).eval(),
            example,
            dynamo=True,
            verbose=False,
            dynamic_shapes=shapes,
            input_names=["tokens", *(f"memory_{n}" for n in range(remembered)), *(given for given, _ in runs)],
            output_names=[
                "log_probabilities",
                *(f"new_memory_{n}" for n in range(remembered)),
                *(found for _, found in runs),
            ],
        )
        assert program is not None
        program.save(path)
        advance(1)


def describe_graph(model: TransformerXL, run: RunConfig) -> dict[str, Any]:
    """What somebody who runs the graph must know beside it."""
    config = model.config
    empty = not config.memory or config.initial_memory == "empty"
    return {
        "inputs": "tokens [lanes, segment] int64, memory_N [lanes, memory, width] float32 for each layer N"
        if config.memory
        else "tokens [lanes, segment] int64",
        "outputs": "log_probabilities [lanes, segment, vocabulary]; new_memory_N, which the next segment is given as memory_N",
        **(
            {
                "recent": f"[lanes, {config.recent}] int64, -1 before the first token; then new_recent of the segment before"
            }
            if config.memory and config.recent
            else {}
        ),
        "first_memory": "of length 0" if empty else f"{config.memory} zero vectors",
        "longest_memory": config.memory,
        "segment": run.evaluation.segment,
        "layers": config.n_layer,
        "width": config.d_model,
        "vocabulary": config.vocabulary,
    }


@torch.no_grad()
def check_graph(path: Path, model: TransformerXL) -> float:
    """The largest difference from torch, as a share of the values; an error where it is more than rounding."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    config, device, largest = model.config, model.vocabulary.bias_V.device, 0.0
    with progress("checking with onnxruntime", total=2 * len(CHECKED_SEGMENTS), unit="segments") as advance:
        for lanes, full in ((2, False), (1, True)):
            memory = _full_memory(model) if full else model.start_memory(lanes)
            for number, length in enumerate(CHECKED_SEGMENTS):
                length = min(length, config.learned_positions) if config.encoding == "per_layer" else length
                generator = torch.Generator().manual_seed(number)
                tokens_BT = torch.randint(config.vocabulary, (lanes, length), generator=generator)
                given = {"tokens": tokens_BT.numpy()}
                if config.memory:
                    given |= {f"memory_{n}": layer_BMD.cpu().numpy() for n, layer_BMD in enumerate(memory.layers)}
                    if memory.recent_BP is not None:
                        given["recent"] = memory.recent_BP.cpu().numpy()
                found = [torch.from_numpy(value) for value in session.run(None, given)]
                output = model(tokens_BT.to(device), memory=memory)
                memory = output.memory
                wanted = [model.log_probabilities(output.hidden_BTD), *(memory.layers if config.memory else ())]
                wanted += [part for part in (memory.recent_BP,) if part is not None and config.memory]
                for ours, theirs in zip((part.cpu() for part in wanted), found, strict=True):
                    difference = float("inf")
                    if ours.shape == theirs.shape:
                        difference = float((ours - theirs).abs().max() / ours.abs().max().clamp(min=1))
                    if not difference <= TOLERANCE:
                        raise CheckpointError(
                            f"the ONNX graph differs from the model by {difference:.1e} of its values on a segment of {length} tokens, so it was not written"
                        )
                    largest = max(largest, difference)
                advance(1)
    return largest


def _full_memory(model: TransformerXL) -> Memory:
    """Of its whole length, and of the size that norms give hidden states."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    layers = tuple(torch.randn(1, config.memory, config.d_model, generator=generator) for _ in range(config.n_layer))
    recent_BP = torch.zeros(1, config.recent, dtype=torch.int64) if config.recent else None
    memory = Memory(layers=layers, valid_B=torch.tensor([config.memory]), recent_BP=recent_BP)
    return memory.to(model.vocabulary.bias_V.device)


@contextmanager
def _quiet() -> Iterator[None]:
    """What torch's exporter says of itself on every export, and nothing else."""
    registration = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = registration.level
    registration.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for message in OTHERS_CHATTER:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        registration.setLevel(level)
