"""What `import transformer_xl as txl` compresses with: the model in the box, or a run, by its folder or loaded. As `txl compress` and `txl decompress`,
for programs.

archive = txl.compress(b"some text", model="runs/notes")
txl.decompress(archive, model="runs/notes")
"""

from io import BytesIO
from pathlib import Path

from transformer_xl.arguments import checked
from transformer_xl.compression import Level, MakeCoder, TextCoder, compress_stream, decompress_stream, survey
from transformer_xl.console import progress
from transformer_xl.library import Loaded, load


@checked
def compress(data: bytes, *, model: Path | str | Loaded | None = None, level: Level = "fast") -> bytes:
    """Fewer bytes, from which `decompress` makes these again, on any machine, with the same model: that in the box, or a run, by its folder or loaded.
    At most 64 more, where nothing helps."""
    out = BytesIO()
    with progress("compressing", total=len(data), unit="bytes") as advance:
        compress_stream(BytesIO(data), out, coder_of(model), level=level, advance=advance, again=True)
    return out.getvalue()


@checked
def decompress(data: bytes, *, model: Path | str | Loaded | None = None) -> bytes:
    """What `compress` was given. Bytes that are damaged, cut off or made with another model are refused."""
    name, out = "the archive", BytesIO()
    with progress("decompressing", total=survey(BytesIO(data), name=name), unit="bytes") as advance:
        decompress_stream(BytesIO(data), out, coder_of(model), name=name, advance=advance, hold=False)
    return out.getvalue()


def coder_of(model: Path | str | Loaded | None) -> MakeCoder:
    """The one place that says which model is taken where none is named: the one in the box."""
    loaded = model if isinstance(model, Loaded) else load(model, device="cpu")
    return lambda lanes: TextCoder(loaded.model, loaded.tokenizer, lanes=lanes)
