"""The attention analysis as one page to open or to send: no scripts, nothing fetched, light and dark. Knows no model.

Every text that comes from outside goes through `html.escape` here and nowhere else.
"""

import base64
from collections.abc import Mapping, Sequence
from html import escape

from transformer_xl.analysis.attention import Averages, Head, Map, Row, Width, name_of
from transformer_xl.analysis.terms import TERMS, TOTAL
from transformer_xl.data.text.display import visible

LINE_ENDS = ("\n", "<eos>")
WIDEST_SHOWN = 10
STYLE = """
:root {
  color-scheme: light dark;
  --page: #fcfcfb; --text: #1d1d1f; --faint: #66666c; --rule: #dcdce0; --heat: 255 140 60; --top: #b3261e; --asked: #1f5fbf;
}
@media (prefers-color-scheme: dark) {
  :root { --page: #17181a; --text: #ececee; --faint: #9a9aa2; --rule: #38393d; --heat: 176 70 10; --top: #ff8a75; --asked: #7db4ff; }
}
body { background: var(--page); color: var(--text); font: 16px/1.55 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; }
h2 { font-size: 1.2rem; margin-top: 2.6rem; border-top: 1px solid var(--rule); padding-top: 1.2rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
p { max-width: 50rem; }
img { max-width: 100%; height: auto; background: white; border-radius: 4px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .9rem .15rem 0; text-align: right; border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child { text-align: left; }
.faint { color: var(--faint); }
.text { font: 14px/1.9 ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; border: 1px solid var(--rule); border-radius: 6px; padding: .6rem .8rem; }
.text span { background: rgb(var(--heat) / var(--p)); border-radius: 2px; padding: .12em 0; unicode-bidi: isolate; }
.words span { padding: .12em .15em; }
.top { outline: 1.5px solid var(--top); outline-offset: -1px; }
.asked { border-bottom: 3px solid var(--asked); }
.key b { font-weight: normal; padding: .1em .3em; }
.scale { display: inline-block; width: 8rem; height: .8em; border: 1px solid var(--rule); background: linear-gradient(to right, transparent, rgb(var(--heat))); }
"""
LEGEND = (
    '<p class="key">Colour: attention, from none to the most of that text <i class="scale"></i>. <b class="top">Outlined</b>: the fifth of the tokens that'
    ' gets the most. <b class="asked">Underlined</b>: the position itself. ␣ is a space, ⏎ a line\'s end, \\xe2 a byte that is no character by itself.'
    " Each token's exact probability is in its tooltip.</p>\n"
)


def page(
    averages: Averages,
    maps: Sequence[Map],
    names: Mapping[int, str],
    *,
    title: str,
    source: str,
    words: bool,
    pictures: Mapping[str, bytes],
) -> str:
    """`names` are the tokens by position, `pictures` PNGs by name; `words` says that tokens stand apart, with a space between them."""
    chosen = [one.head for one in maps]
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n",
        f'<h1>{escape(title)}</h1>\n<p class="faint">{escape(source)}</p>\n',
        "<p>A Transformer-XL predicts each next token by looking back: every head of every layer spreads an attention of 1 over the tokens before. "
        "This page shows where it goes, first on average, then for single positions of the text.</p>\n",
        "<h2>Heads that look far back</h2>\n",
        _table(averages, chosen),
        "<h2>Where each head looks on average</h2>\n"
        f"<p>Over {averages.queries:,} positions that see all {averages.span:,} distances. One row for each head, the present at the right; darker is more.</p>\n",
        _picture(pictures, "average"),
        "<h2>The same by term</h2>\n<p>A score is a sum of terms. Each panel shows where one term alone, put through the softmax, would look.</p>\n",
        _picture(pictures, "terms"),
        "<h2>Chosen heads, several positions each</h2>\n",
        _picture(pictures, "heads"),
        "<h2>Single positions, token by token</h2>\n",
        LEGEND,
    ]
    parts += [_section(one, names, words=words) for one in maps]
    return "".join(parts) + "</body>\n</html>\n"


def _table(averages: Averages, chosen: Sequence[Head]) -> str:
    titles = "<th>layer.head</th><th>mean distance</th><th>entropy, bits</th><th>in memory</th><th></th>"
    lines = [
        _line(name_of(head), averages.width(head), "shown below" if head in chosen else "")
        for head in averages.widest()[:WIDEST_SHOWN]
    ]
    return "".join(
        [f"<table>\n<tr>{titles}</tr>\n", *lines, _line("looking everywhere alike", averages.uniform, ""), "</table>\n"]
    )


def _line(name: str, width: Width, note: str) -> str:
    return (
        f"<tr><td>{name}</td><td>{width.mean_distance:.1f}</td><td>{width.entropy_bits:.2f}</td>"
        f'<td>{width.memory_share:.1%}</td><td class="faint">{note}</td></tr>\n'
    )


def _picture(pictures: Mapping[str, bytes], name: str) -> str:
    if name not in pictures:
        return '<p class="faint">Not drawn: pictures need matplotlib.</p>\n'
    data = base64.b64encode(pictures[name]).decode("ascii")
    return f'<img alt="{name}" src="data:image/png;base64,{data}">\n'


def _section(one: Map, names: Mapping[int, str], *, words: bool) -> str:
    row = one.rows[-1]
    following = names.get(row.position + 1)
    predicts = "the text ends here" if following is None else f"the next token is <b>{escape(visible(following))}</b>"
    parts = [
        f"<h2>Layer {one.head[0] + 1}, head {one.head[1] + 1}, at token {row.position + 1:,}</h2>\n",
        f"<p>The model has just read <b>{escape(visible(names[row.position]))}</b>; {predicts}.</p>\n",
    ]
    for term in row.probability:
        name = "All terms together" if term == TOTAL else f"Term ({term}) alone: {TERMS[term]}"
        parts.append(f"<h3>{name}</h3>\n{_running_text(row, names, term, words=words)}")
    return "".join(parts)


def _running_text(row: Row, names: Mapping[int, str], term: str, *, words: bool) -> str:
    probability, top = row.probability[term], set(row.top(term))
    most = float(probability.max()) or 1.0
    parts = [f'<div class="text{" words" if words else ""}">']
    for key, value in enumerate(probability.tolist()):
        position = row.first_key + key
        name = names[position]
        kinds = [kind for kind, so in (("top", key in top), ("asked", position == row.position)) if so]
        title = f"{visible(name)}: {value:.9g}, distance {row.position - position}, token {position + 1}"
        kind = f' class="{" ".join(kinds)}"' if kinds else ""
        shown, share = escape(visible(name)), f"{value / most:.3f}"
        parts.append(f'<span{kind} style="--p:{share}" title="{escape(title)}">{shown}</span>')
        parts.append("<br>" if name.endswith(LINE_ENDS) else " " if words else "<wbr>" if name[-1:].isspace() else "")
    return "".join(parts) + "</div>\n"
