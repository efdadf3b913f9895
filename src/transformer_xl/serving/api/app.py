"""The server's addresses: who answers what, and every status that each may answer with."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import fastapi
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.body_limit import RequestBodyLimitMiddleware

from transformer_xl.errors import InputError, shown
from transformer_xl.serving.api import answers, bodies
from transformer_xl.serving.api.admission import Admission, Ticket, ticket
from transformer_xl.serving.api.bodies import StrictRoute, sentences
from transformer_xl.serving.api.completions import complete, go_on
from transformer_xl.serving.api.learning import open_learning
from transformer_xl.serving.api.metrics import CONTENT_TYPE, prometheus
from transformer_xl.serving.api.models import Served
from transformer_xl.serving.api.refusals import SAYINGS, Refusal, error_answer
from transformer_xl.serving.api.saved import NO_FOLDER, Saved
from transformer_xl.serving.api.scoring import attention, feed, score, score_in
from transformer_xl.serving.api.sessions import Session, Sessions
from transformer_xl.serving.api.texts import longest_name
from transformer_xl.serving.http.aside import Gone
from transformer_xl.serving.http.gate import Gate, Requests, is_loopback
from transformer_xl.serving.limits import BODY_BYTES, Limits
from transformer_xl.serving.page_files import PAGE, page_file

log = logging.getLogger("transformer_xl.serving")

WATCH_SECONDS = 0.25
OPEN = {"/health", *PAGE}
"""What needs no key."""
LEFT = 499
"""What a client that left is counted as; nobody reads it."""
TAKEN = Annotated[Ticket, Depends(ticket)]
SessionId = Annotated[str, fastapi.Path(alias="session", pattern=bodies.SESSION_ID)]
SavedName = Annotated[str, fastapi.Path(pattern=bodies.SESSION_NAME)]


def statuses(model: Any, *more: int, kind: str | None = None) -> dict[int | str, dict[str, Any]]:
    """What a route may answer: its result, as JSON or (also) of another `kind`, what any address may refuse with, and `more`."""
    any_route = (401, 403, 404, 405, 413, 431, 500)
    found: dict[int | str, dict[str, Any]] = {200: {"model": model} if model else {}}
    found[200] |= {"description": "the answer"} | ({"content": {kind: {}}} if kind else {})
    for status in sorted({*any_route, *more}):
        found[status] = {"model": answers.Error, "description": SAYINGS[status]}
    return found


BODY = (400, 422)
DISK = (409, 429, 504)
WORK = (400, 409, 422, 429, 503, 504)


def make_app(
    models: list[Served],
    *,
    limits: Limits,
    sessions: Path | None = None,
    host: str = "127.0.0.1",
    allowed: Sequence[str] = (),
    key: str | None = None,
    replica: str | None = None,
    log_request: Callable[[str], None] | None = None,
) -> FastAPI:
    """`replica`: this server's name among several. `log_request` is told a line of JSON of each request."""
    if not is_loopback(host) and not key:
        raise InputError(
            f"`host=`: {host} is open to other machines, and there is no key; give one with `api_key_file=` or TXL_API_KEY, or take 127.0.0.1"
        )
    if replica is not None and not re.fullmatch(bodies.REPLICA, replica):
        raise InputError(
            f"`replica=`: {shown(replica)} is no name of a host; take letters, digits and dashes, such as serve-0"
        )
    # Looked up for every request, and made from the whole vocabulary: nobody's request should wait for that.
    for served in models:
        longest_name(served.tokenizer)
    requests = Requests(log=log_request)
    saved = None if sessions is None else Saved(sessions, limits=limits)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for served in models:
            served.start()
        watch = asyncio.create_task(_watch(models))
        yield
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
        if saved is not None:
            saved.close()
        ended = [served.close() for served in models]  # every one of them, whatever the first says
        app.state.ended = all(ended)

    app = FastAPI(
        title="Transformer-XL",
        description="Language models with memory. `/v1/completions` and `/v1/models` are OpenAI's; sessions, scores and attention are ours.",
        version="1",
        openapi_url=None,  # its own answer is made anew each time
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        middleware=[
            Middleware(Gate, host=host, allowed=allowed, key=key, open_=OPEN, refuse=error_answer, requests=requests),
            Middleware(RequestBodyLimitMiddleware, max_body_size=BODY_BYTES),
        ],
        redirect_slashes=False,
        strict_content_type=True,
    )
    app.router.route_class = StrictRoute
    _add_refusals(app)
    app.state.admission = Admission(limits)
    app.state.models = {served.name: served for served in models}
    app.state.sessions, app.state.saved = Sessions(limits, replica=replica), saved
    app.state.requests = requests
    _add_open(app)
    _add_models(app)
    _add_sessions(app)
    _describe_models(app)
    return app


