"""Shows what a data store holds: counts, vocabulary, a sample, and how often each token occurs.

txl data data/enwik8
txl data data/enwik8 --plot frequencies.png
"""

import argparse
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from transformer_xl.data.inspection import plot_frequencies, summary
from transformer_xl.data.store import Manifest, open_store


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "folder",
        metavar="DIR",
        help="a store made by txl prepare; here as everywhere, also an address: s3://bucket/store",
    )
    add("--plot", type=Path, metavar="FILE", help="draw token frequencies into this .png, .svg or .pdf")
    add("--verify", action="store_true", help="read every file and check its checksum")
    add("--json", action="store_true", help="print everything as JSON")


def run(arguments: argparse.Namespace) -> int:
    store = open_store(arguments.folder, verify=arguments.verify)
    values = summary(store)
    if arguments.plot:
        plot_frequencies(store, arguments.plot)
    if arguments.json:
        print(json.dumps(values, indent=2, ensure_ascii=False))
        return 0
    manifest = store.manifest
    facts = {
        "corpus": manifest.name,
        "rule": manifest.rule,
        "tokens": f"{manifest.tokenizer_kind}, vocabulary {manifest.vocabulary_size:,}, {manifest.dtype} on disk",
        "unit": manifest.unit.replace("_", " "),
        "documents": manifest.documents,
        "on disk": f"{values['bytes_on_disk'] / 1e6:,.1f} MB" + (", checksums verified" if arguments.verify else ""),
    }
    facts |= manifest.origin
    print(aligned(facts))
    print(f"\n{splits_table(manifest)}\n\nmost frequent in {store.splits[0]}")
    rows = [(token["token"], f"{token['count']:,}", f"{token['share']:.2%}") for token in values["frequent"]]
    print(table(("token", "count", "share"), rows))
    if values["unused_tokens"]:
        print(f"{values['unused_tokens']:,} tokens of the vocabulary do not occur in {store.splits[0]}")
    print(f"\nsample of {store.splits[0]}\n\n{values['sample']}")
    if arguments.plot:
        print(f"\ntoken frequencies: {arguments.plot}")
    return 0


def aligned(facts: Mapping[str, object]) -> str:
    width = max(map(len, facts))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in facts.items())


def splits_table(manifest: Manifest) -> str:
    rows = [
        (
            split.name,
            f"{split.tokens:,}",
            f"{split.bytes:,}",
            f"{split.characters:,}",
            "" if split.words is None else f"{split.words:,}",
            f"{split.documents:,}" if split.documents else "",
        )
        for split in manifest.splits
    ]
    return table(("split", "tokens", "bytes", "characters", "words", "documents"), rows)


def table(titles: Sequence[str], rows: Sequence[tuple[str, ...]], *, left: Collection[str] = ()) -> str:
    """Aligned columns, the first and those of `left` to the left, numbers to the right; a column nobody fills is left out."""
    columns = [column for column in zip(titles, *rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    lines = zip(*columns, strict=True)
    sides = [str.ljust if column[0] in (titles[0], *left) else str.rjust for column in columns]
    return "\n".join("  ".join(side(*cell) for side, *cell in zip(sides, line, widths, strict=True)) for line in lines)
