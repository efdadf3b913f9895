"""What a model looks at: every head's average attention, the same by term, and chosen heads over the text itself (the paper's Appendix D).

    txl attention runs/first
    txl attention runs/first --split test --tokens 50000 --memory 640
    txl attention runs/first --text notes.txt --head 3.2 --head 8.8 --position 700
    txl attention --text notes.txt --out looks              (the model in the box)

Layers, heads and tokens count from 1. Every token sees as many tokens, its last M; those too near the start of the text to have so many are read but not
counted. As in the paper, the text is the valid split, and heads are shown closely at a random position. Writes report.html (one page, to open or to
send), average.png, terms.png, heads.png and attention.json to RUN/figures/attention-NAME."""

import argparse
import json
import re
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_xl.cli.devices import add_device, say_device
from transformer_xl.cli.models import add_run, load_named
from transformer_xl.errors import ConfigError, InputError

if TYPE_CHECKING:
    from transformer_xl.analysis.attention import Averages, Floats, Head, Map, Tokens
    from transformer_xl.library import Loaded

SPLIT = "valid"
HEADS_CHOSEN = 3
WIDEST_SHOWN = 10


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add = parser.add_argument
    add("--text", metavar="FILE", help="a text to read")
    add("--split", help="or a split of the data: train, valid (default, as in the paper) or test")
    add("--data", metavar="DIR", help="the data, where it is not where the run was trained on it")
    add("--tokens", metavar="N", type=int, help="only the first N tokens")
    add("--memory", metavar="M", type=int, help="how many tokens each sees, where not as the run evaluates")
    add(
        "--head",
        metavar="LAYER.HEAD",
        action="append",
        default=[],
        help="look closely at this head; may be repeated (default: the three widest, of different layers)",
    )
    add(
        "--position",
        metavar="P",
        type=int,
        action="append",
        default=[],
        help="and at this token of the text; may be repeated (default, as in the paper: a random one, of those that see a full memory)",
    )
    add("--seed", type=int, help="of the random position (0)")
    add("--out", metavar="DIR", help="where to write, if not among the run's figures")
    add_device(parser)
    add("--json", action="store_true", help="print what attention.json holds")


def run(arguments: argparse.Namespace) -> int:
    from transformer_xl.analysis import attention
    from transformer_xl.analysis.attention_page import page
    from transformer_xl.analysis.attention_view import ROWS, check_attends
    from transformer_xl.console import progress
    from transformer_xl.data.text.display import readable
    from transformer_xl.files import write_text

    if arguments.text and (arguments.split or arguments.data):
        other = "--split" if arguments.split else "--data"
        raise ConfigError(f"--text and {other} are two different sources; give one of them")
    if arguments.tokens is not None and arguments.tokens < 0:
        raise ConfigError(f"--tokens: {arguments.tokens} is no number of tokens; give two or more")
    if arguments.seed is not None and arguments.position:
        raise ConfigError("--seed draws a position, and --position names one; give one of them")
    if arguments.seed is not None and arguments.seed < 0:
        raise ConfigError(f"--seed: {arguments.seed} is no seed; give 0 or more")
    heads = [parse_head(word) for word in arguments.head]
    loaded = load_named(arguments.run, device=arguments.device)
    model = check_attends(loaded.model, name=arguments.run or "the model in the box")
    folder, lengths = out_folder(arguments, loaded), loaded.config.evaluation
    if arguments.memory is not None:
        lengths = replace(lengths, memory=arguments.memory)
    tokens = read_tokens(arguments, loaded)
    for head in heads:
        attention.check_head(model, head)
    positions = [position - 1 for position in arguments.position]
    for position in positions:
        attention.check_position(position, tokens=len(tokens))

    started_at = time.perf_counter()
    with progress("reading", total=len(tokens), unit="tokens") as advance:
        averages = attention.average_attention(model, tokens, lengths=lengths, advance=advance)
    seconds = time.perf_counter() - started_at
    say_device(arguments, loaded)
    heads = heads or attention.widest_of_different_layers(averages, heads=HEADS_CHOSEN)
    positions = positions or [attention.random_position(averages, tokens=len(tokens), seed=arguments.seed or 0)]
    maps = attention.attention_maps(model, tokens, lengths=lengths, heads=heads, positions=positions, rows=ROWS)

    # Those that the maps show, and the one after each position asked for.
    shown = {p for one in maps for p in range(min(row.first_key for row in one.rows), one.position + 2)}
    names = {p: readable(loaded.tokenizer, int(tokens[p])) for p in sorted(shown) if p < len(tokens)}
    source = sentence(arguments, loaded, averages, tokens=len(tokens))
    result = header(arguments, loaded, averages, tokens=len(tokens)) | as_json(averages, maps, names)
    folder.mkdir(parents=True, exist_ok=True)
    place = loaded.checkpoint.run.path if loaded.checkpoint.run else loaded.checkpoint.folder
    title = f"Attention of {place.resolve().name}"
    # One line: indented, a hundred thousand numbers would stand on as many lines.
    write_text(folder / "attention.json", json.dumps(result, ensure_ascii=False) + "\n")
    pictures, words = draw(folder, averages, maps, names, source=source), loaded.tokenizer.kind == "word"
    report = page(averages, maps, names, title=title, source=source, words=words, pictures=pictures)
    write_text(folder / "report.html", report)
    if arguments.json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        print(f"{source}; {len(tokens) / seconds:,.0f} tokens/s")
        print(table(averages))
        print(choice(arguments, heads, positions))
        print(f"report: {folder / 'report.html'}")
    return 0


