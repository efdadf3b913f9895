"""What `import transformer_xl as txl` opens: a trained model that evaluates, generates and scores.

loaded = txl.load("runs/first", memory=640, clamp_len=400, same_length=True)
loaded.evaluate(split="test").bits_per_token
loaded.generate("def ", tokens=200)
loaded.score("some text")
"""

import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from transformer_xl import decoding
from transformer_xl.checkpoint import Checkpoint, is_ours, load_checkpoint, same_tokenizer
from transformer_xl.config import EvaluationConfig
from transformer_xl.console import Advance
from transformer_xl.data.store import Store, open_store
from transformer_xl.data.text.streaming import Placed, token_stream
from transformer_xl.data.text.tokenizers import Ids
from transformer_xl.errors import CheckpointError, DataError, InputError
from transformer_xl.evaluation import Figures, evaluate, make_rule, score_split
from transformer_xl.evaluation.scoring import RuleName
from transformer_xl.files import path_from_text
from transformer_xl.inference import Reader, make_reader, restore_reader
from transformer_xl.inference.weights import WeightKind
from transformer_xl.model import AnyModel

SCORED_AT_ONCE = 512
"""Tokens whose distributions are in memory at the same time."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Tokens of a stream, the byte at which each begins in it, and its loss in nats: NaN for the first of all, which has nothing before it."""

    token_P: Ids
    offset_P: Ids
    loss_P: NDArray[np.float32]


