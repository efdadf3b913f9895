"""The studies by name, and the one door to them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformer_xl.console import say
from transformer_xl.data.remote import is_address
from transformer_xl.errors import ConfigError, InputError, suggest
from transformer_xl.pictures import can_draw
from transformer_xl.studies.ablation import run_ablation
from transformer_xl.studies.adaptation import run_adaptation
from transformer_xl.studies.generation import run_generation
from transformer_xl.studies.recl import run_recl
from transformer_xl.studies.report import Report, write_report
from transformer_xl.studies.runs import Setting
from transformer_xl.studies.scales import Scale
from transformer_xl.studies.speed import run_speed
from transformer_xl.studies.tables import ENCODING, FRAGMENTATION, MEMORY_MATCHED

STUDIES: dict[str, Callable[[Setting], Report]] = {
    "ablation-encoding": partial(run_ablation, ENCODING),
    "ablation-fragmentation": partial(run_ablation, FRAGMENTATION),
    "memory-matched": partial(run_ablation, MEMORY_MATCHED),
    "recl": run_recl,
    "speed": run_speed,
    "generation": run_generation,
    "adaptation": run_adaptation,
}
SHIFTED = "adaptation"
"""The study that also reads a text of another kind."""
ONE_SEED = ("speed", "generation")
"""Studies whose rows are no means over models."""


def run_study(
    name: str,
    *,
    scale: Scale,
    data: Path | str | None,
    out: Path,
    seeds: int | None = None,
    device: str = "cpu",
    shift: Path | str | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Trains what is missing, measures, and writes the page and the JSON: the page's place and the JSON's content."""
    if name not in STUDIES:
        raise ConfigError(f"no study {name}{suggest(name, STUDIES)}")
    if seeds is not None and seeds < 1:
        raise InputError(f"`seeds=`: {seeds} is too few; take at least 1")
    if name in ONE_SEED and seeds not in (None, 1):
        raise InputError(f"`seeds=`: {seeds} for {name}, which is no mean over models; leave it out")
    if shift is not None and name != SHIFTED:
        raise InputError(f"`shift=` is for the study {SHIFTED}; leave it out")
    if not can_draw():
        say("matplotlib is not installed: everything is written but the pictures; pip install 'transformer-xl[viz]'")
    chosen = seeds or scale.seeds.get(name, 1)
    setting = Setting(study=name, scale=scale, data=data, out=out, seeds=chosen, device=device, shift=shift)
    for option, given in (("data", data), ("shift", shift)):
        if given is not None and not is_address(given) and not Path(given).is_dir():
            raise InputError(
                f"`{option}=`: there is no folder {given}; make a store with: txl prepare NAME --out {given}"
            )
    out.mkdir(parents=True, exist_ok=True)
    return write_report(STUDIES[name](setting), setting=setting)
