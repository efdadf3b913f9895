"""How a model should learn while it reads: rate and decay of moving weights, theta and lambda of a cache. Found on valid in about ten passes over its
beginning, and written into the run with their figures; `--adapt` of other commands then uses them. The trained weights stay as they are.

    txl tune-adaptation runs/first
    txl evaluate runs/first --adapt both

Gradients are first measured on training text: the rule rms divides by their size (Krause et al. 2018)."""

import argparse
import json
from dataclasses import asdict

from transformer_xl.cli.adapting import add_fields, overridden
from transformer_xl.devices import AUTO, DEVICES_HELP
from transformer_xl.errors import ConfigError


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", metavar="RUN", help="a run's folder")
    add("--data", metavar="DIR", help="the data, where it is not where the run was trained on it")
    add("--tokens", metavar="N", type=int, default=50_000, help="tokens of valid that a pass reads (50000)")
    add(
        "--segments", metavar="N", type=int, default=200, help="segments of train on which gradients are measured (200)"
    )
    add("--device", default=AUTO, help=DEVICES_HELP)
    add("--json", action="store_true", help="print what was found as JSON")
    add_fields(parser, "rule", "learns", "rank", "segment", "cache_size", "cache_context")


def run(arguments: argparse.Namespace) -> int:
    from transformer_xl.adaptation.statistics import gather
    from transformer_xl.adaptation.tuned import write_tuned
    from transformer_xl.adaptation.tuning import Tuning
    from transformer_xl.config import AdaptationConfig
    from transformer_xl.console import progress
    from transformer_xl.evaluation import make_rule
    from transformer_xl.library import load

    if arguments.tokens < 2 or arguments.segments < 1:
        raise ConfigError("--tokens must be at least 2, and --segments at least 1")
    start = overridden(AdaptationConfig(rule="rms"), arguments)
    loaded = load(arguments.run, device=arguments.device)
    if loaded.checkpoint.run is None:
        raise ConfigError(f"{arguments.run} is a checkpoint; name its run, where what is found is kept")
    store, model = loaded.store(arguments.data), loaded.model.eval()
    valid = store.split("valid").first(arguments.tokens)
    rule = make_rule(model, loaded.config.evaluation, tokens=len(valid), lanes=1)
    start = start.in_segments(rule.segment)
    with progress("measuring gradients", total=2 * arguments.segments * start.segment, unit="tokens") as advance:
        statistics = gather(
            model,
            store.split("train"),
            segment=start.segment,
            segments=arguments.segments,
            rank=start.rank,
            advance=advance,
        )
    with progress("tuning on valid", total=12 * len(valid), unit="tokens") as advance:
        tuning = Tuning(model, valid, rule=rule, statistics=statistics, advance=advance)
        tuned = tuning.tune(start, corpus=store.manifest.name)
    path = write_tuned(loaded.checkpoint.run, tuned, statistics)
    if arguments.json:
        print(json.dumps(asdict(tuned), indent=2))
        return 0
    for name in ("static", "cache", "gradient", "both"):
        trial = getattr(tuned, name)
        less = f"{100 * (1 - trial.nats / tuned.static.nats):5.2f} % fewer bits" if name != "static" else ""
        print(f"{name:<9}{trial.nats:.5f} nats per token  {less}  {trial.how.sentence()}".rstrip())
    print(f"{tuned.passes} passes over the first {tuned.tokens:,} tokens of {tuned.corpus} valid; written to {path}")
    return 0
