"""How a request stands, from its submission to its end, and that it lets go of what it held."""

import asyncio
import gc
import time
import weakref
from collections.abc import Awaitable, Callable, Generator

import pytest

from small_models import build
from transformer_xl.batching.events import Done, Ended, Event, Failure, Mailbox, Wrote
from transformer_xl.batching.lanes import Lanes, TextOptions
from transformer_xl.batching.requests import Prompt, ReadRequest, Request, Status, WriteRequest
from transformer_xl.batching.scheduler import Counts, Scheduler
from transformer_xl.data.text.tokenizers import ByteTokenizer
from transformer_xl.decoding import Sampling, TextStream
from transformer_xl.inference import Engine

TOKENIZER = ByteTokenizer()


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    tokens = list(b"def ")
    text = TextStream(TOKENIZER, before=tokens)
    return Prompt(model=build(vocabulary=256), tokenizer=TOKENIZER, tokens=tokens, text=text)


def options(count: int = 1, *, tokens: int = 12) -> list[TextOptions]:
    return [TextOptions(sampling=Sampling(seed=seed), tokens=tokens) for seed in range(count)]


def mailbox(*, seconds: float = 60.0) -> Mailbox:
    return Mailbox(deadline=time.monotonic() + seconds)


def run(scenario: Callable[[Scheduler], Awaitable[None]]) -> None:
    async def whole() -> None:
        scheduler = Scheduler("small", counts=Counts(), proof=lambda: None)
        scheduler.start()
        try:
            await scenario(scheduler)
        finally:
            assert scheduler.close()

    asyncio.run(whole())


async def told(request: Request, *, texts: int = 1) -> dict[int, str]:
    """Each text, once all have ended."""
    found, ended = dict[int, str](), 0
    while ended < texts:
        index, event = await asyncio.wait_for(request.mailbox.next(), 20)
        assert isinstance(event, Wrote | Ended), event
        if isinstance(event, Wrote):
            found[index] = found.get(index, "") + event.text
        ended += isinstance(event, Ended)
    return found


async def last(request: Request) -> Event:
    return (await asyncio.wait_for(request.mailbox.next(), 20))[1]


def reading(*, fails: bool = False) -> Generator[int, None, str]:
    yield 3
    if fails:
        raise RuntimeError("broken")
    return "read"


def watched(monkeypatch: pytest.MonkeyPatch) -> list[Status]:
    """Every status that any request is given, the same one after the other once."""
    seen = list[Status]()

    def note(self: Request, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name == "status" and [value] != seen[-1:]:
            seen.append(value)

    monkeypatch.setattr(Request, "__setattr__", note, raising=False)
    return seen


def test_a_text_is_read(monkeypatch):
    async def scenario(scheduler: Scheduler) -> None:
        request = ReadRequest(reading(), mailbox=mailbox())
        scheduler.submit(request)
        assert await last(request) == Done(result="read")
        assert scheduler.counts.tokens_read == 3

    seen = watched(monkeypatch)
    run(scenario)
    assert seen == [Status.WAITING, Status.READING, Status.FINISHED]


def test_texts_are_written(prompt, monkeypatch):
    async def scenario(scheduler: Scheduler) -> None:
        request = WriteRequest(prompt, options(3), mailbox=mailbox())
        scheduler.submit(request)
        assert set(await told(request, texts=3)) == {0, 1, 2}

    seen = watched(monkeypatch)
    run(scenario)
    assert seen == [Status.WAITING, Status.READING, Status.READY, Status.WRITING, Status.FINISHED]


def test_what_fails_alone_has_failed(caplog):
    async def scenario(scheduler: Scheduler) -> None:
        request = ReadRequest(reading(fails=True), mailbox=mailbox())
        scheduler.submit(request)
        assert await last(request) is Failure.FAILED
        assert request.status is Status.FAILED

    caplog.set_level("CRITICAL")
    run(scenario)


def test_what_is_too_late_is_dropped(prompt):
    async def scenario(scheduler: Scheduler) -> None:
        late = ReadRequest(reading(), mailbox=mailbox(seconds=-1))
        scheduler.submit(late)
        assert await last(late) is Failure.TOO_LATE
        assert late.status is Status.DROPPED
        long = WriteRequest(prompt, options(tokens=10**9), mailbox=mailbox(seconds=0.3))
        scheduler.submit(long)
        while (event := await last(long)) is not Failure.TOO_LATE:
            assert isinstance(event, Wrote)
        assert long.status is Status.DROPPED

    run(scenario)


def test_a_step_that_fails_restarts_each_text_by_itself(prompt, monkeypatch, caplog):
    step, steps, failed = Lanes.step, list[int](), list[int]()
    texts = list[dict[int, str]]()

    def once(self: Lanes) -> object:
        found = step(self)
        steps.append(len(self))
        if steps == [3, 3]:  # the first is the request's own piece of work, before its texts join the others
            failed.append(len(self))
            raise MemoryError
        return found

    async def scenario(scheduler: Scheduler) -> None:
        request = WriteRequest(prompt, options(3), mailbox=mailbox())
        scheduler.submit(request)
        texts.append(await told(request, texts=3))
        assert request.status is (Status.RESTARTED if failed else Status.FINISHED)

    caplog.set_level("CRITICAL")
    run(scenario)
    monkeypatch.setattr(Lanes, "step", once)
    run(scenario)
    assert failed == [3]
    assert texts[0] == texts[1]


def test_what_a_request_held_is_let_go_without_looking_for_garbage(prompt, monkeypatch):
    """An engine is large, and one that only the collector of garbage finds would stay for minutes."""
    ever, made, begin = list[int](), weakref.WeakSet[Engine](), Engine.__init__

    def noted(self: Engine, *arguments: object, **named: object) -> None:
        begin(self, *arguments, **named)
        made.add(self)
        ever.append(1)

    async def scenario(scheduler: Scheduler) -> None:
        gc.collect()
        gc.disable()
        try:
            request = WriteRequest(prompt, options(2), mailbox=mailbox())
            scheduler.submit(request)
            await told(request, texts=2)
            gone = weakref.ref(request)
            assert ever
            del request
            until = time.monotonic() + 10
            while gone() is not None or len(made):
                assert time.monotonic() < until, (gone(), list(made))
                await asyncio.sleep(0.01)
        finally:
            gc.enable()

    monkeypatch.setattr(Engine, "__init__", noted)
    run(scenario)
