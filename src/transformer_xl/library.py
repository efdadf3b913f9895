"""What `import transformer_xl as txl` opens: a trained model that evaluates, generates, scores and shows what it looks at. Threads may share one.

loaded = txl.load("runs/first", memory=640, clamp_len=400, same_length=True)        # txl.load() alone: the model in the box
loaded.evaluate(split="test").bits_per_token
loaded.sweep([0, 128, 512]).plot()
loaded.generate("def ", tokens=200, temperature=0.8)
loaded.score("some text")
loaded.attention("some text").plot(layer=1, head=2)
"""

import hashlib
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch
from numpy.typing import NDArray

from transformer_xl import decoding
from transformer_xl.arguments import checked
from transformer_xl.checkpoint import Checkpoint, is_ours, load_checkpoint, same_tokenizer
from transformer_xl.checkpoint.folder import CHECKSUMS
from transformer_xl.config import AdaptationConfig, EvaluationConfig
from transformer_xl.config.adaptation import Adapt
from transformer_xl.console import Advance, progress
from transformer_xl.data.remote import is_address
from transformer_xl.data.store import Split, Store, open_store
from transformer_xl.data.text.display import readable
from transformer_xl.data.text.streaming import Placed, placed_tokens, token_stream
from transformer_xl.data.text.tokenizers import encode_utf8
from transformer_xl.devices import AUTO, Precision, choose_device, half_of, to_device
from transformer_xl.errors import CheckpointError, DataError, InputError
from transformer_xl.evaluation import Figures, evaluate, make_rule, score_split
from transformer_xl.evaluation.lines import LAST_LINES, SCORED_AT_ONCE, By, LineScorer, Scorer
from transformer_xl.evaluation.scores import Scores
from transformer_xl.evaluation.scoring import Rule, RuleName
from transformer_xl.evaluation.sweep import Sweep
from transformer_xl.files import path_from_text
from transformer_xl.inference import PortableReader, Reader, make_reader, restore_reader
from transformer_xl.inference.weights import WeightKind
from transformer_xl.model import AnyModel, twin

if TYPE_CHECKING:
    from transformer_xl.adaptation import AdaptiveReader, Statistics
    from transformer_xl.analysis.attention_view import Attention


