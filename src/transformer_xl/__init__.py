"""Transformer-XL: language models whose memory reaches beyond any fixed context."""

from importlib.metadata import version

__version__ = version("transformer-xl")
