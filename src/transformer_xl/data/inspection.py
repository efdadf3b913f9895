"""What a store holds, for people and for programs: counts, the most frequent tokens, a sample, a plot of frequencies."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transformer_xl.console import progress
from transformer_xl.data.store import Split, Store
from transformer_xl.data.text.display import detokenize
from transformer_xl.errors import DataError
from transformer_xl.pictures import picture

STRIDE = 1 << 22
SAMPLE_CHARACTERS = 400
TOP = 10


def token_counts(split: Split, *, vocabulary: int) -> NDArray[np.int64]:
    """How often each token occurs. In strides: numpy counts in 64-bit integers, many times the store."""
    counts = np.zeros(vocabulary, dtype=np.int64)
    with progress(f"counting {split.name}", total=len(split), unit="tokens") as advance:
        for begin in range(0, len(split), STRIDE):
            stride = split.tokens[begin : begin + STRIDE]
            if int(stride.max()) >= vocabulary:
                raise DataError(
                    f"{split.name} holds the token {int(stride.max())} where the vocabulary has {vocabulary:,}; prepare the store again"
                )
            counts += np.bincount(stride, minlength=vocabulary)
            advance(len(stride))
    return counts


def sample(store: Store, split: Split) -> str:
    """The beginning of the split's first document, as a person would want to read it."""
    start = int(split.document_starts[0]) if len(split.document_starts) else 0
    text = store.tokenizer.decode(np.asarray(split.tokens[start : start + SAMPLE_CHARACTERS], dtype=np.int64))
    return (detokenize(text) if store.tokenizer.kind == "word" else text)[:SAMPLE_CHARACTERS]


def summary(store: Store) -> dict[str, Any]:
    """Everything `txl data` shows, as plain values."""
    manifest = store.manifest
    first = store.split(store.splits[0])
    counts = token_counts(first, vocabulary=manifest.vocabulary_size)
    return {
        **manifest.to_json(),
        "folder": str(store.folder),
        "bytes_on_disk": sum(file.bytes for split in manifest.splits for file in split.files),
        "frequent": [
            {"token": store.tokenizer.token(id), "count": int(counts[id]), "share": int(counts[id]) / int(counts.sum())}
            for id in np.argsort(-counts, kind="stable")[:TOP].tolist()
            if counts[id]
        ],
        "unused_tokens": int((counts == 0).sum()),
        "sample": sample(store, first),
    }


def plot_frequencies(store: Store, path: Path) -> None:
    """Token frequency against rank, one line per split, both axes logarithmic: natural words make nearly straight lines."""
    manifest = store.manifest
    title = f"{manifest.name}: token frequencies ({manifest.vocabulary_size:,} {manifest.tokenizer_kind} tokens)"
    with picture(path, title=title) as axes:
        for name in store.splits:
            counts = token_counts(store.split(name), vocabulary=manifest.vocabulary_size)
            ranked = np.sort(counts[counts > 0])[::-1]
            axes.loglog(np.arange(1, len(ranked) + 1), ranked / ranked.sum(), label=name, linewidth=1.5)
        axes.set_xlabel("rank of the token")
        axes.set_ylabel("share of all tokens")
        axes.legend()