class Loaded:
    """A model ready for use, with its tokenizer and configuration."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.model: AnyModel = checkpoint.model
        self.tokenizer, self.config = checkpoint.tokenizer, checkpoint.config

    @property
    def device(self) -> torch.device:
        return self.model.vocabulary.bias_V.device

    def store(self, data: Path | str | None = None) -> Store:
        """The data it was trained on, or other data made with the same tokenizer."""
        if not data and not self.checkpoint.about.data:
            raise DataError(
                "this model came from elsewhere, and no data came with it; give some made with its tokenizer, with `data=`"
            )
        path = data or path_from_text(self.checkpoint.about.data)
        if data is None and is_address(path):  # a file that may be anybody's decides nowhere we go on the network
            where = self.checkpoint.about.data
            raise DataError(f"the data it was trained on lies at {where}; have it read from there with `data={where}`")
        if data is None and not Path(path).exists():
            raise DataError(f"the data it was trained on is no longer at {path}; give its new place with `data=`")
        store = open_store(path)
        if not same_tokenizer(self.checkpoint.folder, store.folder):
            raise DataError(
                f"{path} has another vocabulary ({store.manifest.vocabulary_size:,} {store.manifest.tokenizer_kind} tokens) than this model"
                f" ({self.tokenizer.size:,} {self.tokenizer.kind} tokens); give data prepared with the model's own tokenizer"
            )
        return store

    def __repr__(self) -> str:
        about, shape = self.checkpoint.about, self.config.model.in_words
        where = self.checkpoint.run.path if self.checkpoint.run is not None else self.checkpoint.folder
        weights = sum(parameter.numel() for parameter in self.model.parameters())
        told = f"{shape.kind}, {shape.shape}, {weights:,} weights, memory {shape.memory}, {self.tokenizer.kind} tokens"
        return f"<{where} at step {about.step:,}: {told}, on {self.device}>"

    @checked
    def evaluate(
        self,
        *,
        data: Path | str | None = None,
        split: str = "test",
        memory: int | None = None,
        segment: int | None = None,
        clamp_len: int | None = None,
        same_length: bool | None = None,
        rule: RuleName = "exact",
        lanes: int | None = None,
        tokens: int | None = None,
        score_boundaries: bool = False,
        weights: WeightKind = "exact",
        adapt: Adapt | AdaptationConfig | None = None,
        advance: Advance | None = None,
        lengths: EvaluationConfig | None = None,
    ) -> Figures:
        """Figures of a split. Lengths are the run's own for evaluation unless given; `tokens` reads only the first so many. With `adapt` the model learns
        while it reads, each token after it was scored. A bar shows how far it is, unless `advance` is told instead."""
        asked = self._lengths(lengths, memory=memory, segment=segment, clamp_len=clamp_len, same_length=same_length)
        chosen = self.store(data).split(split)
        chosen = chosen if tokens is None else chosen.first(tokens)
        # Another object with the same weights: its lengths change, and somebody may be reading with this one.
        model, of_rule = twin(self.model), {"score_boundaries": score_boundaries, "weights": weights}
        made = make_rule(model, asked, name=rule, tokens=len(chosen), lanes=lanes, **of_rule)  # type: ignore[arg-type]
        if advance is not None:
            return self._evaluated(model, chosen, made, adapt, advance)
        with progress(f"evaluating with memory {made.memory}", total=len(chosen) - 1, unit="tokens") as shown:
            return self._evaluated(model, chosen, made, adapt, shown)

    def _evaluated(
        self, model: AnyModel, split: Split, rule: Rule, adapt: Adapt | AdaptationConfig | None, advance: Advance
    ) -> Figures:
        if adapt is None:
            return evaluate(model, split, rule=rule, advance=advance)
        from transformer_xl.adaptation.evaluating import evaluate_adapting

        how, statistics = self.with_statistics(adapt, segment=rule.segment)
        return evaluate_adapting(model, split, how, rule=rule, statistics=statistics, advance=advance)

    @checked
    def sweep(
        self,
        memories: Sequence[int],
        *,
        data: Path | str | None = None,
        split: str = "test",
        segment: int | None = None,
        clamp_len: int | None = None,
        same_length: bool | None = None,
        rule: RuleName = "exact",
        lanes: int | None = None,
        tokens: int | None = None,
        score_boundaries: bool = False,
        weights: WeightKind = "exact",
    ) -> Sweep:
        """The same text with more and less memory: a table, with `.plot()` and `.to_pandas()`."""
        if not memories:
            raise InputError("a sweep of no memories has nothing to compare; give some, such as [0, 128, 512]")
        asked = self._lengths(None, segment=segment, clamp_len=clamp_len, same_length=same_length)
        figures = []
        with progress("sweeping", total=len(memories), unit="memories") as done:
            for memory in memories:
                figures.append(
                    self.evaluate(
                        data=data,
                        split=split,
                        memory=memory,
                        segment=asked.segment,
                        clamp_len=asked.clamp_len,
                        same_length=asked.same_length and memory > 0,
                        rule=rule,
                        lanes=lanes,
                        tokens=tokens,
                        score_boundaries=score_boundaries,
                        weights=weights,
                    )
                )
                done(1)
        about, run = self.checkpoint.about, self.checkpoint.run
        title = f"{run.path.name if run is not None else self.checkpoint.folder.name} on {about.corpus} {split}"
        return Sweep(figures, unit=about.unit, trained=self.config.model.memory, title=title)

    @checked
    def per_token(
        self,
        *,
        data: Path | str | None = None,
        split: str = "test",
        memory: int | None = None,
        segment: int | None = None,
        clamp_len: int | None = None,
        same_length: bool | None = None,
        lengths: EvaluationConfig | None = None,
    ) -> NDArray[np.float32]:
        """Each token's loss in nats under the exact rule, in corpus order; NaN for the first, which has no context."""
        asked = self._lengths(lengths, memory=memory, segment=segment, clamp_len=clamp_len, same_length=same_length)
        chosen, model = self.store(data).split(split), twin(self.model)
        rule = make_rule(model, asked, tokens=len(chosen))
        return score_split(model, chosen, rule=rule)

    def _lengths(self, lengths: EvaluationConfig | None, **asked: int | None) -> EvaluationConfig:
        """The run's own, but for those that are asked for."""
        if lengths is not None:
            told = (
                "lengths= goes with the next version; give memory=, segment=, clamp_len= and same_length= by themselves"
            )
            warnings.warn(told, DeprecationWarning, stacklevel=3)
        given = {name: value for name, value in asked.items() if value is not None}
        return replace(lengths or self.config.evaluation, **given)  # type: ignore[arg-type]

    @checked
    def attention(self, text: str | bytes, *, memory: int | None = None) -> "Attention":
        """What each head looks at in `text`: `.plot(layer=1, head=2)` from its last tokens, `.plot()` on average, `.heads` as rows. Every token sees
        its last `memory` tokens, those that the run evaluates with unless told."""
        from transformer_xl.analysis.attention_view import Attention, check_attends

        model = check_attends(twin(self.model), name=self.checkpoint.folder)
        ids = self.tokenizer.encode(text)
        if len(ids) < 2:
            raise InputError(f"a text of {len(ids)} tokens has nothing to look back at; give at least two")
        lengths = self._lengths(None, memory=memory)
        return Attention(model, ids, lengths=lengths, name_of=lambda token: readable(self.tokenizer, token))

    @checked
    def generate(
        self,
        prompt: str = "",
        *,
        tokens: int = 200,
        stop: str | Sequence[str] = (),
        temperature: float = 1.0,
        top_k: int = 40,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        weights: WeightKind = "exact",
        adapt: Adapt | AdaptationConfig | None = None,
    ) -> str:
        """A continuation of `prompt`, without it. Ends before the first `stop` string. How it is drawn: `decoding.Sampling` explains each word. With
        `adapt` the prompt is learned from, and then continued."""
        pieces = self.stream(
            prompt,
            tokens=tokens,
            stop=stop,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            weights=weights,
            adapt=adapt,
        )
        return "".join(pieces)

    @checked
    def stream(
        self,
        prompt: str = "",
        *,
        tokens: int = 200,
        stop: str | Sequence[str] = (),
        temperature: float = 1.0,
        top_k: int = 40,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        weights: WeightKind = "exact",
        adapt: Adapt | AdaptationConfig | None = None,
    ) -> Iterator[str]:
        """The same, as it is drawn: whole characters, and nothing of a stop string."""
        if tokens < 0:
            raise InputError(f"`tokens={tokens}` is no number of tokens; give 1 or more")
        before = decoding.start_tokens(self.tokenizer, prompt)
        chance = decoding.Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
        )
        if adapt is None:
            drawn = decoding.generate(self.model, before, tokens=tokens, sampling=chance, weights=weights)
        else:
            from transformer_xl.adaptation.writing import continued

            self._refuse_rounding(weights)
            drawn = continued(self.adaptive_reader(adapt), before, tokens=tokens, sampling=chance)
        yield from decoding.text_pieces(self.tokenizer, drawn, before=before, stop=stop)

    @checked
    def generate_many(
        self,
        prompts: Sequence[str],
        *,
        tokens: int = 200,
        stop: str | Sequence[str] = (),
        seeds: Sequence[int] | None = None,
        temperature: float = 1.0,
        top_k: int = 40,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        weights: WeightKind = "exact",
    ) -> list[decoding.Written]:
        """A continuation of each prompt, side by side: each is what `generate` gives with its seed (0, 1, 2, ... unless told)."""
        seeds = range(len(prompts)) if seeds is None else seeds
        before = [decoding.start_tokens(self.tokenizer, prompt) for prompt in prompts]
        shared = decoding.Sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
        )
        samplings = [replace(shared, seed=seed) for seed in seeds]
        if len(samplings) != len(prompts):
            raise InputError(f"{len(samplings)} seeds for {len(prompts)} prompts; give one for each")
        return decoding.write_texts(
            self.model, self.tokenizer, before, tokens=tokens, samplings=samplings, stop=stop, weights=weights
        )

    @checked
    def likeliest(
        self,
        prompt: str = "",
        *,
        tokens: int = 200,
        beams: int = 4,
        stop: str | Sequence[str] = (),
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

    @checked
    def score(
        self, text: str | bytes, *, weights: WeightKind = "exact", adapt: Adapt | AdaptationConfig | None = None
    ) -> Scores:
        """How surprising each token of `text` is given all before it; the first has nothing before it, and NaN. With `adapt` the text is learned from."""
        placed = placed_tokens(self.tokenizer, encode_utf8(text) if isinstance(text, str) else text, name="the text")
        if len(placed.token_P) < 2:
            raise InputError(f"a text of {len(placed.token_P)} tokens has nothing to predict; give at least two")
        return Scores.joined(list(self._scored([placed], self._scorer(weights, adapt))))

    @checked
    def score_stream(
        self,
        stream: Iterable[bytes],
        *,
        name: str = "the text",
        weights: WeightKind = "exact",
        adapt: Adapt | AdaptationConfig | None = None,
    ) -> Iterator[Scores]:
        """The same for a text of any length as its bytes come, in pieces; nothing grows with the text. `name` is what errors call it."""
        return self._scored(token_stream(self.tokenizer, stream, name=name), self._scorer(weights, adapt))

    def _scorer(self, weights: WeightKind, adapt: Adapt | AdaptationConfig | None) -> Scorer:
        if adapt is None:
            return self._remembering(weights)
        self._refuse_rounding(weights)
        return self.adaptive_reader(adapt)

    @staticmethod
    def _refuse_rounding(weights: WeightKind) -> None:
        if weights != "exact":
            raise InputError(f"weights that learn are read as they are, not rounded to {weights}; take `weights=exact`")

    def _scored(self, pieces: Iterable[Placed], engine: Scorer) -> Iterator[Scores]:
        for piece in pieces:
            for start in range(0, len(piece.token_P), SCORED_AT_ONCE):
                some = slice(start, start + SCORED_AT_ONCE)
                tokens_BT = to_device(torch.from_numpy(piece.token_P[some])[None], self.device)
                nats = engine.score(tokens_BT)[0].float().cpu().numpy()
                yield Scores(tokens=piece.token_P[some], offsets=piece.offset_P[some], nats=nats)

    @checked
    def line_scorer(
        self,
        *,
        by: By | None = None,
        last: int | None = None,
        state: Path | str | None = None,
        name: str = "the text",
        weights: WeightKind = "exact",
        adapt: Adapt | AdaptationConfig | None = None,
    ) -> LineScorer:
        """Scores lines (or documents: `by`) of a stream beside the `last` so many, 10,000 unless told. `state` is a file that it was saved to: where
        there is one, it goes on from there, and with `adapt` from what was learned."""
        model = hashlib.sha256((self.checkpoint.folder / CHECKSUMS).read_bytes()).hexdigest()
        same: dict[str, Any] = {"model": model, "weights": weights, "adapts": adapt is not None, "name": name}
        if state is not None and Path(state).exists():

            def restored(path: Path) -> Scorer:
                if adapt is None:
                    return restore_reader(self.model, path, lanes=1, weights=weights)
                from transformer_xl.adaptation import AdaptiveReader

                self._refuse_rounding(weights)
                how, statistics = self.with_statistics(adapt, segment=self.config.evaluation.segment)
                return AdaptiveReader.restore(self.model, path, how, statistics=statistics, lanes=1)

            return LineScorer.restore(state, self.tokenizer, self.model, restored, by=by, last=last, **same)
        last = LAST_LINES if last is None else last
        return LineScorer(self.tokenizer, self._scorer(weights, adapt), by=by or "line", last=last, **same)

    @checked
    def adaptation(self, adapt: Adapt) -> AdaptationConfig:
        """How this run was tuned to learn while it reads, by `txl tune-adaptation`."""
        return self.with_statistics(adapt, segment=self.config.evaluation.segment)[0]

    @checked
    def with_statistics(
        self, adapt: Adapt | AdaptationConfig, *, segment: int
    ) -> "tuple[AdaptationConfig, Statistics | None]":
        """How to learn, and the sizes of gradients that this run was tuned with, where they are needed."""
        from transformer_xl.adaptation.tuned import settings_of

        return settings_of(self.checkpoint.run, self.model, adapt, segment=segment)

    @checked
    def adaptive_reader(
        self, adapt: Adapt | AdaptationConfig, *, lanes: int = 1, state: Path | str | None = None
    ) -> "AdaptiveReader":
        """A reader that learns: losses out, each before anything was learned from its token. New, or as it was saved; see `adaptation.AdaptiveReader`."""
        from transformer_xl.adaptation import AdaptiveReader

        how, statistics = self.with_statistics(adapt, segment=self.config.evaluation.segment)
        if state is not None:
            return AdaptiveReader.restore(self.model, state, how, statistics=statistics)
        return AdaptiveReader(self.model, how, statistics=statistics, lanes=lanes)

    def _remembering(self, weights: WeightKind) -> Reader:
        if not self.model.config.remembers:
            raise InputError("a model with memory 0 sees no text before a token; give it some, such as memory=128")
        return self.engine(weights=weights)

    @overload
    def engine(
        self, *, lanes: int | None = ..., memory: int | None = ..., portable: Literal[True]
    ) -> PortableReader: ...

    @overload
    def engine(
        self,
        *,
        lanes: int | None = ...,
        memory: int | None = ...,
        state: Path | str | None = ...,
        weights: WeightKind = ...,
        portable: Literal[False] = ...,
    ) -> Reader: ...

    @checked
    def engine(
        self,
        *,
        lanes: int | None = None,
        memory: int | None = None,
        state: Path | str | None = None,
        weights: WeightKind = "exact",
        portable: bool = False,
    ) -> Reader | PortableReader:
        """A reader that remembers the last `memory` tokens of each lane, new (with one lane) or as it was saved; see `inference.Engine`. `portable`: one that
        tells the next token's frequencies, in the same bits on every machine; see `inference.PortableReader`."""
        if state is not None and portable:
            raise InputError("state: a portable reader keeps none between processes; leave it out")
        if state is not None:
            return restore_reader(self.model, state, lanes=lanes, memory=memory, weights=weights)
        lanes = 1 if lanes is None else lanes
        return make_reader(self.model, lanes=lanes, memory=memory, weights=weights, portable=portable)  # type: ignore[call-overload, no-any-return]


@checked
def load(
    run: Path | str | None = None,
    *,
    memory: int | None = None,
    clamp_len: int | None = None,
    same_length: bool | None = None,
    device: str = AUTO,
    precision: Precision = "float32",
    adapter: Path | str | None = None,
) -> Loaded:
    """A run's best checkpoint, or the checkpoint in a folder, or where none is named the model in the box; with other lengths than it was trained with,
    and with an adapter's file added to its weights, where given. `precision`: of products when it evaluates, generates and scores; weights, norms, softmax sums, losses and positions are float32."""
    place = choose_device(device)
    half = half_of(precision, place)
    checkpoint = load_checkpoint(run, device=str(place), adapter=adapter)
    checkpoint.model.reads_in = half
    checkpoint.model.set_lengths(memory=memory, clamp_len=clamp_len, same_length=same_length)
    changes = {"memory": memory, "clamp_len": clamp_len, "same_length": same_length}
    asked = {name: value for name, value in changes.items() if value is not None}
    evaluation = replace(checkpoint.config.evaluation, **asked)  # type: ignore[arg-type]
    checkpoint.config = replace(checkpoint.config, model=checkpoint.model.config, evaluation=evaluation)
    return Loaded(checkpoint)


@checked
def from_pretrained(
    source: Path | str,
    *,
    memory: int | None = None,
    clamp_len: int | None = None,
    same_length: bool | None = None,
    device: str = AUTO,
    precision: Precision = "float32",
) -> Loaded:
    """Any checkpoint: a run of ours is loaded as it is; somebody else's file or folder is imported, as `txl import` does, into a folder that lives as
    long as what is returned. Nothing is downloaded."""
    path = Path(source)
    if is_ours(path):
        return load(
            path, memory=memory, clamp_len=clamp_len, same_length=same_length, device=device, precision=precision
        )
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
        loaded = load(import_run(path, scratch / "run", lengths=lengths).run, device=device, precision=precision)
    except BaseException:
        shutil.rmtree(scratch)
        raise
    loaded.checkpoint.run = None  # nothing about it is to be written where it will vanish
    weakref.finalize(loaded, shutil.rmtree, scratch, ignore_errors=True)
    return loaded
