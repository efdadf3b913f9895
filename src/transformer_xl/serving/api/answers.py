"""What the server answers, for OpenAPI."""

from typing import Any, Literal

from pydantic import BaseModel


class Problem(BaseModel):
    message: str
    type: str
    param: str | None
    code: int


class Error(BaseModel):
    error: Problem


class Health(BaseModel):
    status: Literal["ok", "failing", "draining"]
    models: dict[str, Literal["ok", "stuck", "dead", "not answering"]] | None = None


class MemoryUse(BaseModel):
    used: int
    length: int


class Adaptation(BaseModel):
    by: Literal["gradient", "cache", "both"]
    rate: float
    rule: Literal["sgd", "rms"]
    decay: float
    learns: Literal["all", "layers", "attention", "feed_forward", "adapters"]
    rank: int
    segment: int
    cache_lambda: float
    cache_theta: float
    cache_size: int
    compare: bool
    in_words: str
    bytes: int


class Session(BaseModel):
    id: str
    object: Literal["session"]
    model: str
    tokens_read: int
    memory: MemoryUse
    created: int
    adapt: Adaptation | None = None


class Sessions(BaseModel):
    data: list[Session]


class Fed(Session):
    fed: int
    logprobs: list[float | None] | None = None
    static_logprobs: list[float | None] | None = None


class Saved(BaseModel):
    name: str
    bytes: int


class SavedNames(BaseModel):
    data: list[str]


class Deleted(BaseModel):
    id: str
    deleted: bool


class DeletedName(BaseModel):
    name: str
    deleted: bool


class ScoredToken(BaseModel):
    id: int
    text: str
    start: int
    end: int
    logprob: float | None
    static_logprob: float | None = None


class ScoredText(BaseModel):
    tokens: list[ScoredToken]
    loss_nats: float | None
    bits: float
    static_loss_nats: float | None = None
    static_bits: float | None = None
    memory: MemoryUse


class Scores(ScoredText):
    model: str


class ManyScores(BaseModel):
    """In the order of the texts."""

    model: str
    data: list[ScoredText]


class Looks(BaseModel):
    model: str
    position: int
    layer: int
    head: int
    first: int
    weights: list[float]
    terms: dict[str, list[float]]
    marked: list[bool]
    segment_start: int


class Logprobs(BaseModel):
    tokens: list[str]
    token_ids: list[int]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class Choice(BaseModel):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"] | None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Text(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None


class Models(BaseModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
