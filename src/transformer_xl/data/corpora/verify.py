"""What every known corpus ends with: a manifest from its recipe, and counts that must be everybody else's too."""

from collections.abc import Sequence

from transformer_xl.data.corpora.recipes import Counts, KnownFile, Recipe
from transformer_xl.data.store import Manifest, SplitRecord, sentence_mark, smallest_dtype
from transformer_xl.data.text.tokenizers import Tokenizer
from transformer_xl.errors import DataError


def known_manifest(
    recipe: Recipe, tokenizer: Tokenizer, records: Sequence[SplitRecord], *, rule: str, origin: dict[str, str]
) -> Manifest:
    return Manifest(
        name=recipe.name,
        rule=rule,
        unit=recipe.unit,
        tokenizer_kind=tokenizer.kind,
        vocabulary_size=tokenizer.size,
        dtype=smallest_dtype(tokenizer.size).name,
        documents=recipe.documents,
        sentence_mark=sentence_mark(tokenizer),
        origin=origin,
        splits=tuple(records),
    )


def check_counts(manifest: Manifest, counts: Counts) -> None:
    """What came out must be what everybody else has: this also catches a wrong file whose checksum nobody knows."""
    for record in manifest.splits:
        expected = counts.tokens.get(record.name)
        if expected is not None and record.tokens != expected:
            raise DataError(
                f"{manifest.name} {record.name} came out as {record.tokens:,} tokens where {expected:,} are known; "
                f"its file is not the published one, bring that with --source"
            )
    if counts.vocabulary is not None and manifest.vocabulary_size != counts.vocabulary:
        raise DataError(
            f"the vocabulary of {manifest.name} came out as {manifest.vocabulary_size:,} where {counts.vocabulary:,} is known; "
            f"a file is not the published one, bring that with --source or --vocab"
        )


def described(file: KnownFile) -> str:
    """The file somebody must bring, with what is known to tell it by."""
    size = f"{file.bytes:,} bytes, md5 {file.md5}" if file.md5 else "no checksum known"
    return f"{file.name} ({size})"
