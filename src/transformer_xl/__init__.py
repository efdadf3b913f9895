"""Transformer-XL: language models whose memory reaches beyond any fixed context.

    import transformer_xl as txl

    run = txl.fit("logs/", minutes=10)                  # your own text in one call: looks, chooses, prepares, trains

    store = txl.prepare("logs/")                        # or step by step: your own text, or a known corpus by name, as tokens at rest
    run = txl.train(store, minutes=10)                  # called again, it goes on where it stopped
    run.metrics.to_pandas()
    loaded = run.load()                                 # or txl.load("runs/logs"); txl.load() is the model in the box
    loaded.generate("ERROR ", tokens=100, temperature=0.8)
    loaded.score("some text")
    loaded.evaluate(memory=512)
    loaded.sweep([0, 128, 512]).plot()
    loaded.attention("some text").plot(layer=1, head=2)
    txl.decompress(txl.compress(b"some text", model=loaded), model=loaded)

    help(txl.fit), help(txl.prepare), help(txl.train), help(txl.Run), help(txl.load), help(txl.Loaded)

docs/python.md walks through them. Importing this does nothing but make names known; torch comes with the first one that needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformer_xl.compressing import compress, decompress
    from transformer_xl.config import EvaluationConfig, ModelConfig, RecurrentConfig, RunConfig, TrainingConfig
    from transformer_xl.data.store import Store, open_store
    from transformer_xl.errors import TransformerXLError
    from transformer_xl.fitting import fit
    from transformer_xl.library import Loaded, from_pretrained, load
    from transformer_xl.model import Memory, Output, TransformerXL
    from transformer_xl.presets import find_preset
    from transformer_xl.running import Run, prepare, train

    __version__: str

_HOMES = {
    **dict.fromkeys(("compress", "decompress"), "compressing"),
    **dict.fromkeys(("EvaluationConfig", "ModelConfig", "RecurrentConfig", "RunConfig", "TrainingConfig"), "config"),
    **dict.fromkeys(("Store", "open_store"), "data.store"),
    "TransformerXLError": "errors",
    "fit": "fitting",
    **dict.fromkeys(("Loaded", "from_pretrained", "load"), "library"),
    **dict.fromkeys(("Memory", "Output", "TransformerXL"), "model"),
    "find_preset": "presets",
    **dict.fromkeys(("Run", "prepare", "train"), "running"),
}

__all__ = [
    "EvaluationConfig",
    "Loaded",
    "Memory",
    "ModelConfig",
    "Output",
    "RecurrentConfig",
    "Run",
    "RunConfig",
    "Store",
    "TrainingConfig",
    "TransformerXL",
    "TransformerXLError",
    "compress",
    "decompress",
    "find_preset",
    "fit",
    "from_pretrained",
    "load",
    "open_store",
    "prepare",
    "train",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("transformer-xl")
    if name in _HOMES:
        return getattr(import_module(f"transformer_xl.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'transformer_xl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__", "__doc__"]