def parse_head(word: str) -> "Head":
    if not re.fullmatch(r"[0-9]{1,9}\.[0-9]{1,9}", word):
        raise ConfigError(f"--head: {word!r} is no head; write LAYER.HEAD, both counted from 1, such as 2.3")
    layer, head = map(int, word.split("."))
    return layer - 1, head - 1


def out_folder(arguments: argparse.Namespace, loaded: "Loaded") -> Path:
    if arguments.out:
        return Path(arguments.out)
    if loaded.checkpoint.run is None:
        raise ConfigError(
            f"{arguments.run or 'the model in the box'} is in no run's folder; say where to write with --out DIR"
        )
    return loaded.checkpoint.run.inside("figures", f"attention-{source_name(arguments)}")


def source_name(arguments: argparse.Namespace) -> str:
    return Path(arguments.text).name if arguments.text else arguments.split or SPLIT


def read_tokens(arguments: argparse.Namespace, loaded: "Loaded") -> "Tokens":
    """All of a split, memory-mapped, or a text in the smallest integers that fit; of either only the first `--tokens`."""
    if not arguments.text:
        split = loaded.store(arguments.data).split(arguments.split or SPLIT)
        tokens: Tokens = split.tokens[: arguments.tokens]
        return tokens

    import numpy as np

    from transformer_xl.cli.score import Source
    from transformer_xl.data.store import smallest_dtype
    from transformer_xl.data.text.streaming import token_stream

    pieces, found = [np.zeros(0, dtype=smallest_dtype(loaded.tokenizer.size))], 0
    try:
        with Path(arguments.text).open("rb") as stream:
            for piece in token_stream(loaded.tokenizer, Source(stream), name=arguments.text):
                pieces.append(piece.token_P.astype(pieces[0].dtype))
                found += len(piece.token_P)
                if arguments.tokens is not None and found >= arguments.tokens:
                    break
    except FileNotFoundError:
        raise InputError(f"{arguments.text} does not exist; name a text file") from None
    return np.concatenate(pieces)[: arguments.tokens]


def sentence(arguments: argparse.Namespace, loaded: "Loaded", averages: "Averages", *, tokens: int) -> str:
    about, rule = loaded.checkpoint.about, averages.rule
    what = source_name(arguments) if arguments.text else f"{about.corpus} {source_name(arguments)}"
    seen = f"its last {averages.span:,}, itself among them" if rule.memory else f"its segment of {rule.segment:,}"
    clamped = f", distances clamped at {rule.clamp_len:,}" if rule.clamp_len else ""
    return f"{what}: {tokens:,} tokens, each seeing {seen}{clamped}; averaged over the {averages.queries:,} that see so many"


