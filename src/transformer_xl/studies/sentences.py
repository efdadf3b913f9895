"""Sentences without order, which Table 7 is about: One Billion Word as it is, or another corpus of words with its lines shuffled once."""

from pathlib import Path

import numpy as np

from transformer_xl.data.corpora.encoding import make_store
from transformer_xl.data.store import MANIFEST, Encoded, Manifest, Split, SplitWriter, Store, open_store
from transformer_xl.data.text.tokenizers import Tokenizer, WordTokenizer
from transformer_xl.errors import DataError
from transformer_xl.studies.models import in_a_name

SEED = 0


def in_sentences(store: Store, *, out: Path) -> Store:
    """The store itself where it is made of sentences; else a store beside the runs with the lines of every split in a random, fixed order."""
    if store.manifest.sentence_mark is not None:
        return store
    if not isinstance(store.tokenizer, WordTokenizer):
        raise DataError(
            f"{store.folder} holds {store.manifest.tokenizer_kind} tokens without sentences; give lm1b, or a corpus of words such as ptb"
        )
    place = out / "data" / f"{in_a_name(store.manifest.name)}-shuffled"
    origin = {"shuffled": store.manifest.name, **{split.name: split.files[0].sha256 for split in store.manifest.splits}}
    if (place / MANIFEST).is_file() and open_store(place).manifest.origin == origin:
        return open_store(place)
    return make_store(place, lambda folder, scratch: _fill(store, folder, origin))


def _fill(store: Store, folder: Path, origin: dict[str, str]) -> tuple[Manifest, Tokenizer]:
    tokenizer, manifest = store.tokenizer, store.manifest
    assert isinstance(tokenizer, WordTokenizer)
    records = []
    for name in store.splits:
        split = store.split(name)
        with SplitWriter(folder=folder, name=name, vocabulary=manifest.vocabulary_size) as writer:
            writer.append(
                Encoded(
                    tokens=shuffled(split, end=tokenizer.mark),
                    document_starts=np.zeros(0, dtype=np.int64),
                    sentence_starts=np.zeros(0, dtype=np.int64),
                    bytes=split.bytes,
                    characters=split.characters,
                    words=split.words,
                )
            )
            records.append(writer.finish())
    fields = {name: getattr(manifest, name) for name in ("unit", "tokenizer_kind", "vocabulary_size", "dtype")}
    changed = Manifest(
        name=f"{manifest.name}, lines shuffled",
        rule=f"{manifest.rule}; then the lines of each split in a random order (seed {SEED})",
        documents="none: lines have no order",
        origin=origin,
        splits=tuple(records),
        **fields,
    )
    return changed, tokenizer


def shuffled(split: Split, *, end: int) -> np.ndarray:
    """The split's lines, each with its end mark, in a random order; what follows the last mark stays last."""
    tokens = np.asarray(split.tokens)
    ends = np.flatnonzero(tokens == end) + 1
    starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    order = np.random.Generator(np.random.PCG64(SEED)).permutation(len(ends))
    lines = [tokens[starts[line] : ends[line]] for line in order]
    return np.concatenate([*lines, tokens[ends[-1] if len(ends) else 0 :]])
