"""Small stores made on the spot, and how a refusal must look."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from hypothesis import settings

from transformer_xl.data.store import Encoded, Split, SplitWriter, smallest_dtype

patient = settings(deadline=None, max_examples=60)
"""For property tests: two busy cores miss any deadline now and then."""


def write_split(
    folder: Path,
    tokens: Sequence[int] | np.ndarray,
    *,
    name: str = "train",
    vocabulary: int = 256,
    documents: Sequence[int] = (),
    sentences: Sequence[int] | None = None,
    sentence_mark: int | None = None,
) -> Split:
    """A split written and opened like any other, from numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    with SplitWriter(folder=folder, name=name, vocabulary=vocabulary, sentences=sentences is not None) as writer:
        writer.append(
            Encoded(
                tokens=np.asarray(tokens),
                document_starts=np.asarray(documents, dtype=np.int64),
                sentence_starts=np.asarray(sentences or [], dtype=np.int64),
                bytes=len(tokens),
                characters=len(tokens),
                words=None,
            )
        )
        record = writer.finish()
    return Split(folder=folder, record=record, dtype=smallest_dtype(vocabulary).name, sentence_mark=sentence_mark)


def sentence_split(make: Callable[..., Split], lengths: Sequence[int]) -> Split:
    """Sentences of the given numbers of words; every word is another number, the mark is 0."""
    tokens, starts, word = [], [], 1
    for length in lengths:
        starts.append(len(tokens))
        tokens += [0, *range(word, word + length), 0]
        word += length
    return make(tokens, vocabulary=max(word, 300), sentences=starts, sentence_mark=0)


def one_sentence(error: str) -> bool:
    """How every refusal must look on the terminal: one line, no traceback."""
    return error.startswith("txl: ") and error.count("\n") == 1