def table(averages: "Averages") -> str:
    """The widest heads for people."""
    from transformer_xl.analysis.attention import name_of

    rows = [(name_of(head), averages.width(head)) for head in averages.widest()[:WIDEST_SHOWN]]
    rows.append(("everywhere alike", averages.uniform))
    lines = [f"{'layer.head':<16}  {'mean distance':>13}  {'entropy (bits)':>14}  {'in memory':>9}"]
    for name, width in rows:
        shares = f"{width.entropy_bits:>14.2f}  {width.memory_share:>9.1%}"
        lines.append(f"{name:<16}  {width.mean_distance:>13.1f}  {shares}")
    return "\n".join(lines)


def choice(arguments: argparse.Namespace, heads: "list[Head]", positions: list[int]) -> str:
    from transformer_xl.analysis.attention import name_of

    why_heads = "" if arguments.head else " (the widest of different layers)"
    why_positions = (
        ""
        if arguments.position
        else f" (drawn with seed {arguments.seed or 0} from those that see so many; --position chooses)"
    )
    names, places = ", ".join(map(name_of, heads)), ", ".join(f"{position + 1:,}" for position in positions)
    return f"shown closely: head {names}{why_heads} at token {places}{why_positions}"


def header(arguments: argparse.Namespace, loaded: "Loaded", averages: "Averages", *, tokens: int) -> dict[str, Any]:
    about, rule = loaded.checkpoint.about, averages.rule
    where = {"text": arguments.text} if arguments.text else {"corpus": about.corpus, "split": arguments.split or SPLIT}
    return {
        "checkpoint": str(loaded.checkpoint.folder),
        "step": about.step,
        **where,
        "tokens": tokens,
        "memory": rule.memory,
        "segment": rule.segment,
        "clamp_len": rule.clamp_len,
        "span": averages.span,
        "queries": averages.queries,
    }


def as_json(averages: "Averages", maps: "list[Map]", names: dict[int, str]) -> dict[str, Any]:
    """Layers, heads and positions count from 1; distances from 0, the token itself."""
    from transformer_xl.analysis.terms import TERMS, TOTAL

    return {
        "terms": {term: TERMS[term] for term in averages.average if term != TOTAL},
        "uniform": asdict(averages.uniform),
        "ranking": [{"layer": n + 1, "head": h + 1, **asdict(averages.width((n, h)))} for n, h in averages.widest()],
        "average_by_layer_head_distance": {
            term: [[numbers(row_R) for row_R in layer_HR] for layer_HR in values_NHR]
            for term, values_NHR in averages.average.items()
        },
        "maps": [
            {
                "layer": one.head[0] + 1,
                "head": one.head[1] + 1,
                "position": one.position + 1,
                "rows": [
                    {
                        "position": row.position + 1,
                        "token": names[row.position],
                        "first_key": row.first_key + 1,
                        "keys": [names[position] for position in range(row.first_key, row.position + 1)],
                        "probability": {term: numbers(values) for term, values in row.probability.items()},
                        "top": {term: [row.first_key + key + 1 for key in row.top(term)] for term in row.probability},
                    }
                    for row in one.rows
                ],
            }
            for one in maps
        ],
    }


def numbers(values: "Floats") -> list[float]:
    """Nine digits tell any two single-precision numbers apart."""
    return [float(f"{value:.9g}") for value in values.tolist()]


def draw(
    folder: Path, averages: "Averages", maps: "list[Map]", names: dict[int, str], *, source: str
) -> dict[str, bytes]:
    """The pictures by name; none without matplotlib."""
    from transformer_xl.analysis.attention_pictures import draw_averages, draw_heads, draw_terms
    from transformer_xl.console import progress, say
    from transformer_xl.pictures import can_draw

    if not can_draw():
        say("no pictures: they need matplotlib; install it with: pip install 'transformer-xl[viz]'")
        return {}
    with progress("drawing", total=3, unit="pictures") as advance:
        title, chosen = f"Where each head looks on average\n{source}", [one.head for one in maps]
        draw_averages(averages, folder / "average.png", title=title, chosen=chosen)
        advance()
        draw_terms(averages, folder / "terms.png", title=f"Where each term alone would look\n{source}")
        advance()
        draw_heads(maps, names, folder / "heads.png", title=f"What chosen heads look at, in {source}")
        advance()
    return {name: (folder / f"{name}.png").read_bytes() for name in ("average", "terms", "heads")}
