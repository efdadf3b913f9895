"""A run's figures for the trackers that people already have, beside metrics.jsonl and TensorBoard. Where they go is the trackers' own setting:
WANDB_MODE=offline, MLFLOW_TRACKING_URI and their kin. A tracker that fails later is left behind; training goes on."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, Protocol

from transformer_xl.checkpoint import RunFolder
from transformer_xl.config import RunConfig
from transformer_xl.console import say
from transformer_xl.errors import ConfigError, MissingPackage
from transformer_xl.files import open_plain, write_json

TrackerName = Literal["wandb", "mlflow"]
PROJECT = "transformer-xl"
IDENTITY = re.compile(r"[A-Za-z0-9_-]{1,64}")
LONGEST_PARAMETER = 500


class Tracker(Protocol):
    identity: str
    """By which the tracker knows the run: a run that goes on, goes on there."""

    def log(self, values: Mapping[str, float], *, step: int) -> None: ...

    def close(self) -> None: ...


class Wandb:
    def __init__(self, run: RunFolder, config: RunConfig, *, identity: str | None) -> None:
        import wandb

        settings = wandb.Settings(console="off")  # what is printed stays ours
        self._run = wandb.init(
            project=PROJECT,
            name=run.path.name,
            dir=str(run.path),
            id=identity,
            resume="allow",
            config=asdict(config),
            settings=settings,
        )
        self.identity = str(self._run.id)

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    def __init__(self, run: RunFolder, config: RunConfig, *, identity: str | None) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        if identity is not None:
            self._client.update_run(identity, status="RUNNING")
            self.identity = identity
            return
        known = self._client.get_experiment_by_name(PROJECT)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(PROJECT)
        self.identity = str(self._client.create_run(experiment, run_name=run.path.name).info.run_id)
        for name, value in _dotted(asdict(config)):
            self._client.log_param(self.identity, name, str(value)[:LONGEST_PARAMETER])

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self.identity, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self.identity)


def _dotted(fields: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


TRACKERS: dict[str, Callable[..., Tracker]] = {"wandb": Wandb, "mlflow": Mlflow}


class Tracking:
    """All trackers of a run."""

    def __init__(self, names: Sequence[str], run: RunFolder, config: RunConfig) -> None:
        self._trackers = dict[str, Tracker]()
        known = _identities(run)
        for name in names:
            self._trackers[name] = _started(name, run, config, identity=known.get(name))
        if names:
            now = {name: tracker.identity for name, tracker in self._trackers.items()}
            write_json(run.inside("tracking.json"), {**known, **now})

    def log(self, kind: str, values: Mapping[str, float], *, step: int) -> None:
        named = {f"{kind}/{name}": value for name, value in values.items()}
        for name, tracker in list(self._trackers.items()):
            self._try(name, lambda tracker=tracker: tracker.log(named, step=step))  # type: ignore[misc]

    def close(self) -> None:
        for name, tracker in list(self._trackers.items()):
            self._try(name, tracker.close)

    def _try(self, name: str, work: Callable[[], None]) -> None:
        """Nobody's training ends because somebody's server does."""
        try:
            work()
        except Exception as error:
            del self._trackers[name]
            say(f"{name} takes no more figures ({str(error)[:200]}); metrics.jsonl has them all")


def _started(name: str, run: RunFolder, config: RunConfig, *, identity: str | None) -> Tracker:
    try:
        return TRACKERS[name](run, config, identity=identity)
    except ImportError:
        raise MissingPackage(
            f"`track={name}` needs a package; install it with: pip install 'transformer-xl[{name}]'"
        ) from None
    except Exception as error:  # theirs are of many kinds
        raise ConfigError(
            f"`track={name}`: it could not be started ({str(error)[:300]}); look at its settings"
        ) from error


def _identities(run: RunFolder) -> dict[str, str]:
    """What an earlier start wrote down; anything else in that file is left out."""
    try:
        with open_plain(run.inside("tracking.json"), "r") as file:
            found: Any = json.loads(file.read(4096))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    pairs = found.items() if isinstance(found, dict) else ()
    return {
        name: value
        for name, value in pairs
        if name in TRACKERS and isinstance(value, str) and IDENTITY.fullmatch(value)
    }