class Loaded:
    """A model ready for use, with its tokenizer and configuration."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.model: AnyModel = checkpoint.model
        self.tokenizer, self.config = checkpoint.tokenizer, checkpoint.config

    def store(self, data: Path | str | None = None) -> Store:
        """The data it was trained on, or other data made with the same tokenizer."""
        if not data and not self.checkpoint.about.data:
            raise DataError(
                "this model came from elsewhere, and no data came with it; give some made with its tokenizer, with `data=`"
            )
        path = Path(data) if data else path_from_text(self.checkpoint.about.data)
        if data is None and not path.exists():
            raise DataError(f"the data it was trained on is no longer at {path}; give its new place with `data=`")
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

    def generate(
        self,
        prompt: str = "",
        *,
        tokens: int = 200,
        stop: Sequence[str] = (),
        weights: WeightKind = "exact",
        **sampling: float,
    ) -> str:
        """A continuation of `prompt`, without it. Ends before the first `stop` string. Sampling: the fields of `generation.Sampling`."""
        return "".join(self.stream(prompt, tokens=tokens, stop=stop, weights=weights, **sampling))

    def stream(
        self,
        prompt: str = "",
        *,
        tokens: int = 200,
        stop: Sequence[str] = (),
        weights: WeightKind = "exact",
        **sampling: float,
    ) -> Iterator[str]:
        """The same, as it is drawn: whole characters, and nothing of a stop string."""
        before = decoding.start_tokens(self.tokenizer, prompt)
        chance = decoding.Sampling(**sampling)  # type: ignore[arg-type]
        drawn = decoding.generate(self.model, before, tokens=tokens, sampling=chance, weights=weights)
        yield from decoding.text_pieces(self.tokenizer, drawn, before=before, stop=stop)

    def generate_many(
        self,
        prompts: Sequence[str],
        *,
        tokens: int = 200,
        stop: Sequence[str] = (),
        weights: WeightKind = "exact",
        seeds: Sequence[int] | None = None,
        **sampling: float,
    ) -> list[decoding.Written]:
        """A continuation of each prompt, side by side: each is what `generate` gives with its seed (0, 1, 2, ... unless told)."""
        seeds = range(len(prompts)) if seeds is None else seeds
        before = [decoding.start_tokens(self.tokenizer, prompt) for prompt in prompts]
        samplings = [decoding.Sampling(**sampling, seed=seed) for seed in seeds]  # type: ignore[arg-type]
        if len(samplings) != len(prompts):
            raise InputError(f"{len(samplings)} seeds for {len(prompts)} prompts; give one for each")
        return decoding.write_texts(
            self.model, self.tokenizer, before, tokens=tokens, samplings=samplings, stop=stop, weights=weights
        )

    def likeliest(
        self,
        prompt: str = "",
        *,
        tokens: int = 200,
        beams: int = 4,
        stop: Sequence[str] = (),
        weights: WeightKind = "exact",
    ) -> list[decoding.Written]:
        """Beam search: at most `beams` continuations by falling log-probability per token."""
        before = decoding.start_tokens(self.tokenizer, prompt)
        text = decoding.TextStream(self.tokenizer, before=before, stop=stop) if stop else None
        found = decoding.beam_search(self.model, before, tokens=tokens, beams=beams, text=text, weights=weights)
        return [
            decoding.Written(
                text="".join(decoding.text_pieces(self.tokenizer, hypothesis.tokens, before=before, stop=stop)),
                tokens=hypothesis.length,
                score=hypothesis.score,
            )
            for hypothesis in found
        ]

    def score(self, text: str | bytes, *, weights: WeightKind = "exact") -> NDArray[np.float32]:
        """The loss in nats of each token of `text` given all before it; the first, which has nothing before it, is left out."""
        ids = self.tokenizer.encode(text)
        if len(ids) < 2:
            raise InputError(f"a text of {len(ids)} tokens has nothing to predict; give at least two")
        losses = [scored.loss_P for scored in self._scored([Placed(token_P=ids, offset_P=ids)], weights)]
        return np.concatenate(losses)[1:]

    def score_stream(
        self, stream: Iterable[bytes], *, name: str = "the text", weights: WeightKind = "exact"
    ) -> Iterator[Scored]:
        """The same for a text of any length as its bytes come, in pieces; nothing grows with the text. `name` is what errors call it."""
        return self._scored(token_stream(self.tokenizer, stream, name=name), weights)

    def _scored(self, pieces: Iterable[Placed], weights: WeightKind) -> Iterator[Scored]:
        if not self.model.config.remembers:
            raise InputError("a model with memory 0 sees no text before a token; give it some, such as memory=128")
        engine = self.engine(weights=weights)
        for piece in pieces:
            for start in range(0, len(piece.token_P), SCORED_AT_ONCE):
                some = slice(start, start + SCORED_AT_ONCE)
                tokens_BT = torch.from_numpy(piece.token_P[some])[None].to(self.model.vocabulary.bias_V.device)
                loss_P = engine.score(tokens_BT)[0].float().cpu().numpy()
                yield Scored(token_P=piece.token_P[some], offset_P=piece.offset_P[some], loss_P=loss_P)

    def engine(
        self,
        *,
        lanes: int | None = None,
        memory: int | None = None,
        state: Path | str | None = None,
        weights: WeightKind = "exact",
    ) -> Reader:
        """A reader that remembers the last `memory` tokens of each lane, new (with one lane) or as it was saved; see `inference.Engine`."""
        if state is not None:
            return restore_reader(self.model, state, lanes=lanes, memory=memory, weights=weights)
        return make_reader(self.model, lanes=1 if lanes is None else lanes, memory=memory, weights=weights)


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


def from_pretrained(
    source: Path | str,
    *,
    memory: int | None = None,
    clamp_len: int | None = None,
    same_length: bool | None = None,
    device: str = "cpu",
) -> Loaded:
    """Any checkpoint: a run of ours is loaded as it is; somebody else's file or folder is imported, as `txl import` does, into a folder that lives as
    long as what is returned. Nothing is downloaded."""
    path = Path(source)
    if is_ours(path):
        return load(path, memory=memory, clamp_len=clamp_len, same_length=same_length, device=device)
    if not path.exists() and not path.with_name(f"{path.name}.index").exists():
        raise CheckpointError(
            f"there is no {source} here, and names of models on a hub are not looked up; download it and name its folder"
        )
    # Not under the name of what is half-written: that may be removed by anyone.
    scratch = Path(tempfile.mkdtemp(prefix="txl-imported-"))
    try:
        # Late: whoever loads a run of ours needs nothing of other people's.
        from transformer_xl.interop.formats.foreign_model import Lengths
        from transformer_xl.interop.importing import import_run

        lengths = Lengths(memory=memory, clamp_len=clamp_len, same_length=same_length)
        loaded = load(import_run(path, scratch / "run", lengths=lengths).run, device=device)
    except BaseException:
        shutil.rmtree(scratch)
        raise
    loaded.checkpoint.run = None  # nothing about it is to be written where it will vanish
    weakref.finalize(loaded, shutil.rmtree, scratch, ignore_errors=True)
    return loaded
