"""One of the paper's tables, start to end: trains its models one after another, evaluates them, and writes a page with our figures beside the
paper's, a JSON file with all of them, and pictures. The same command again goes on where it stopped; studies under one --out share their models.

    txl study ablation-encoding --data data/enwik8        (Table 6: recurrence, encoding, loss)
    txl study ablation-fragmentation --data data/ptb      (Table 7: sentences without order)
    txl study memory-matched --data data/enwik8           (Appendix A: a longer segment in place of memory)
    txl study recl --data data/enwik8                     (Table 8: relative effective context length)
    txl study speed                                       (Table 9: a window against memory)
    txl study generation --data data/enwik8               (Appendix E: text beside what really followed)
    txl study adaptation --data data/enwik8 --shift data/python    (beyond the paper: learning while reading, way by way)

--scale tiny (default) takes two cores and minutes a model, small hours, paper the published configurations and GPUs (--device cuda)."""

import argparse
import json
import sys
from pathlib import Path

from transformer_xl.devices import AUTO, DEVICES_HELP, choose_device


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", metavar="NAME", help="which study, see above")
    add("--scale", metavar="tiny|small|paper", default="tiny", help="how large the models are (tiny)")
    add("--data", metavar="DIR", help="a store made by txl prepare")
    add("--shift", metavar="DIR", help="adaptation: also read this store's text, of another kind than was trained on")
    add("--out", metavar="DIR", default="studies", help="where pages and runs land (studies)")
    add("--seeds", metavar="N", type=int, help="models that each row is the mean of")
    add("--device", default=AUTO, help=DEVICES_HELP)
    add("--json", action="store_true", help="print all figures as JSON")


def run(arguments: argparse.Namespace) -> int:
    from transformer_xl.studies.catalogue import run_study
    from transformer_xl.studies.runs import StudyStopped
    from transformer_xl.studies.scales import find_scale

    try:
        page, value = run_study(
            arguments.name,
            scale=find_scale(arguments.scale),
            data=arguments.data,
            out=Path(arguments.out),
            seeds=arguments.seeds,
            shift=arguments.shift,
            device=str(choose_device(arguments.device)),
        )
    except StudyStopped as stopped:
        print(f"txl: {stopped}", file=sys.stderr)
        return 128 + int(stopped.signal)
    if arguments.json:
        print(json.dumps(value, indent=2))
        return 0
    print(page.read_text(encoding="utf-8"))
    print(f"page: {page}\nfigures: {page.with_suffix('.json')}")
    return 0
