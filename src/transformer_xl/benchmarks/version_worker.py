"""A process that works with one version of this software, through nothing but what every version has: the library and the command line's functions.

Started by `versions.py` with that version's source on its path; answers one JSON line for each it is given.
"""

import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import transformer_xl as txl


class Version:
    def make(self, run: str, data: str, layers: int) -> dict[str, Any]:
        """The demo's model after a few steps."""
        from transformer_xl.data.store import open_store
        from transformer_xl.presets import find_preset
        from transformer_xl.training import train

        config = find_preset("demo").run
        training = replace(config.training, steps=3, validate_every=0)
        model = replace(config.model, n_layer=layers)
        train(replace(config, model=model, training=training), store=open_store(Path(data)), folder=Path(run))
        return {}

    def open(self, run: str, data: str) -> dict[str, Any]:
        """Texts and losses are told, so that versions can be compared before they are timed."""
        self.loaded, self.data = txl.load(run), data
        self.text = (Path(data).parent / "text.txt").read_bytes()[: 1 << 15]
        texts = [written.text for written in self.loaded.generate_many(["def ", "x"], tokens=60)]
        return {"texts": texts, "loss_nats": self.loaded.evaluate(data=data, split="valid", tokens=2000).loss_nats}

    def run(self, mode: str, steps: int) -> dict[str, Any]:
        started_at, processor_at = time.perf_counter(), time.process_time()
        tokens = getattr(self, f"_{mode}")(steps)
        return {
            "tokens": tokens,
            "seconds": time.perf_counter() - started_at,
            "cpu_seconds": time.process_time() - processor_at,
            "memory_mb": 0.0,
            "peak_memory_mb": 0.0,
        }

    def _writing(self, steps: int) -> int:
        self.loaded.generate_many(["def "], tokens=steps)
        return steps

    def _writing_16(self, steps: int) -> int:
        self.loaded.generate_many(["def "] * 16, tokens=steps)
        return 16 * steps

    def _evaluation(self, steps: int) -> int:
        return int(self.loaded.evaluate(data=self.data, split="train", tokens=steps).tokens)

    def _training(self, steps: int) -> int:
        from transformer_xl.data.store import open_store
        from transformer_xl.training import train

        config = self.loaded.config
        training = replace(config.training, steps=steps, validate_every=0, log_every=steps)
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            train(replace(config, training=training), store=open_store(Path(self.data)), folder=run)
        return steps * training.lanes * training.segment


def main() -> None:
    torch.set_num_threads(int(sys.argv[2]))
    answers, sys.stdout = sys.stdout, sys.stderr
    version = Version()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(getattr(version, request.pop("do"))(**request)), file=answers, flush=True)


if __name__ == "__main__":
    main()