def _add_refusals(app: FastAPI) -> None:
    """Every way in which a request can fail ends here."""

    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> Response:
        return error_answer(error.status, error.message)

    @app.exception_handler(Gone)
    async def gone(request: Request, error: Gone) -> Response:
        return error_answer(LEFT)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        answer = error_answer(error.status_code)
        if allow := (error.headers or {}).get("Allow"):
            answer.headers["Allow"] = allow
        return answer

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return error_answer(422, sentences(error.errors()))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return error_answer(500)


def _describe_models(app: FastAPI) -> None:
    """OpenAPI lists the models that are served."""
    for schema in app.openapi()["components"]["schemas"].values():
        if "model" in schema.get("required", ()) and schema.get("additionalProperties") is False:
            schema["properties"]["model"]["enum"] = list(app.state.models)
    description = JSONResponse(app.openapi()).body

    @app.get("/openapi.json", include_in_schema=False)
    async def described() -> Response:
        return Response(description, media_type="application/json")


async def _watch(models: list[Served]) -> None:
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        for served in models:
            try:
                served.replace_if_stuck_or_dead()
            except Exception:  # whatever it is, the others are watched, and this one is tried again
                log.exception("%s: the model's thread could not be replaced", served.name)


def _served(request: Request, name: str) -> Served:
    models: dict[str, Served] = request.app.state.models
    if name not in models:
        raise Refusal(404, "model: no such model is served here; GET /v1/models lists those that are")
    return models[name]


def _add_open(app: FastAPI) -> None:
    for address in PAGE:

        def page(request: Request) -> Response:
            found = page_file(request.url.path)
            if found is None:
                raise Refusal(404, "this installation holds no page; the API is at /v1")
            return Response(found[0], media_type=found[1])

        app.add_api_route(address, page, include_in_schema=False)

    health_statuses = statuses(answers.Health)
    health_statuses[503] = {"model": answers.Health, "description": "a model cannot answer"}

    @app.get("/health", responses=health_statuses)
    async def health(request: Request) -> Response:
        """503 where a model cannot answer. What the models are called is told to those who may use them."""
        states = {name: served.state() for name, served in request.app.state.models.items()}
        well = all(state == "ok" for state in states.values())
        draining = request.app.state.admission.draining
        body: dict[str, Any] = {"status": "draining" if draining else "ok" if well else "failing"}
        if request.scope["has_key"]:
            body["models"] = states
        return JSONResponse(body, status_code=200 if well else 503)

    @app.get("/metrics", responses=statuses(None, kind="text/plain"))
    async def metrics(request: Request) -> Response:
        state = request.app.state
        text = prometheus(state.requests, state.models, admission=state.admission, sessions=state.sessions)
        return Response(text, media_type=CONTENT_TYPE)


def _add_models(app: FastAPI) -> None:
    @app.get("/v1/models", responses=statuses(answers.Models))
    async def models(request: Request) -> Response:
        same = {"object": "model", "created": 0, "owned_by": "transformer-xl"}
        models: dict[str, Served] = request.app.state.models
        data = [{"id": name, **same, "transformer_xl": served.facts()} for name, served in models.items()]
        return JSONResponse({"object": "list", "data": data})

    @app.post("/v1/completions", responses=statuses(answers.Text, *WORK, kind="text/event-stream"))
    async def completions(request: Request, body: bodies.Completion, ticket: TAKEN) -> Response:
        return await complete(_served(request, body.model), body, ticket)

    @app.post("/v1/score", responses=statuses(answers.Scores | answers.ManyScores, *WORK))
    async def score_text(request: Request, body: bodies.Score, ticket: TAKEN) -> Response:
        served = _served(request, body.model)
        return await score(served, body.each(), ticket, segment=served.forgets_after(body.memory), many=body.many)

    @app.post("/v1/attention", responses=statuses(answers.Looks, *WORK))
    async def look(request: Request, body: bodies.Attention, ticket: TAKEN) -> Response:
        return await attention(_served(request, body.model), body, ticket)


