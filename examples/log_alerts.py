"""Alerts from your own logs: learns what is normal from one log, then prints the lines of another that stand out.

    python examples/log_alerts.py app.log today.log
    tail -n +1 -f today.log | python examples/log_alerts.py app.log -      for ever; stopped and started again, it goes on

Nothing is labelled and no pattern is written: a line stands out when it surprises the model more than nearly all of the last 10,000.
"""

import argparse
import sys
from itertools import chain
from pathlib import Path

import transformer_xl as txl

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("normal", help="a log to learn from")
parser.add_argument("watched", help="a log to look at, or - for standard input")
parser.add_argument("--minutes", type=float, default=4.0, help="of learning, once (4)")
parser.add_argument(
    "--above", type=float, default=0.99, help="the share of recent lines that an alert surprises more than (0.99)"
)
parser.add_argument("--run", default="runs/log-alerts", help="where the model is, or will be")
arguments = parser.parse_args()

if not Path(arguments.run).exists():
    txl.fit(arguments.normal, minutes=arguments.minutes, run=arguments.run)
state = Path(arguments.run) / "watch.state"
scorer = txl.load(arguments.run).line_scorer(state=state)
stream = sys.stdin.buffer if arguments.watched == "-" else open(arguments.watched, "rb")  # noqa: SIM115
alerts = 0
try:
    with stream:
        for line in chain.from_iterable(chain((scorer.feed(data) for data in stream), [scorer.finish()])):
            # Among fewer than a hundred lines, a share of 99 % says nothing.
            if line.rank is not None and line.among >= 1 / (1 - arguments.above) and line.rank >= arguments.above:
                alerts += 1
                where = "" if line.part is None else f"   <- {line.part.text!r}"
                print(f"line {line.number}, {line.bits:.0f} bits: {line.text}{where}", flush=True)
except KeyboardInterrupt:
    pass
scorer.save(state)
print(f"{alerts} alerts; what was seen is kept in {state}", file=sys.stderr)
