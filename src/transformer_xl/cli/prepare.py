"""Makes a data store: a folder of tokens with a manifest, from a known corpus or from your own text.

txl prepare python --out data/python                        the source of Python's standard library: no download
txl prepare enwik8 --out data/enwik8 --source enwik8.zip    a corpus of the paper, from a file you have
txl prepare wikitext-103 --out data/wt103                   the same, downloaded
txl prepare novel.txt --out data/novel --tokenizer char     your own text
cat *.txt | txl prepare - --out data/mine --tokenizer bpe --vocab-size 4096
txl prepare mail.jsonl.zst --out data/mail --field subject --field body    records: each is a document
txl prepare ~/project --out data/code --include '*.py' --exclude tests --gitignore
txl prepare /shared/crawl --out data/crawl --tokenizer word --engine ray    the pieces dealt to the machines of a Ray cluster
txl prepare novel.txt --out data/novel --tokenizer-of runs/theirs    for a model that exists, in its own tokens
"""

import argparse
import json
from pathlib import Path
from typing import get_args

from transformer_xl.cli.data import splits_table
from transformer_xl.data.corpora.dealing import Engine
from transformer_xl.data.corpora.known import prepare_known
from transformer_xl.data.corpora.own_text import OwnText, prepare_given_splits, prepare_own_text
from transformer_xl.data.corpora.python import prepare_python
from transformer_xl.data.corpora.recipes import NAMES, PYTHON, corpora_table, places_table
from transformer_xl.data.corpora.selection import Inputs
from transformer_xl.data.store import Store
from transformer_xl.data.text.tokenizers import DESCRIPTION, Tokenizer, load_tokenizer
from transformer_xl.errors import DataError, suggest

OF_A_NEW_TOKENIZER = ("tokenizer", "vocab_size", "lower", "min_count")
OF_INPUTS = ("field", "include", "exclude", "gitignore", "binary")
OWN_TEXT_ONLY = (*OF_A_NEW_TOKENIZER, *OF_INPUTS, "tokenizer_of", "split", "split_by", "documents", "separator")
GIVEN_SPLITS = ("valid", "test")
KNOWN_ONLY = ("source", "newlines", "splits", "vocab")


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.epilog = (
        f"known corpora:\n{corpora_table()}\n\n"
        f"known places (each corpus also takes a file you already have, with --source):\n{places_table()}"
    )
    add("what", nargs="*", metavar="NAME|PATH", help=f"one of {', '.join(NAMES)}; or files, folders, -")
    add("--out", type=Path, required=True, metavar="DIR", help="the store to make")
    add(
        "--engine",
        choices=get_args(Engine),
        default="processes",
        help="who encodes: this machine's cores, or a Ray cluster",
    )
    add("--json", action="store_true", help="print the manifest as JSON")

    known = parser.add_argument_group("a known corpus").add_argument
    known("--source", type=Path, metavar="PATH", help="file (plain, .gz, .xz, .zip), archive or folder")
    known("--newlines", choices=("keep", "drop"), help="enwik8: drop them as the paper's code did")
    known("--splits", metavar="A,B", help="prepare only these, e.g. valid,test")
    known("--vocab", type=Path, metavar="FILE", help="wikitext-103, lm1b: a vocabulary instead of counting")

    own = parser.add_argument_group("your own text").add_argument
    own(
        "--field",
        action="append",
        metavar="NAME",
        help="of .jsonl, .csv, .tsv, .parquet: what holds the text, such as text or user.name; may be repeated",
    )
    own(
        "--include",
        action="append",
        metavar="PATTERN",
        help="only such files, e.g. '*.py'; may be repeated",
    )
    own(
        "--exclude",
        action="append",
        metavar="PATTERN",
        help="neither such files nor folders, e.g. node_modules; may be repeated",
    )
    own("--gitignore", action="store_true", default=None, help="leave out what .gitignore files leave out")
    own("--binary", choices=("skip", "keep"), help="files that are no text: left out and listed (default), or taken")
    own("--tokenizer", choices=("byte", "char", "word", "bpe"), help="default: byte")
    own("--tokenizer-of", type=Path, metavar="RUN", help="that of a run, a checkpoint or a data store")
    own("--vocab-size", type=int, metavar="N", help="word, bpe: at most this many tokens")
    own("--min-count", type=int, metavar="N", help="word: rarer words become <unk>")
    own("--lower", action="store_true", default=None, help="lower-case the text")
    own("--split", metavar="A,B,C", help="shares of train, valid and test (default: 0.9,0.05,0.05)")
    own("--split-by", choices=("share", "file"), help="cut anywhere (default), or keep files whole")
    own("--train", nargs="+", metavar="PATH", help="this is train (lm1b: these are the training shards)")
    own("--valid", nargs="+", metavar="PATH", help="this is valid")
    own("--test", nargs="+", metavar="PATH", help="this is test")
    own("--documents", choices=("file", "blank-line", "separator"), help="what begins a document")
    own("--separator", metavar="LINE", help="the line between documents; it is not part of the text")