def _sessions(request: Request) -> Sessions:
    sessions: Sessions = request.app.state.sessions
    return sessions


def _saved(request: Request) -> Saved:
    saved: Saved | None = request.app.state.saved
    if saved is None:
        raise Refusal(409, NO_FOLDER)
    return saved


async def used(request: Request, id: SessionId) -> AsyncIterator[Session]:
    """The session, for this request alone until its answer is sent."""
    with _sessions(request).using(id) as session:
        yield session


USED = Annotated[Session, Depends(used)]


def _add_sessions(app: FastAPI) -> None:
    @app.post("/v1/sessions", responses=statuses(answers.Session, *WORK))
    async def open_session(request: Request, body: bodies.NewSession, ticket: TAKEN) -> Response:
        served, sessions = _served(request, body.model), _sessions(request)
        if body.adapt is None:
            return JSONResponse(sessions.begin(served).as_json())
        return JSONResponse((await open_learning(served, body.adapt, sessions, ticket)).as_json())

    @app.get("/v1/sessions", responses=statuses(answers.Sessions))
    async def list_sessions(request: Request) -> Response:
        return JSONResponse({"data": [session.as_json() for session in _sessions(request).all()]})

    @app.get("/v1/sessions/saved", responses=statuses(answers.SavedNames, *DISK))
    async def list_saved(request: Request, ticket: TAKEN) -> Response:
        return JSONResponse({"data": await ticket.unless_gone(_saved(request).names())})

    @app.delete("/v1/sessions/saved/{name}", responses=statuses(answers.DeletedName, *DISK, 422))
    async def delete_saved(request: Request, name: SavedName, ticket: TAKEN) -> Response:
        await ticket.unless_gone(_saved(request).delete(name))
        return JSONResponse({"name": name, "deleted": True})

    @app.post("/v1/sessions/restore", responses=statuses(answers.Session, *BODY, *DISK))
    async def restore(request: Request, body: bodies.SavedName, ticket: TAKEN) -> Response:
        saved, sessions = _saved(request), _sessions(request)
        sessions.check_room()
        session = await ticket.unless_gone(saved.read(body.name, list(request.app.state.models.values())))
        return JSONResponse(sessions.add(session).as_json())

    @app.get("/v1/sessions/{session}", responses=statuses(answers.Session, 422))
    async def show(request: Request, id: SessionId) -> Response:
        return JSONResponse(_sessions(request).get(id).as_json())

    @app.delete("/v1/sessions/{session}", responses=statuses(answers.Deleted, 409, 422))
    async def delete(request: Request, session: USED) -> Response:
        _sessions(request).delete(session.id)
        return JSONResponse({"id": session.id, "deleted": True})

    @app.post("/v1/sessions/{session}/fork", responses=statuses(answers.Session, 409, 422))
    async def fork(request: Request, id: SessionId) -> Response:
        return JSONResponse(_sessions(request).fork(id).as_json())

    @app.post("/v1/sessions/{session}/save", responses=statuses(answers.Saved, *BODY, *DISK))
    async def save(request: Request, session: USED, body: bodies.SavedName, ticket: TAKEN) -> Response:
        size = await ticket.unless_gone(_saved(request).save(session, body.name))
        return JSONResponse({"name": body.name, "bytes": size})

    @app.post("/v1/sessions/{session}/feed", responses=statuses(answers.Fed, *WORK))
    async def feed_session(session: USED, body: bodies.Feed, ticket: TAKEN) -> Response:
        return await feed(session, body, ticket)

    @app.post("/v1/sessions/{session}/generate", responses=statuses(answers.Text, *WORK, kind="text/event-stream"))
    async def generate(session: USED, body: bodies.SessionGeneration, ticket: TAKEN) -> Response:
        return await go_on(session, body, ticket)

    @app.post("/v1/sessions/{session}/score", responses=statuses(answers.Scores, *WORK))
    async def score_in_session(session: USED, body: bodies.SessionScore, ticket: TAKEN) -> Response:
        return await score_in(session, body, ticket)
