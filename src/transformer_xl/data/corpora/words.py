"""Penn Treebank, WikiText and One Billion Word: words between white space, each corpus with its own vocabulary rule."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformer_xl.data.corpora import encoding
from transformer_xl.data.corpora.dealing import Engine
from transformer_xl.data.corpora.downloading import download_any
from transformer_xl.data.corpora.pieces import BY_ARTICLE, NO_DOCUMENTS, Part
from transformer_xl.data.corpora.recipes import Counts, Recipe
from transformer_xl.data.corpora.sources import Source, find_known
from transformer_xl.data.corpora.vocabulary import by_falling_frequency, read_vocabulary
from transformer_xl.data.store import Manifest, encoded_by
from transformer_xl.data.text import tokenizers
from transformer_xl.errors import DataError

LM1B_SHARDS = 99
LM1B_MIN_COUNT = 3
"""A word seen fewer times than this in the training shards is <UNK>; the published vocabulary was cut the same way."""


def find_files(
    recipe: Recipe, place: Path, scratch: Path, wanted: tuple[str, ...], train: Sequence[Path]
) -> dict[str, list[Source]]:
    """Split -> its files, each known by its checksum where one is known."""
    read = {split for split in wanted if split != "train" or not train}
    needed = tuple(file for file in recipe.files if set(file.splits) & read)
    found = find_known(needed, source=place, scratch=scratch)
    missing = [file for file in needed if not found[file.name]]
    if missing:
        have = [split for split in wanted if all(split not in file.splits for file in missing)]
        way_out = f", or prepare what is there with `splits={','.join(have)}`" if have else ""
        names = " and no ".join(file.described for file in missing)
        raise DataError(f"{place} holds no {names}; bring it with `source=`{way_out}")
    files = {split: [s for file in needed if split in file.splits for s in found[file.name]] for split in wanted}
    if train:
        files["train"] = [Source(path=path) for path in train]
    return files


def own_vocabulary(recipe: Recipe, source: Path | None, wanted: tuple[str, ...]) -> Path | None:
    """The vocabulary file beside the text, or downloaded with it; None where the words are to be counted."""
    if recipe.vocabulary_file is None or ("train" in wanted and not recipe.vocabulary_places):
        return None
    if source is None:
        return download_any(recipe, vocabulary=True) if recipe.vocabulary_places else None
    return next(iter(sorted(source.rglob(recipe.vocabulary_file + "*"))), None) if source.is_dir() else None


def fill_words(
    recipe: Recipe,
    files: dict[str, list[Source]],
    folder: Path,
    vocabulary: Path | None,
    *,
    by_hand: bool,
    engine: Engine,
) -> tuple[Manifest, tokenizers.Tokenizer, Counts]:
    """What was written, and what must have come out."""
    parts = {split: [Part(source=source) for source in sources] for split, sources in files.items()}
    rule = BY_ARTICLE if recipe.name.startswith("wikitext") else NO_DOCUMENTS
    words = _words(recipe, parts, vocabulary, engine=engine)
    tokenizer = tokenizers.WordTokenizer(words, marks="sentences" if recipe.name == "lm1b" else "lines")
    records = encoding.write_splits(folder, parts=parts, tokenizer=tokenizer, rule=rule, engine=engine)
    text = recipe.rule
    if recipe.name == "lm1b":
        if "train" in files:
            text += f"; {len(files['train'])} training shards{' named by hand' if by_hand else f' of {LM1B_SHARDS}'}"
        counted = f"words seen at least {LM1B_MIN_COUNT} times in the training shards"
        text += f"; vocabulary: {f'read from {vocabulary.name}' if vocabulary else counted}"
    known = {s.known.name: s.known for sources in files.values() for s in sources if s.known is not None}
    origin = {name: f"md5:{file.md5}" if file.md5 else "no checksum known" for name, file in known.items()}
    manifest = Manifest(
        name=recipe.name,
        rule=text,
        unit=recipe.unit,
        documents=recipe.documents,
        origin=origin,
        splits=records,
        **encoded_by(tokenizer),
    )
    # A vocabulary of the two smaller corpora is counted on all three splits: without them all it is another one.
    whole = set(files) == set(recipe.splits) or vocabulary is not None or recipe.name == "wikitext-103"
    return manifest, tokenizer, recipe.counts if whole else replace(recipe.counts, vocabulary=None)


def _words(recipe: Recipe, parts: dict[str, list[Part]], vocabulary: Path | None, *, engine: Engine) -> list[str]:
    if recipe.name == "lm1b":
        if vocabulary is not None:
            return read_vocabulary(vocabulary, specials=(tokenizers.SENTENCE, tokenizers.SENTENCE_UNKNOWN)).words
        train = _training(recipe, parts)
        counts = encoding.count_words(train, rule=NO_DOCUMENTS, lower=False, line_marks=False, engine=engine)
        return by_falling_frequency(
            counts, first=(tokenizers.SENTENCE, tokenizers.SENTENCE_UNKNOWN), min_count=LM1B_MIN_COUNT
        )
    if vocabulary is not None:
        return _wikitext_103_words(recipe, vocabulary)
    everything = [part for split in parts.values() for part in split]
    counted = _training(recipe, parts) if recipe.name == "wikitext-103" else everything
    counts = encoding.count_words(counted, rule=NO_DOCUMENTS, lower=False, line_marks=True, engine=engine)
    return list(counts) if recipe.name == "ptb" else by_falling_frequency(counts, first=(tokenizers.END_OF_LINE,))


def _training(recipe: Recipe, parts: dict[str, list[Part]]) -> list[Part]:
    if "train" not in parts:
        raise DataError(
            f"the vocabulary of {recipe.name} is counted on its training text, which is not prepared here; "
            f"give one with `vocabulary_file=FILE` ({recipe.vocabulary_file})"
        )
    return parts["train"]


def _wikitext_103_words(recipe: Recipe, path: Path) -> list[str]:
    """A published list of words and counts leaves out `<unk>` and `<eos>`, but the totals are known, so their counts are too."""
    vocabulary = read_vocabulary(path, specials=())
    counts = Counter(vocabulary.counts or dict.fromkeys(vocabulary.words, 0))
    if tokenizers.UNKNOWN not in counts:
        assert recipe.train_lines is not None
        counts[tokenizers.UNKNOWN] = max(recipe.counts.tokens["train"] - recipe.train_lines - counts.total(), 0)
    return by_falling_frequency(counts, first=(tokenizers.END_OF_LINE,))