def run(arguments: argparse.Namespace) -> int:
    store = _prepare(arguments)
    if arguments.json:
        print(json.dumps({"folder": str(store.folder), **store.manifest.to_json()}, indent=2, ensure_ascii=False))
    else:
        manifest = store.manifest
        print(f"{store.folder}: {manifest.name}, {manifest.vocabulary_size:,} {manifest.tokenizer_kind} tokens")
        print(splits_table(manifest))
    return 0


def _prepare(arguments: argparse.Namespace) -> Store:
    name = _known_name(arguments)
    if name is not None:
        given = (*OWN_TEXT_ONLY, *GIVEN_SPLITS, *(KNOWN_ONLY if name == PYTHON else ()))
        _refuse(arguments, given, f"does not apply to {name}, which has its own rule")
    else:
        _refuse(arguments, KNOWN_ONLY, "is for the known corpora")
    if name == PYTHON:
        _refuse(arguments, ("train",), f"does not apply to {name}, which has its own rule")
        return prepare_python(out=arguments.out, engine=arguments.engine)
    if name is not None:
        return prepare_known(
            name,
            out=arguments.out,
            source=arguments.source,
            newlines=arguments.newlines or "keep",
            splits=None if arguments.splits is None else arguments.splits.split(","),
            train=[Path(path) for path in arguments.train or ()],
            vocabulary_file=arguments.vocab,
            engine=arguments.engine,
        )
    settings = _settings(arguments)
    splits = {split: getattr(arguments, split) for split in ("train", "valid", "test") if getattr(arguments, split)}
    if splits:
        _refuse(arguments, ("what", "split", "split_by"), "does not go with --train, --valid and --test")
        return prepare_given_splits(splits, out=arguments.out, settings=settings, engine=arguments.engine)
    return prepare_own_text(arguments.what, out=arguments.out, settings=settings, engine=arguments.engine)


def _known_name(arguments: argparse.Namespace) -> str | None:
    """The corpus meant, or None for own text. A word that is neither a corpus nor a file is refused with the nearest name."""
    words = arguments.what
    if not words:
        if arguments.train or arguments.valid or arguments.test:
            return None
        raise DataError(f"nothing to prepare; name a corpus ({', '.join(NAMES)}) or give files, folders or -")
    if words[0] in NAMES:
        if len(words) > 1:
            raise DataError(f"{words[0]} is prepared alone; write ./{words[0]} if you mean a file of that name")
        return str(words[0])
    for word in words:
        if word != "-" and not Path(word).exists():
            raise DataError(f"no corpus and no file {word}{suggest(word, NAMES)}")
    return None


def _refuse(arguments: argparse.Namespace, options: tuple[str, ...], why: str) -> None:
    for option in options:
        if getattr(arguments, option) not in (None, []):
            shown = "a path" if option == "what" else f"--{option.replace('_', '-')}"
            raise DataError(f"{shown} {why}")


def _existing_tokenizer(path: Path) -> Tokenizer:
    from transformer_xl.checkpoint import RunFolder
    from transformer_xl.checkpoint.box import folder_of

    path = folder_of(path)
    for folder in (path, path / "tokenizer"):
        if (folder / DESCRIPTION).is_file():
            return load_tokenizer(folder)
    return load_tokenizer(RunFolder(path).chosen_checkpoint() / "tokenizer")


def _settings(arguments: argparse.Namespace) -> OwnText:
    if arguments.tokenizer_of is not None:
        _refuse(arguments, OF_A_NEW_TOKENIZER, "makes a new tokenizer, and --tokenizer-of takes one that exists")
    chosen = {
        "existing": None if arguments.tokenizer_of is None else _existing_tokenizer(arguments.tokenizer_of),
        "tokenizer": arguments.tokenizer,
        "vocabulary_size": arguments.vocab_size,
        "lower": arguments.lower,
        "min_count": arguments.min_count,
        "shares": None if arguments.split is None else _shares(arguments.split),
        "split_by": arguments.split_by,
        "documents": arguments.documents or (None if arguments.separator is None else "separator"),
        "separator": arguments.separator,
        "inputs": _inputs(arguments),
    }
    return OwnText(**{name: value for name, value in chosen.items() if value is not None})


def _inputs(arguments: argparse.Namespace) -> Inputs:
    return Inputs(
        field=tuple(arguments.field or ()),
        include=tuple(arguments.include or ()),
        exclude=tuple(arguments.exclude or ()),
        gitignore=bool(arguments.gitignore),
        binary=arguments.binary or "skip",
    )


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(share) for share in text.split(","))
    except ValueError:
        raise DataError(f"--split {text or repr(text)} must be shares such as 0.9,0.05,0.05") from None
