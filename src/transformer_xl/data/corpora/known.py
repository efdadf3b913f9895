"""Makes the store of a known corpus: finds or downloads its files, verifies them, applies its own rule, checks the counts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from transformer_xl.data.corpora.dealing import Engine
from transformer_xl.data.corpora.downloading import download_any
from transformer_xl.data.corpora.encoding import make_store
from transformer_xl.data.corpora.recipes import RECIPES, SPLITS_MD5, Counts, Recipe
from transformer_xl.data.corpora.symbols import fill_symbols
from transformer_xl.data.corpora.words import fill_words, find_files, own_vocabulary
from transformer_xl.data.store import Manifest, Store
from transformer_xl.data.text.tokenizers import Tokenizer
from transformer_xl.errors import DataError, suggest


def prepare_known(
    name: str,
    *,
    out: Path | str,
    source: Path | None = None,
    newlines: Literal["keep", "drop"] = "keep",
    splits: Sequence[str] | None = None,
    train: Sequence[Path] = (),
    vocabulary_file: Path | None = None,
    engine: Engine = "processes",
) -> Store:
    """Makes the store of corpus `name` at `out`.

    `source` is a file, an archive or a folder; without one the corpus is downloaded. `splits` prepares only some of them,
    for people who have only some of the files. `train` (One Billion Word) names the training shards by hand.
    """
    if name not in RECIPES:
        raise DataError(f"no corpus {name}{suggest(name, RECIPES)}")
    recipe = RECIPES[name]
    for split in splits or ():
        if split not in recipe.splits:
            raise DataError(f"{name} has no split {split}{suggest(split, recipe.splits)}")
    wanted = tuple(split for split in recipe.splits if splits is None or split in splits)
    if newlines == "drop" and name != "enwik8":
        raise DataError(f"`newlines=drop` is the paper's reading of enwik8; {name} has no such rule")
    if train and name != "lm1b":
        raise DataError(f"`train=` names the shards of lm1b; {name} has its own files, give them with `source=`")
    if vocabulary_file is not None and recipe.vocabulary_file is None:
        raise DataError(f"`vocabulary_file=` serves wikitext-103 and lm1b; the vocabulary of {name} is counted")
    if engine == "ray" and name in SPLITS_MD5:
        raise DataError(f"{name} is 100 MB, which one process encodes in seconds; leave out `engine=ray`")

    def fill(folder: Path, scratch: Path) -> tuple[Manifest, Tokenizer]:
        with _files_of(recipe, source) as place:
            if name in SPLITS_MD5:
                manifest, tokenizer, counts = fill_symbols(recipe, place, folder, scratch, newlines, wanted)
            else:
                files = find_files(recipe, place, scratch, wanted, train)
                vocabulary = vocabulary_file or own_vocabulary(recipe, source, wanted)
                manifest, tokenizer, counts = fill_words(
                    recipe, files, folder, vocabulary, by_hand=bool(train), engine=engine
                )
            _check_counts(manifest, counts)
            return manifest, tokenizer

    return make_store(out, fill)


@contextmanager
def _files_of(recipe: Recipe, source: Path | None) -> Iterator[Path]:
    """What the user brought, or a download. One that proves wrong only once opened is not kept for the next run."""
    if source is not None:
        yield source
        return
    place = download_any(recipe)
    try:
        yield place
    except DataError:
        if any(known.checksum is None and known.file_name == place.name for known in recipe.places):
            place.unlink(missing_ok=True)
        raise


def _check_counts(manifest: Manifest, counts: Counts) -> None:
    """What came out must be what everybody else has: this also catches a wrong file whose checksum nobody knows."""
    for record in manifest.splits:
        expected = counts.tokens.get(record.name)
        if expected is not None and record.tokens != expected:
            raise DataError(
                f"{manifest.name} {record.name} came out as {record.tokens:,} tokens where {expected:,} are known; "
                f"its file is not the published one, bring that with `source=`"
            )
    if counts.vocabulary is not None and manifest.vocabulary_size != counts.vocabulary:
        raise DataError(
            f"the vocabulary of {manifest.name} came out as {manifest.vocabulary_size:,} where {counts.vocabulary:,} is known; "
            f"a file is not the published one, bring that with `source=` or `vocabulary_file=`"
        )
