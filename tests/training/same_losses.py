"""Whether another version of the sources learns the same, bit for bit: `same_losses.py SRC OTHER_SRC` trains 50 steps of each case with both, and compares
every loss, every norm and the bytes of the last checkpoint. For changes that must change nothing on a processor."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

STEPS = 50
CASES = {
    "tiny-byte": {},
    "tiny-byte, adam, dropout, two micro-batches, averages": {"accumulation": 2, "optimiser": "adam", "average": "ema"},
    "tiny-word": {},
    "tiny-word, tails of their own": {"div_val": 2, "tie_embeddings": False},
    "bytes": {"segment": 16, "lanes": 2},
    "tiny-lstm": {},
}
"""The first word is the preset; what follows is changed in it."""


def main() -> int:
    from transformer_xl.cli import main as txl

    sources = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text(Path(json.__file__).with_name("decoder.py").read_text())
        for tokenizer in ("byte", "word"):
            words = ["prepare", str(folder / "text.txt"), "--tokenizer", tokenizer, "--out", str(folder / tokenizer)]
            assert txl(words) == 0
        different = 0
        for case in CASES:
            mine, theirs = (told(case, folder, source) for source in sources)
            different += mine != theirs
            print(f"{case}: {'the same' if mine == theirs else 'DIFFERENT'}, {mine}", flush=True)
    return different


def told(case: str, folder: Path, source: str) -> str:
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, __file__, "one", case, str(folder)]
    return subprocess.run(words, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def one(case: str, data: Path) -> str:
    """A digest of all losses and norms, and of what was saved."""
    from transformer_xl.checkpoint import RunFolder
    from transformer_xl.data.store import open_store
    from transformer_xl.presets import find_preset
    from transformer_xl.training import train
    from transformer_xl.training.recording import read_metrics

    preset, changes = find_preset(case.split(",")[0]).run, CASES[case]
    store = open_store(data / ("byte" if "byte" in case else "word"))
    size = store.manifest.vocabulary_size
    model = {"vocabulary": size, **({"cutoffs": (20, 60)} if "byte" not in case else {})}
    model |= {"dropout": 0.2} if "dropout" in case else {}
    model |= {name: value for name, value in changes.items() if name in ("div_val", "tie_embeddings")}
    training = {"steps": STEPS, "log_every": 1, "save_every": 0, "validate_every": 25, "validation_tokens": 500}
    training |= {"lanes": 4, **{name: value for name, value in changes.items() if name not in model}}
    run = replace(preset, model=replace(preset.model, **model), training=replace(preset.training, **training))
    with tempfile.TemporaryDirectory() as folder:
        train(run, store=store, folder=Path(folder) / "run", device="cpu")
        lines = list(read_metrics(Path(folder) / "run" / "metrics.jsonl"))
        told = [(line["step"], line["loss_nats"], line.get("gradient_norm")) for line in lines]
        checkpoint = RunFolder(Path(folder) / "run").checkpoint_at(STEPS)
        digest = hashlib.sha256(json.dumps(told).encode())
        for name in ("model.safetensors", "training.safetensors"):
            digest.update((checkpoint / name).read_bytes())
    assert len({line["step"] for line in lines if line["kind"] == "train"}) == STEPS
    return f"{STEPS} steps, last loss {told[-2][1]:.6f}, {digest.hexdigest()[:16]}"


if __name__ == "__main__":
    if sys.argv[1] == "one":
        print(one(sys.argv[2], Path(sys.argv[3])))
    else:
        sys.exit(main())
