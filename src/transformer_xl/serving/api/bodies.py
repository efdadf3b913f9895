"""What a request may say, field by field, and how it is read: checked before any model hears of it, and shown in OpenAPI."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator
from starlette.exceptions import HTTPException

from transformer_xl.config.adaptation import MOST_CACHED
from transformer_xl.inference.reader import CHUNK
from transformer_xl.serving.api.refusals import Refusal
from transformer_xl.serving.http.aside import SMALL, Gone, aside_unless_gone, busy
from transformer_xl.serving.limits import (
    CHOICES,
    FIGURES,
    LIKELIEST,
    NEW_TOKENS,
    PROMPT_TOKENS,
    SCORED_TEXTS,
    STOP_CHARACTERS,
    STOPS,
)

NOT_KNOWN = "has a field that is not known; GET /openapi.json lists those that are"
DEEPEST = 20
SESSION_NAME = "^[A-Za-z0-9_-]{1,64}$"
REPLICA = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
"""A label of DNS, as a pod has one."""
SESSION_ID = f"^({REPLICA}-)?[0-9a-f]{{32}}$"


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("a text holds no NUL characters; give byte 0 as a token")
    return text


Text = Annotated[str, AfterValidator(_without_nul), Field(json_schema_extra={"pattern": "^[^\\x00]*$"})]
Token = Annotated[int, Field(ge=0, lt=1 << 31)]
# The first that is wrong is told: a list of errors would be longer than what was sent.
Tokens = Annotated[list[Token], Field(min_length=1, max_length=PROMPT_TOKENS, fail_fast=True)]
Stop = Annotated[Text, Field(min_length=1, max_length=STOP_CHARACTERS)]
ModelName = Annotated[str, Field(min_length=1, max_length=256, description="A name that GET /v1/models lists.")]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(Body):
    include_usage: bool = False


class Generation(Body):
    """How a text is written; what OpenAI's API has and this server has not may be sent with the value that changes nothing."""

    max_tokens: int | None = Field(16, ge=0, le=NEW_TOKENS)
    temperature: float | None = Field(1.0, ge=0.0, le=2.0)
    top_p: float | None = Field(1.0, gt=0.0, le=1.0)
    top_k: int | None = Field(0, ge=0, lt=1 << 31, description="Only the k likeliest tokens. 0: all.")
    seed: int | None = Field(None, ge=0, description="The same seed gives the same text. Choice i has seed + i.")
    stop: Stop | Annotated[list[Stop], Field(max_length=STOPS, fail_fast=True)] | None = None
    logprobs: int | None = Field(
        None,
        ge=0,
        le=LIKELIEST,
        description=f"(max_tokens, and the prompt's tokens with echo) x (1 + logprobs) x n: at most {FIGURES:,}.",
    )
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=256, description="Not looked at.")
    presence_penalty: float | None = Field(0.0, ge=0.0, le=0.0)
    frequency_penalty: float | None = Field(0.0, ge=0.0, le=0.0)
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    best_of: int | None = Field(None, ge=1, le=1)
    suffix: None = None


def _kind_of_prompt(prompt: Any) -> str:
    """By its beginning, so that it is read as one kind only."""
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else None
    return "lists" if isinstance(first, list) else "tokens" if isinstance(first, int) else "texts"


Several = Field(min_length=1, max_length=CHOICES, fail_fast=True)
Prompt = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[list[Text], Several, Tag("texts")]
    | Annotated[Tokens, Tag("tokens")]
    | Annotated[list[Tokens], Several, Tag("lists")],
    Discriminator(_kind_of_prompt),
]


class Completion(Generation):
    model: ModelName
    prompt: Prompt = ""
    n: int | None = Field(1, ge=1, le=CHOICES)
    echo: bool | None = False
    memory: Literal["on", "off"] = Field(
        "on", description="off: the model forgets at every boundary of a segment, as one without recurrence does."
    )

    @model_validator(mode="after")
    def something_to_do(self) -> "Completion":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens 0 gives nothing without echo")
        return self


class SessionGeneration(Generation):
    max_tokens: int | None = Field(16, ge=1, le=NEW_TOKENS)


EITHER = ConfigDict(json_schema_extra={"oneOf": [{"required": ["text"]}, {"required": ["tokens"]}]})


class Given(Body):
    """A text, or its tokens."""

    model_config = EITHER

    text: Text | None = None
    tokens: Tokens | None = None

    @model_validator(mode="after")
    def one_of_both(self) -> "Given":
        if (self.text is None) == (self.tokens is None):
            raise ValueError("give either text or tokens")
        return self


class Feed(Given):
    logprobs: bool = Field(False, description="Also tell the log-probability of each token.")


class SessionScore(Given):
    pass


ManyScored = Field(min_length=1, max_length=SCORED_TEXTS, fail_fast=True)


