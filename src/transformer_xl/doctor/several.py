"""Whether processes that train together learn what one learns: by real processes, a card each where there are several, else two on the processor."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from transformer_xl.checkpoint import RunFolder
from transformer_xl.doctor.setting import SMALL, Result, Setting, differences, worst
from transformer_xl.training.loop import train

STEPS = 8
WITHIN = {"cpu": 1e-5, "cuda": 1e-2}
"""Of each weight's norm; cards may round products to TF32."""
SECONDS = 150


def together(setting: Setting) -> Result:
    cards = torch.cuda.device_count() if setting.device.type == "cuda" else 0
    count = next(ranks for ranks in (8, 4, 2, 1) if ranks <= cards or ranks == 1) if cards > 1 else 2
    device = "cuda" if cards > 1 else "cpu"
    by = f"{count} cards by nccl" if cards > 1 else f"{count} processes on the processor by gloo"
    # Plain steps: Adam would make whole ones of the smallest differences, and clipping would hide a gradient that is a multiple of what it should be.
    training = replace(SMALL.training, steps=STEPS, optimiser="sgd", learning_rate=0.1, clip=0.0)
    config = replace(SMALL, training=training)
    alone, beside, file = (setting.folder / name for name in ("alone", "together", "config.json"))
    file.write_text(json.dumps(asdict(config)), encoding="utf-8")
    train(config, store=setting.store, folder=alone, device=device)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    words = ["train", str(file), "--data", str(setting.store.folder), "--run", str(beside), "--device", device]
    said = setting.folder / "together.txt"
    if reason := _ran([*launch, "-m", "--", "transformer_xl", *words], said):
        return Result(
            status="failed",
            figure=by,
            sentence=f"{by} did not train: {reason}",
            remedy="let processes of this machine reach each other on its loopback address (a firewall, or GLOO_SOCKET_IFNAME=lo); for cards see NCCL_DEBUG=INFO",
            details={"last lines": said.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]},
        )
    one, other = (load_file(RunFolder(run).checkpoint_at(STEPS) / "model.safetensors") for run in (alone, beside))
    part, share = worst(differences(other, one))
    details = {"ranks": count, "device": device, "largest share apart": share, "in": part}
    if not share <= WITHIN[device]:
        return Result(
            status="failed",
            figure=f"{share:.1e} apart",
            sentence=f"{by} learn something else than one: after {STEPS} steps {part} is {share:.1e} apart",
            remedy="train with one process, and paste the JSON below into an issue",
            details=details,
        )
    return Result(status="ok", figure=f"{by}: weights within {share:.0e} of one", details=details)


def _ran(command: list[str], said: Path) -> str | None:
    """What was wrong, if anything was."""
    package = str(Path(__file__).parents[2])
    paths = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with said.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            return f"nothing came of it in {SECONDS} seconds"
        finally:
            if process.poll() is None:  # torchrun ends its processes with itself
                process.terminate()
                process.wait()
    lines = said.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    told = next(
        (line for line in lines if line.startswith("txl: ") or "Error" in line), lines[-1] if lines else "silence"
    )
    return None if code == 0 else f"exit code {code}, {told.strip()}"
