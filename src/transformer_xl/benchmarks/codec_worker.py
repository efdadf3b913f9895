"""Other people's compressors, in a process that has them: a text in, how many bytes it becomes and how long that takes. Imports nothing of ours.

What was made small is made large again and compared, before anything is said about it. What a text adds behind another (primed) is measured by
compressing the other once, and going on from there in a copy of the process for each text.
"""

import json
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Codec = tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]
Stream = tuple[Callable[[bytes], bytes], Callable[[], bytes]]
"""What takes text, again and again, and what ends it."""
DICTIONARY_BYTES, SAMPLE_BYTES = 112_640, 2048
"""What the zstd command takes unless told, and how the text to train on is cut."""
PPMD = 16, 2 << 30
"""Its order and memory: enough for a hundred megabytes of text."""


def xz(train: bytes) -> Codec:
    return lambda data: lzma.compress(data, preset=9 | lzma.PRESET_EXTREME), lzma.decompress


def xz_stream() -> Stream:
    compressor = lzma.LZMACompressor(preset=9 | lzma.PRESET_EXTREME)
    return compressor.compress, compressor.flush


def zstd(train: bytes) -> Codec:
    module, _ = _zstd()
    options = _zstd_options()
    more = {"options": {module.DecompressionParameter.window_log_max: 27}}
    return lambda data: module.compress(data, options=options), lambda data: module.decompress(data, **more)


def _zstd_options() -> dict[Any, int]:
    _, parameter = _zstd()
    return {parameter.compression_level: 19, parameter.window_log: 27}


def zstd_stream() -> Stream:
    module, _ = _zstd()
    compressor = module.ZstdCompressor(options=_zstd_options())
    return compressor.compress, compressor.flush


def zstd_with_dictionary(train: bytes) -> Codec:
    module, parameter = _zstd()
    samples = [train[start : start + SAMPLE_BYTES] for start in range(0, len(train), SAMPLE_BYTES)]
    words = module.train_dict(samples, min(DICTIONARY_BYTES, len(train) // 10))
    options = {parameter.compression_level: 19}
    return (
        lambda data: module.compress(data, options=options, zstd_dict=words),
        lambda data: module.decompress(data, zstd_dict=words),
    )


def _zstd() -> tuple[Any, Any]:
    if sys.version_info >= (3, 14):
        from compression import zstd as module
    else:
        from backports import zstd as module
    return module, module.CompressionParameter


def brotli(train: bytes) -> Codec:
    import brotli as module

    return lambda data: module.compress(data, quality=11, lgwin=24), module.decompress


def brotli_stream() -> Stream:
    import brotli as module

    compressor = module.Compressor(quality=11, lgwin=24)
    # Flushed, so that a text is coded by itself behind the other. Else the end of both is cut into blocks anew, and a short text seems to cost nothing.
    return lambda data: compressor.process(data) + compressor.flush(), compressor.finish


def bzip3(train: bytes) -> Codec:
    import bz3 as module

    def compress(data: bytes) -> bytes:
        made: bytes = module.compress(data, block_size=max(65 * 1024, len(data)))
        return made

    return compress, module.decompress


def ppmd(train: bytes) -> Codec:
    import pyppmd as module

    def decompress(data: bytes) -> bytes:
        made: bytes = module.Ppmd8Decoder(*PPMD).decode(data)
        return made

    def compress(data: bytes) -> bytes:
        encode, flush = ppmd_stream()
        return encode(data) + flush()

    return compress, decompress


def ppmd_stream() -> Stream:
    import pyppmd as module

    encoder = module.Ppmd8Encoder(*PPMD)
    return encoder.encode, encoder.flush


def zpaq(train: bytes) -> Codec:
    program = shutil.which("zpaq")
    if program is None:
        raise ModuleNotFoundError("there is no zpaq here; Debian has a package of this name")

    def compress(data: bytes) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "text").write_bytes(data)
            _run(folder, program, "a", "made.zpaq", "text", "-m5", "-t1")
            return Path(folder, "made.zpaq").read_bytes()

    def decompress(data: bytes) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "made.zpaq").write_bytes(data)
            _run(folder, program, "x", "made.zpaq")
            return Path(folder, "text").read_bytes()

    return compress, decompress


def _run(folder: str, *command: str) -> None:
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


CODECS: dict[str, Callable[[bytes], Codec]] = {
    "xz -9e": xz,
    "zstd -19": zstd,
    "zstd -19 with a dictionary": zstd_with_dictionary,
    "brotli 11": brotli,
    "bzip3": bzip3,
    "PPMd": ppmd,
    "zpaq -m5": zpaq,
}


STREAMS: dict[str, Callable[[], Stream]] = {
    "xz -9e": xz_stream,
    "zstd -19": zstd_stream,
    "brotli 11": brotli_stream,
    "PPMd": ppmd_stream,
}
"""Those that take a text in parts. bzip3 sorts all of it, and zpaq is a program: they do everything again for each text."""


def missing(codec: str) -> dict[str, Any]:
    """Why it is not here, if it is not."""
    try:
        compress, decompress = CODECS[codec](b"some text. " * 20_000)
        assert decompress(compress(b"some text")) == b"some text"
    except ImportError as error:
        return {"missing": str(error)}
    return {"missing": None}


def measure(codec: str, train: str, texts: list[str], primed: bool) -> dict[str, Any]:
    """Bytes and seconds of each text. `primed`: of what it adds behind `train`."""
    before = Path(train).read_bytes()
    if primed and codec in STREAMS:
        return {"texts": [{"bytes": added} for added in _added(STREAMS[codec](), before, texts)]}
    compress, decompress = CODECS[codec](before)
    base = len(compress(before)) if primed else 0
    found = []
    for path in texts:
        text = Path(path).read_bytes()
        data = before + text if primed else text
        started_at = time.perf_counter()
        made = compress(data)
        between = time.perf_counter()
        if decompress(made) != data:
            raise SystemExit(f"{codec} does not give back what it was given")
        seconds = {"compress_seconds": between - started_at, "decompress_seconds": time.perf_counter() - between}
        found.append({"bytes": len(made) - base, **({} if primed else seconds)})
    return {"texts": found}


def _added(stream: Stream, before: bytes, texts: list[str]) -> list[int]:
    """By each text, behind the same beginning."""
    take, end = stream
    start = len(take(before))
    base = _in_a_copy(lambda: start + len(end()))

    def added(path: str) -> int:
        return _in_a_copy(lambda: start + len(take(Path(path).read_bytes())) + len(end())) - base

    return [added(path) for path in texts]


def _in_a_copy(count: Callable[[], int]) -> int:
    """What a copy of this process counts; this one stays as it is."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, str(count()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as told:
        found = told.read()
    os.waitpid(child, 0)
    if not found:
        raise SystemExit("a copy of the process ended before it had counted")
    return int(found)


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(globals()[request.pop("do")](**request)), file=answers, flush=True)


if __name__ == "__main__":
    main()
