"""EleutherAI's evaluation harness with our models, under the name `transformer-xl`. Its own wrapper of Hugging Face models cuts long documents into windows
that know nothing of each other; here a document of any length is read once, with memory all through it.

    python -m transformer_xl.lm_eval --model transformer-xl --model_args run=runs/first --tasks wikitext

The harness finds only models that somebody registered, and importing this module does so. Its own command `lm_eval` imports nobody else's modules; this one
does, and then hands over to it with the words as they are.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from transformer_xl.console import progress
from transformer_xl.data.text.tokenizers import Ids
from transformer_xl.decoding import start_tokens
from transformer_xl.devices import AUTO
from transformer_xl.errors import InputError, MissingPackage, TransformerXLError
from transformer_xl.evaluation.lines import SCORED_AT_ONCE
from transformer_xl.inference import Reader
from transformer_xl.library import load

if find_spec("lm_eval") is None:
    raise MissingPackage("transformer_xl.lm_eval needs lm-eval; install it with: pip install 'transformer-xl[hf]'")

import lm_eval.models  # noqa: F401 (the harness's own names, which it looks up only while nobody has registered any)
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

NAME = "transformer-xl"
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens")
DEFAULT_TOKENS = 256
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@register_model(NAME)
class TransformerXLHarness(LM):
    """`run` is a run's folder or a checkpoint's; the lengths are those of `transformer_xl.load`. `batch_size` is how many texts are written side by side."""

    def __init__(
        self,
        run: str,
        *,
        memory: int | None = None,
        clamp_len: int | None = None,
        same_length: bool | None = None,
        device: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if batch_size == "auto":
            raise InputError("batch_size: 'auto' is not known here; give a number")
        # The harness says cuda:0 where nobody chose, whether there is one or not.
        nobody_chose = device is None or (device.startswith("cuda") and not torch.cuda.is_available())
        device = AUTO if device is None or nobody_chose else device
        self.loaded = load(run, memory=memory, clamp_len=clamp_len, same_length=same_length, device=device)
        if not self.loaded.model.config.remembers:
            raise InputError(f"{run}: a model with memory 0 sees no text before a token; give it some, as memory=128")
        self.batch_size = int(batch_size)

    @property
    def tokenizer_name(self) -> str:
        return str(self.loaded.checkpoint.folder)

    # --- what the harness asks for

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Of each continuation, in nats, and whether it is the likeliest. A context with several continuations is read once."""
        by_context: dict[tuple[int, ...], list[tuple[int, Ids]]] = defaultdict(list)
        for place, request in enumerate(requests):
            context, continuation = self._encoded_pair(*request.args)
            by_context[context].append((place, continuation))
        answers: dict[int, tuple[float, bool]] = {}
        with progress("log-likelihoods", total=len(requests)) as advance:
            for context, continuations in by_context.items():
                reader = self.loaded.engine()
                reader.read(self._row(context))
                for place, continuation in continuations:
                    answers[place] = self._judged(reader.fork(), continuation)
                    self.cache_hook.add_partial("loglikelihood", requests[place].args, answers[place])
                    advance()
        return [answers[place] for place in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Of each whole text, in nats. Its first token is predicted from the beginning of a line, as every text begins somewhere."""
        totals = []
        with progress("documents", total=len(requests)) as advance:
            for request in requests:
                reader = self.loaded.engine()
                reader.read(self._row(start_tokens(self.loaded.tokenizer, "")))
                ids = self.loaded.tokenizer.encode(request.args[0])
                losses = (float(reader.score(self._row(some)).double().sum()) for some in pieces(ids))
                totals.append(-sum(losses))
                self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
                advance()
        return totals

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """A text for each, up to the first of its `until`; the likeliest tokens unless drawing is asked for."""
        alike: dict[str, list[int]] = defaultdict(list)
        for place, request in enumerate(requests):
            alike[repr(sorted(request.args[1].items(), key=lambda item: item[0]))].append(place)
        texts: dict[int, str] = {}
        with progress("texts", total=len(requests)) as advance:
            for places in alike.values():
                settings = generation_settings(requests[places[0]].args[1])
                for start in range(0, len(places), self.batch_size):
                    some = places[start : start + self.batch_size]
                    made = self.loaded.generate_many([requests[place].args[0] for place in some], **settings)
                    for place, written in zip(some, made, strict=True):
                        texts[place] = written.text
                        self.cache_hook.add_partial("generate_until", requests[place].args, written.text)
                    advance(len(some))
        return [texts[place] for place in range(len(requests))]

    # --- inside

    def _encoded_pair(self, context: str, continuation: str) -> tuple[tuple[int, ...], Ids]:
        """Cut where the context's own tokens end. A byte pair begins with its space, so that the context's last ones are counted to the continuation."""
        kept = context.rstrip() if self.loaded.tokenizer.kind == "bpe" else context
        encode = self.loaded.tokenizer.encode
        whole, cut = encode(context + continuation), len(encode(kept))
        return tuple(whole[:cut].tolist() or start_tokens(self.loaded.tokenizer, "")), whole[cut:]

    def _judged(self, reader: Reader, ids: Ids) -> tuple[float, bool]:
        total, likeliest = 0.0, True
        for some in pieces(ids):
            before_BD = reader.last_hidden_BD
            assert before_BD is not None
            tokens_BT = self._row(some)
            hidden_BTD = torch.cat([before_BD[:, None], reader.read(tokens_BT)[:, :-1]], dim=1)
            log_probability_BTV = reader.log_probabilities(hidden_BTD)
            total += float(log_probability_BTV.gather(2, tokens_BT[..., None]).double().sum())
            likeliest = likeliest and bool((log_probability_BTV.argmax(dim=2) == tokens_BT).all())
        return total, likeliest

    def _row(self, ids: Sequence[int] | Ids) -> torch.Tensor:
        return torch.tensor(np.asarray(ids), device=self.loaded.model.vocabulary.bias_V.device)[None]


def pieces(ids: Ids) -> Iterator[Ids]:
    return (ids[start : start + SCORED_AT_ONCE] for start in range(0, len(ids), SCORED_AT_ONCE))


def generation_settings(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The harness's words for how to write, in ours; one that means nothing here is refused by its name."""
    left = dict(asked)
    until = left.pop("until", None) or []
    lengths = [int(left.pop(name)) for name in LENGTHS if name in left]
    drawing = bool(left.pop("do_sample", left.get("temperature", 0) > 0))
    chance = {name: left.pop(name) for name in SAMPLING if name in left}
    if left:
        raise InputError(
            f"generation_kwargs: {sorted(left)[0]} is not known here; known: until, do_sample, {', '.join(LENGTHS + SAMPLING)}"
        )
    if not drawing:
        kept = {name: value for name, value in chance.items() if name == "repetition_penalty"}
        chance = {"temperature": 0.0, **kept}
    else:
        chance.setdefault("top_k", 0)
    stop = [until] if isinstance(until, str) else list(until)
    return {"tokens": lengths[0] if lengths else DEFAULT_TOKENS, "stop": stop, **chance}


def main() -> int:
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except TransformerXLError as error:
        print(f"lm_eval: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
