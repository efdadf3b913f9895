"""The checks in their order, one after the other: what each found, and a report of them all."""

import math
import platform
import shutil
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import transformer_xl
from transformer_xl import native
from transformer_xl.benchmarks.measuring import processor_name
from transformer_xl.console import hushed, progress
from transformer_xl.doctor import dropout, kernels, reading, several, speed, training
from transformer_xl.doctor.setting import ISSUE, Check, Result, Setting
from transformer_xl.presets import PRESETS

PACKAGES = ("torch", "triton", "numpy", "safetensors", "fastapi", "uvicorn")
SOURCE = Path(transformer_xl.__file__).parent


def machine(setting: Setting) -> Result:
    """What there is, and whether this torch can use it."""
    facts = facts_of(setting.device)
    if torch.version.cuda is None and shutil.which("nvidia-smi") is not None:
        return Result(
            status="failed",
            figure=f"torch {torch.__version__}",
            sentence="there is an NVIDIA driver here, and this torch was built without CUDA",
            remedy="install torch for CUDA; see https://pytorch.org/get-started/locally",
            details=facts,
        )
    if setting.device.type == "cuda":
        # Code for 8.0 runs on 8.6 and 8.9; none runs on a card of another first number.
        major, minor = torch.cuda.get_device_capability(setting.device)
        built = torch.cuda.get_arch_list()
        if built and not any(
            arch.removesuffix("a").endswith(f"_{major}{minor}") or arch.endswith(f"_{major}0") for arch in built
        ):
            return Result(
                status="failed",
                figure=f"{facts['card']}, {major}.{minor}",
                sentence=f"this torch was built for {', '.join(built)}, and the card is of compute capability {major}.{minor}",
                remedy="install a torch that was built for this card",
                details=facts,
            )
    told = facts.get("card", facts["processor"])
    return Result(status="ok", figure=f"torch {torch.__version__}, {told}", details=facts)


CHECKS: Mapping[str, Check] = {
    "machine": machine,
    "paths": kernels.paths,
    "formula": kernels.formula,
    "dropout": dropout.masks,
    "determinism": kernels.determinism,
    "one device": reading.one_device,
    "engine": reading.engine,
    "texts": reading.texts,
    "serving": reading.serving,
    "steps": training.steps,
    "resuming": training.resuming,
    "waits": training.waits,
    "speed": speed.training_speed,
    "memory": speed.memory,
    "several": several.together,
}
"""By the names that the table and the JSON have."""


@dataclass(frozen=True, kw_only=True)
class Report:
    device: str
    seconds: float
    results: list[Result]

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if result.status == "failed"]

    def as_json(self) -> dict[str, Any]:
        told = {"txl": transformer_xl.__version__, "device": self.device, "ok": not self.failed}
        return {
            **told,
            "seconds": round(self.seconds, 1),
            "results": [plain(asdict(result)) for result in self.results],
        }


def plain(value: Any) -> Any:
    """JSON has no word for what is no number."""
    if isinstance(value, dict):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def examine(
    device: torch.device, *, checks: Sequence[str] = tuple(CHECKS), presets: Sequence[str] | None = None
) -> Report:
    """All of them unless told: `checks` by name, and whose shapes they look at."""
    names = tuple(preset.name for preset in PRESETS) if presets is None else tuple(presets)
    began_at, results = time.monotonic(), list[Result]()
    with (
        tempfile.TemporaryDirectory(prefix="txl-doctor-", ignore_cleanup_errors=True) as folder,
        progress("examining", total=len(checks), unit="checks") as advance,
    ):
        setting = Setting(device=device, presets=names, folder=Path(folder))
        for name in checks:
            advance(0, note=name)
            results.append(checked(name, setting))
            advance(1, note=name)
    return Report(device=str(device), seconds=time.monotonic() - began_at, results=results)


def checked(name: str, setting: Setting) -> Result:
    """A check that breaks is one that failed: whatever a driver, a compiler or we ourselves may raise, the others are still looked at."""
    began_at = time.monotonic()
    with hushed() as said:
        try:
            result = CHECKS[name](setting)
        except Exception as error:
            lines = str(error).strip().splitlines()
            result = Result(
                status="failed",
                figure=type(error).__name__,
                sentence=f"{type(error).__name__} at {place_of(error)}: {lines[0] if lines else 'no more was said'}",
                remedy=ISSUE,
                details={"traceback": traceback.format_exc().splitlines()[-30:]},
            )
    return replace(result, name=name, said=tuple(dict.fromkeys(said)), seconds=round(time.monotonic() - began_at, 2))


def place_of(error: Exception) -> str:
    """The innermost line of ours that is no check."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(SOURCE)
    ]
    ours = [frame for frame in frames if Path(frame.filename).parent != Path(__file__).parent] or frames
    last = ours[-1]
    return f"{Path(last.filename).relative_to(SOURCE).as_posix()}:{last.lineno}"


def facts_of(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "transformer_xl": transformer_xl.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "kernels for processors": native.library() is not None,
        **{name: found for name in PACKAGES if (found := version_of(name)) is not None},
        "cuda": torch.version.cuda,
    }
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        facts |= {
            "card": about.name,
            "capability": f"{about.major}.{about.minor}",
            "card memory": about.total_memory,
            "cards": torch.cuda.device_count(),
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        }
    return facts


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
