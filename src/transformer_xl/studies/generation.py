"""Appendix E: text that continues contexts of the test split, beside what really followed. The first examples drawn, whatever they are like.

As in the paper: its best model, at most 512 tokens of context, twice 500 tokens and once 1,000, each drawn from the 40 likeliest.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from transformer_xl.config.fields import override
from transformer_xl.console import progress
from transformer_xl.data.store import Store
from transformer_xl.data.text.display import detokenize
from transformer_xl.data.text.tokenizers import WordTokenizer
from transformer_xl.decoding import Sampling, generate
from transformer_xl.errors import DataError
from transformer_xl.presets import find_preset
from transformer_xl.studies.report import Report
from transformer_xl.studies.runs import Setting, trained, variant_model
from transformer_xl.studies.tables import XL

CONTEXT = 512
TOP_K = 40
PLACES_SEED = 0


def run_generation(setting: Setting) -> Report:
    base = setting.scale.best
    store = setting.store(base)
    model = trained(setting, variant_model(base, XL, store=store, seed=1), store=store, seed=1)
    started_at = time.perf_counter()
    checkpoint = model.load(device=setting.device)
    lengths = override(find_preset(base.preset).run, base.words).evaluation
    checkpoint.model.set_lengths(memory=lengths.memory, clamp_len=lengths.clamp_len, same_length=lengths.same_length)
    written = setting.scale.written_tokens
    examples = []
    for number, (context, reference) in enumerate(places(store, written=written)):
        tokens = written[number]
        with progress(f"writing example {number + 1} of {len(written)}", total=tokens, unit="tokens") as advance:
            drawn, sampling = [], Sampling(top_k=TOP_K, seed=number)
            for token in generate(checkpoint.model, context, tokens=tokens, sampling=sampling):
                drawn.append(token)
                advance(1)
        texts = {"context": context, "generated": drawn, "reference": reference}
        examples.append({name: readable(store, tokens) for name, tokens in texts.items()})
    asked = model.asked.command(data=store.folder, run=model.folder, device=setting.device)
    return Report(
        title="Generated text (the paper's Appendix E)",
        corpus=f"Corpus: {store.manifest.name} ({store.manifest.rule}). The paper's examples are from its largest model of WikiText-103.",
        text="\n\n".join(example_text(number + 1, example) for number, example in enumerate(examples)),
        notes=(
            f"the first {len(written)} examples drawn are shown, none was chosen",
            f"contexts: at most {CONTEXT} consecutive tokens of the test split, beginning at random places (seed {PLACES_SEED})",
            f"{', '.join(f'{tokens:,}' for tokens in written)} tokens, sampled from the {TOP_K} likeliest in proportion (seeds 0 to {len(written) - 1});"
            f" memory {lengths.memory}",
            "reference: what follows the context in the test split; words are put together again for reading",
        ),
        commands=[("The model", [asked])],
        seconds=model.seconds + time.perf_counter() - started_at,
        values={"written_tokens": list(written), "top_k": TOP_K, "examples": examples},
    )


def places(store: Store, *, written: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """(context, what follows it) at random places that leave room for both; a short split gives shorter contexts."""
    tokens = np.asarray(store.split("test").tokens)
    length = min(CONTEXT, len(tokens) // 2)
    if length < 1:
        raise DataError(f"the test split of {store.folder} has {len(tokens)} tokens, too few to go on; give more text")
    chance, found = np.random.Generator(np.random.PCG64(PLACES_SEED)), []
    for asked in written:
        followed = min(asked, len(tokens) - length)
        end = length + int(chance.integers(0, len(tokens) - length - followed, endpoint=True))
        found.append((tokens[end - length : end].tolist(), tokens[end : end + followed].tolist()))
    return found


def readable(store: Store, tokens: list[int]) -> str:
    text = store.tokenizer.decode(tokens)
    return detokenize(text) if isinstance(store.tokenizer, WordTokenizer) else text


def example_text(number: int, example: dict[str, Any]) -> str:
    """Context above, generated and reference side by side: a table's cells, with lines kept."""
    header = "<tr><th>generated</th><th>reference</th></tr>"
    cells = "".join(f"<td valign=top>{_cell(example[name])}</td>" for name in ("generated", "reference"))
    return (
        f"## Example {number}\n\nContext:\n\n<blockquote>{_cell(example['context'])}</blockquote>\n\n"
        f"<table>\n{header}\n<tr>{cells}</tr>\n</table>"
    )


def _cell(text: str) -> str:
    """Safe inside a page: no markup of the text's own, and no empty line that would end the cell."""
    for plain, written in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(plain, written)
    return text.replace("\n", "<br>")
