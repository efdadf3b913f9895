"""What one server gives, and to how many. Everything past these is refused before a model runs."""

from dataclasses import dataclass

from transformer_xl.config.fields import positive
from transformer_xl.errors import ConfigError
from transformer_xl.native import FEW

LANES = FEW
"""Texts that one model writes side by side: so many vectors the kernels multiply with the same bits for each, whatever the others are."""
PROMPT_TOKENS = 65_536
"""Of all prompts of a request together, and of a text to be scored, fed or looked at."""
NEW_TOKENS = 16_384
CHOICES = 64
LIKELIEST = 20
"""So many of the likeliest tokens are told at most."""
STOPS = 16
STOP_CHARACTERS = 256
BODY_BYTES = 512 * 1024
HEADERS = 100
HEADER_BYTES = 16 * 1024


@dataclass(frozen=True, kw_only=True)
class Limits:
    admitted: int = 64
    """Texts being written, read or looked at. One more is answered 429."""
    deadline_seconds: float = 120.0
    """A request that takes longer is answered 504."""
    patience_seconds: float = 20.0
    """A model that computes this long at one piece of work is given up, and another thread goes on with everybody else's."""
    drain_seconds: float = 5.0
    """After SIGTERM, what is under way may take so long."""
    sessions: int = 32
    """In memory. One more is answered 409."""
    saved: int = 256
    """Sessions on disk, and what they may take there together. One more is answered 409."""
    saved_bytes: int = 8 << 30
    header_seconds: float = 10.0
    """From the first byte of a request, or from the connection, to the end of its headers."""
    body_seconds: float = 10.0
    keep_alive_seconds: int = 75

    def __post_init__(self) -> None:
        positive(self, "serve", "admitted", "sessions", "saved", "saved_bytes")
        if not self.deadline_seconds > 0:
            raise ConfigError(f"serve.deadline_seconds: {self.deadline_seconds} is no time; it must be above 0")
