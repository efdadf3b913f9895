"""What `import transformer_xl as txl` opens: a trained model that evaluates, generates and scores.

loaded = txl.load("runs/first", memory=640, clamp_len=400, same_length=True)
loaded.evaluate(split="test").bits_per_token
loaded.generate("def ", tokens=200)
loaded.score("some text")
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from transformer_xl.checkpoint import Checkpoint, load_checkpoint, same_tokenizer
from transformer_xl.config import EvaluationConfig, RunConfig
from transformer_xl.data.store import Store, open_store
from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.errors import DataError, InputError
from transformer_xl.evaluation import Figures, evaluate, make_rule, score_split
from transformer_xl.evaluation.rules import RuleName
from transformer_xl.generation import Sampling, generate, start_tokens, text_pieces
from transformer_xl.inference import Engine
from transformer_xl.model import TransformerXL
from transformer_xl.progress import Advance

SCORED_AT_ONCE = 4096


class Loaded:
    """A model ready for use, with its tokenizer and configuration."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    @property
    def model(self) -> TransformerXL:
        return self.checkpoint.model

    @property
    def tokenizer(self) -> Tokenizer:
        return self.checkpoint.tokenizer

    @property
    def config(self) -> RunConfig:
        return self.checkpoint.config

    def store(self, data: Path | str | None = None) -> Store:
        """The data it was trained on, or other data made with the same tokenizer."""
        path = Path(data or self.checkpoint.about.data)
        if data is None and not path.exists():
            raise DataError(
                f"the data this model was trained on is no longer at {path}; give its new place with --data"
            )
        store = open_store(path)
        if not same_tokenizer(self.checkpoint.folder, store.folder):
            raise DataError(
                f"{path} has another vocabulary ({store.manifest.vocabulary_size:,} {store.manifest.tokenizer_kind} tokens) than this model"
                f" ({self.tokenizer.size:,} {self.tokenizer.kind} tokens); give data prepared with the model's own tokenizer"
            )
        return store

    def evaluate(
        self,
        *,
        data: Path | str | None = None,
        split: str = "test",
        lengths: EvaluationConfig | None = None,
        rule: RuleName = "exact",
        lanes: int | None = None,
        tokens: int | None = None,
        advance: Advance | None = None,
    ) -> Figures:
        """Figures of a split. `lengths` are the run's evaluation lengths unless given; `tokens` reads only the first so many."""
        chosen = self.store(data).split(split)
        chosen = chosen if tokens is None else chosen.first(tokens)
        made = make_rule(self.model, lengths or self.config.evaluation, name=rule, tokens=len(chosen), lanes=lanes)
        return evaluate(self.model, chosen, rule=made, advance=advance)

    def per_token(
        self, *, data: Path | str | None = None, split: str = "test", lengths: EvaluationConfig | None = None
    ) -> NDArray[np.float32]:
        """Each token's loss in nats under the exact rule, in corpus order; NaN for the first, which has no context."""
        chosen = self.store(data).split(split)
        rule = make_rule(self.model, lengths or self.config.evaluation, tokens=len(chosen))
        return score_split(self.model, chosen, rule=rule)

    def generate(self, prompt: str = "", *, tokens: int = 200, **sampling: float) -> str:
        """A continuation of `prompt`, without it. Sampling: temperature, top_k, top_p, seed."""
        return "".join(self.stream(prompt, tokens=tokens, **sampling))

    def stream(self, prompt: str = "", *, tokens: int = 200, **sampling: float) -> Iterator[str]:
        """The same, as it is drawn."""
        before = start_tokens(self.tokenizer, prompt)
        drawn = generate(self.model, before, tokens=tokens, sampling=Sampling(**sampling))  # type: ignore[arg-type]
        yield from text_pieces(self.tokenizer, drawn, before=before)

    def score(self, text: str | bytes) -> NDArray[np.float32]:
        """The loss in nats of each token of `text` given all before it; the first, which has nothing before it, is left out."""
        ids = self.tokenizer.encode(text)
        if len(ids) < 2:
            raise InputError(f"a text of {len(ids)} tokens has nothing to predict; give at least two")
        engine = Engine(self.model)
        tokens_BT = torch.from_numpy(ids)[None].to(self.model.vocabulary.bias_V.device)
        starts = range(0, len(ids), SCORED_AT_ONCE)
        parts = [
            engine.score(tokens_BT[:, start : start + SCORED_AT_ONCE])[0].float().cpu().numpy() for start in starts
        ]
        return np.concatenate(parts)[1:]

    def engine(self, *, lanes: int = 1, memory: int | None = None, state: Path | str | None = None) -> Engine:
        """A reader that remembers the last `memory` tokens of each lane, new or as it was saved; see `inference.Engine`."""
        return (
            Engine.restore(self.model, state) if state is not None else Engine(self.model, lanes=lanes, memory=memory)
        )


def load(
    run: Path | str,
    *,
    memory: int | None = None,
    clamp_len: int | None = None,
    same_length: bool | None = None,
    device: str = "cpu",
) -> Loaded:
    """A run's best checkpoint, or the checkpoint in a folder; with other lengths than it was trained with, where given."""
    checkpoint = load_checkpoint(run, device=device)
    checkpoint.model.set_lengths(memory=memory, clamp_len=clamp_len, same_length=same_length)
    changes = {"memory": memory, "clamp_len": clamp_len, "same_length": same_length}
    asked = {name: value for name, value in changes.items() if value is not None}
    evaluation = replace(checkpoint.config.evaluation, **asked)  # type: ignore[arg-type]
    checkpoint.config = replace(checkpoint.config, model=checkpoint.model.config, evaluation=evaluation)
    return Loaded(checkpoint)
