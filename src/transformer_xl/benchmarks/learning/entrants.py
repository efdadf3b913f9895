"""Who takes part: how each is sized, fed and trained, and what may be chosen for it on valid. Starts nothing.

Ours are trained by our own loop as their presets say, with nothing chosen. The others are trained by one loop (`peer_worker`), with the highest rate and
the shape of a batch chosen for each from a few.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from transformer_xl.benchmarks.learning.sizes import gpt2_count, resized, transformer, x_transformers_count
from transformer_xl.benchmarks.workloads import Scale
from transformer_xl.config import ModelConfig, RecurrentConfig, RunConfig
from transformer_xl.config.sources import resolve
from transformer_xl.errors import ConfigError, suggest
from transformer_xl.presets import PRESETS, find_preset

Feed = dict[str, int]
"""Lanes, segment, stretch (segments that a lane reads on for), and what else the model needs to know of its text."""
AS_IT_IS = 0
"""Parameters of ours, where each takes part at its own best size: a preset is made for a time, and has the size for it."""
BYTES = 256
"""Tokens that a configuration is read with; a corpus may have others."""
NEEDS_PACKAGES = ("gpt2", "x-transformers")
RECURRENT = {"lstm": "tiny-byte-lstm", "qrnn": "tiny-byte-qrnn"}
PEERS = (*RECURRENT, *NEEDS_PACKAGES)


@dataclass(frozen=True, kw_only=True)
class Entrant:
    name: str
    kind: Literal["ours", "peer"]
    model: Callable[[int, int, Feed], dict[str, Any]]
    """The settings of a model with about so many parameters, for so many different tokens; for ours a whole configuration."""
    rates: tuple[float, ...] = ()
    """Lowest first; the middle one is tried first. None: as the configuration says."""
    feeds: tuple[Feed, ...] = ()

    @property
    def needs_packages(self) -> bool:
        return self.name in NEEDS_PACKAGES


def entrant_of(name: str, *, scale: Scale) -> Entrant:
    """A peer's name, a preset's, or a configuration file."""
    if name in RECURRENT:
        return _recurrent(name, scale=scale)
    if name == "gpt2":
        return Entrant(
            name=name,
            kind="peer",
            model=lambda parameters, vocabulary, feed: transformer(
                lambda *shape: gpt2_count(*shape, rows=vocabulary + feed["segment"]),
                parameters=parameters,
                vocabulary=vocabulary,
            ),
            **_choices(
                scale,
                rates=(1e-3, 2e-3, 4e-3),
                feeds=(_feed(32, 64, 1), _feed(16, 64, 1), _feed(16, 128, 1), _feed(8, 256, 1)),
            ),
        )
    if name == "x-transformers":
        carried = _feed(32, 64, 8, memory=128, shift=1)
        return Entrant(
            name=name,
            kind="peer",
            model=lambda parameters, vocabulary, feed: transformer(
                lambda *shape: x_transformers_count(*shape, rows=2 * vocabulary),
                parameters=parameters,
                vocabulary=vocabulary,
            ),
            **_choices(
                scale,
                rates=(1e-3, 2e-3, 4e-3),
                feeds=(
                    carried,
                    {**carried, "lanes": 16},
                    {**carried, "shift": 0},
                    _feed(16, 128, 8, memory=128, shift=1),
                    # Its own wrapper: four segments with memory between them in one step.
                    _feed(8, 64, 1, chunks=4, memory=128, shift=1),
                ),
            ),
        )
    return _ours(name)


def _feed(lanes: int, segment: int, stretch: int, **more: int) -> Feed:
    return {"lanes": lanes, "segment": segment, "stretch": stretch, **more}


def _choices(scale: Scale, *, rates: tuple[float, ...], feeds: tuple[Feed, ...]) -> Any:
    """A toy has nothing to choose."""
    if scale == "full":
        return {"rates": rates, "feeds": feeds}
    small = {"lanes": 4, "segment": 16}
    memory = {"memory": 16} if "memory" in feeds[0] else {}
    return {"rates": rates[1:2], "feeds": ({**feeds[0], **small, **memory},)}


def _recurrent(name: str, *, scale: Scale) -> Entrant:
    model = find_preset(RECURRENT[name]).run.model
    assert isinstance(model, RecurrentConfig)
    return Entrant(
        name=name,
        kind="peer",
        model=lambda parameters, vocabulary, feed: asdict(
            resized(replace(model, vocabulary=vocabulary), parameters=parameters)
        ),
        **_choices(
            scale,
            rates=(2.5e-3, 5e-3, 1e-2),
            feeds=(_feed(32, 64, 8), _feed(32, 64, 32), _feed(16, 64, 8), _feed(16, 128, 8)),
        ),
    )


def _ours(name: str) -> Entrant:
    run = _run_of(name)

    def sized(parameters: int, vocabulary: int) -> ModelConfig | RecurrentConfig:
        model = replace(run.model, vocabulary=vocabulary)
        return model if parameters == AS_IT_IS else resized(model, parameters=parameters)

    return Entrant(
        name=Path(name).stem if _is_file(name) else name,
        kind="ours",
        model=lambda parameters, vocabulary, feed: asdict(replace(run, model=sized(parameters, vocabulary))),
    )


def _is_file(name: str) -> bool:
    return Path(name).suffix in (".json", ".toml")


def _run_of(name: str) -> RunConfig:
    if _is_file(name):
        return resolve(None, vocabulary=BYTES, files=[Path(name)], words={})
    names = [known for preset in PRESETS for known in (preset.name, *preset.aliases)]
    if name not in names:
        raise ConfigError(f"nobody called {name} can take part{suggest(name, [*PEERS, *names])}")
    return resolve(find_preset(name).run, vocabulary=BYTES, files=[], words={})