class Score(Body):
    """A text or its tokens, or a list of either, each scored for itself."""

    model_config = EITHER

    model: ModelName
    memory: Literal["on", "off"] = "on"
    text: (
        Annotated[
            Annotated[Text, Tag("text")] | Annotated[list[Text], ManyScored, Tag("texts")],
            Discriminator(lambda value: "texts" if isinstance(value, list) else "text"),
        ]
        | None
    ) = None
    tokens: (
        Annotated[
            Annotated[Tokens, Tag("tokens")] | Annotated[list[Tokens], ManyScored, Tag("lists")],
            Discriminator(lambda value: "lists" if _kind_of_prompt(value) == "lists" else "tokens"),
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def one_of_both(self) -> "Score":
        if (self.text is None) == (self.tokens is None):
            raise ValueError("give either text or tokens")
        return self

    @property
    def many(self) -> bool:
        return isinstance(self.text, list) or bool(self.tokens and isinstance(self.tokens[0], list))

    def each(self) -> list[Given]:
        if isinstance(self.text, list):
            return [Given.model_construct(text=text) for text in self.text]
        if self.tokens and isinstance(self.tokens[0], list):
            return [Given.model_construct(tokens=tokens) for tokens in self.tokens]
        return [Given.model_construct(text=self.text, tokens=self.tokens)]


class Attention(Given):
    model: ModelName
    position: int = Field(ge=0, lt=PROMPT_TOKENS, description="Which token looks, counted from 0.")
    layer: int = Field(ge=0, lt=1 << 16, description="Counted from 0.")
    head: int = Field(ge=0, lt=1 << 16, description="Counted from 0.")


class Adapt(Body):
    """How a session learns from what it reads. What is left out is as `txl tune-adaptation` found it for the run, or else what is usual."""

    by: Literal["gradient", "cache", "both"] = "both"
    rate: float | None = Field(None, gt=0.0, le=1e6, description="How far weights move after each segment.")
    rule: Literal["sgd", "rms"] | None = None
    decay: float | None = Field(None, ge=0.0, lt=1.0, description="The share of the way back, after each segment.")
    learns: Literal["all", "layers", "attention", "feed_forward", "adapters"] | None = None
    rank: int | None = Field(None, ge=1, le=1 << 16, description="Of the adapters.")
    segment: int | None = Field(None, ge=1, le=CHUNK, description="Tokens between two moves.")
    cache_lambda: float | None = Field(None, gt=0.0, lt=1.0, description="The cache's share of each prediction.")
    cache_theta: float | None = Field(None, ge=0.0, le=1e6, description="How much the most similar states count.")
    cache_size: int | None = Field(None, ge=1, le=MOST_CACHED, description="Positions that are kept.")
    compare: bool = Field(False, description="Also tell what each token would have cost without learning.")

    @model_validator(mode="after")
    def nothing_in_vain(self) -> "Adapt":
        for name in self.model_fields_set:
            if self.by == "gradient" and name.startswith("cache_"):
                raise ValueError("by gradient there is no cache; leave out what begins with cache_, or take both")
            if self.by == "cache" and name in ("rate", "rule", "decay", "learns", "rank", "segment"):
                raise ValueError(
                    "by cache no weights move; leave out rate, rule, decay, learns, rank and segment, or take both"
                )
        return self


class NewSession(Body):
    model: ModelName
    adapt: Adapt | None = Field(None, description="The session learns while it reads.")


class SavedName(Body):
    name: str = Field(pattern=SESSION_NAME)


def _fields(kind: type[BaseModel]) -> set[str]:
    return set(kind.model_fields).union(*map(_fields, kind.__subclasses__()))


FIELDS = _fields(Body) | {"session"}
"""Names that an error may say."""


class StrictRequest(Request):
    """Reads JSON as the standard has it, and checks what it says: all beside the event loop, where it is not small."""

    kind: type[BaseModel] | None = None
    """Of what its body must be."""

    async def json(self) -> Any:
        body = await self.body()
        small = len(body) <= SMALL
        if not small:  # whoever would not be let in with what it says need not say it
            self.app.state.admission.check()
            if busy():
                raise Refusal(429)
        return await aside_unless_gone(self.receive, lambda: read_body(body, self.kind), small=small)


def read_body(body: bytes, kind: type[BaseModel] | None) -> Any:
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite)
        _check(value, DEEPEST)
    except (ValueError, RecursionError):
        raise Refusal(400) from None
    try:
        return value if kind is None else kind.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise Refusal(422, sentences(found)) from None


class StrictRoute(APIRoute):
    def get_route_handler(self) -> Any:
        handle = super().get_route_handler()
        kind: Any = None if self.body_field is None else self.body_field.field_info.annotation

        async def strictly(request: Request) -> Response:
            strict = StrictRequest(request.scope, request.receive)
            strict.kind = kind
            try:
                return await handle(strict)
            except HTTPException as error:
                if isinstance(error.__cause__, Refusal | Gone):  # the framework calls whatever a body raises unreadable
                    raise error.__cause__ from None
                raise

        return strictly


def _no_constant(name: str) -> float:
    raise ValueError(name)


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(digits)
    return value


def _check(value: Any, depth: int) -> None:
    """Neither too deep, nor with half characters, nor with NUL in a name or a text; integers are no longer than a machine's."""
    if depth < 0:
        raise ValueError("depth")
    if isinstance(value, str):
        value.encode("utf-8")
    elif isinstance(value, int) and abs(value) >= 1 << 63:
        raise ValueError("integer")
    elif isinstance(value, dict):
        if len(value) > len(FIELDS):
            raise Refusal(422, f"the body: {NOT_KNOWN}")
        for name, item in value.items():
            name.encode("utf-8")
            _check(item, depth - 1)
    elif isinstance(value, list):
        if len(value) > PROMPT_TOKENS:
            raise Refusal(422, f"the body: a list is longer than {PROMPT_TOKENS:,}; send less at a time")
        for item in value:
            _check(item, depth - 1)


def sentences(errors: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(dict.fromkeys(map(sentence, errors[:4])))


def sentence(error: Mapping[str, Any]) -> str:
    """What is wrong, from where it is wrong and which rule it breaks: pydantic's own messages hold rules, never values."""
    names = [str(part) for part in error["loc"] if part in FIELDS]
    where = ".".join(names) or "the body"
    if error["type"] == "extra_forbidden":
        return f"{where}: {NOT_KNOWN}"
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{where}: {message[:1].lower()}{message[1:]}"
