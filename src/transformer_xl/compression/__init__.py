"""Text <-> fewer bytes, by what a model expects and what was counted so far; the same bytes on every machine."""

from transformer_xl.compression.streams import Level, MakeCoder, compress_stream, decompress_stream, survey
from transformer_xl.compression.text_coder import TextCoder

__all__ = ["Level", "MakeCoder", "TextCoder", "compress_stream", "decompress_stream", "survey"]
