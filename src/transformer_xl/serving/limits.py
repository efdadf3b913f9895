"""What one server gives, and to how many. Everything past these is refused before a model runs."""

from dataclasses import dataclass

from transformer_xl.config.fields import not_negative, positive
from transformer_xl.errors import ConfigError

PROMPT_TOKENS = 65_536
"""Of all prompts of a request together, and of a text to be scored, fed or looked at."""
SCORED_TEXTS = 1024
"""Of one request; they have the tokens of one text, together."""
NEW_TOKENS = 16_384
CHOICES = 64
LIKELIEST = 20
"""So many of the likeliest tokens are told at most."""
STOPS = 16
STOP_CHARACTERS = 256
BODY_BYTES = 512 * 1024
HEADERS = 100
HEADER_BYTES = 16 * 1024
"""With what is asked for."""
TARGET_BYTES = 8 * 1024
"""Of what is asked for: path and query."""

# What an answer may hold, and how it is made: see docs/serving.md for the memory that these leave the process.
FIGURES = 1 << 20
"""Of one answer: (new tokens, and the prompt's where it is told too) x (1 + logprobs) x texts."""
ANSWER_BYTES = 128 * 1024 * 1024
"""Of one answer, were each of its tokens the longest that the model has."""
PIECE_BYTES = 64 * 1024
"""So much of an answer is made and handed to the system at a time; the next when that is gone."""
BODY_CHUNKS = 256
"""Of a body that comes without its length: in smaller crumbs it costs more to put together than to read."""
UNSENT_BYTES = 128 * 1024
"""That the system holds for a client that does not read."""
RECEIVED_BYTES = 16 * 1024
"""Of a connection, read at a time."""
RESERVED_FILES = 128
"""Beside connections: the model's files, saved sessions, and connections on their way in or out."""


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
    learning: int = 8
    """Of these, the sessions that learn while they read. One more is answered 409."""
    learning_bytes: int = 1 << 30
    """That they may take together at the worst moment; as much as there is memory for beside texts and sessions, where that is known."""
    saved: int = 256
    """Sessions on disk, and what they may take there together. One more is answered 409."""
    saved_bytes: int = 8 << 30
    header_seconds: float = 10.0
    """From the first byte of a request, or from the connection, to the end of its headers."""
    body_seconds: float = 10.0
    keep_alive_seconds: int = 75
    write_seconds: float = 10.0
    """A client that takes longer over one piece of its answer is cut off."""
    crowded_seconds: float = 1.0
    """The same while the server is full: somebody else waits for that place."""
    connections: int = 512
    """One more ends another: the oldest that has sent no request yet, or else one that waits for nothing of ours."""
    figures: int = 8 * FIGURES
    """Of all answers under way. One more is answered 429."""

    def __post_init__(self) -> None:
        positive(self, "serve", "admitted", "sessions", "saved", "saved_bytes", "connections", "figures")
        not_negative(self, "serve", "learning", "learning_bytes")
        if not self.deadline_seconds > 0:
            raise ConfigError(f"serve.deadline_seconds: {self.deadline_seconds} is no time; it must be above 0")
