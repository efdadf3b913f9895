"""What a program hands to the public calls is compared with what they take: a wrong kind is one sentence of ours, at the call."""

import inspect
from pathlib import Path

import numpy as np
import pytest

import transformer_xl as txl
from transformer_xl.arguments import checked, fits
from transformer_xl.errors import InputError
from transformer_xl.library import Loaded


@pytest.fixture(scope="module")
def loaded(trained_run):
    return txl.load(trained_run)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda it: it.score(5), "`text=5` must be a text or bytes"),
        (lambda it: it.generate(5), "`prompt=5` must be a text"),
        (lambda it: it.generate("a", tokens="5"), "`tokens='5'` must be a whole number"),
        (lambda it: it.generate("a", tokens=1.5), "`tokens=1.5` must be a whole number"),
        (lambda it: it.generate("a", tokens=True), "`tokens=True` must be a whole number"),
        (lambda it: it.generate("a", temperature="a"), "`temperature='a'` must be a number"),
        (lambda it: it.generate("a", seed=None), "`seed=None` must be a whole number"),
        (lambda it: it.generate("a", weights="int4"), "must be one of exact, int8; did you mean int8?"),
        (lambda it: it.generate_many("abc"), "`prompts='abc'` must be a list, each of it a text"),
        (lambda it: it.sweep(["a"]), r"`memories=\['a'\]` must be a list, each of it a whole number"),
        (lambda it: it.sweep(5), "`memories=5` must be a list"),
        (lambda it: it.attention(None), "`text=None` must be a text or bytes"),
        (lambda it: it.evaluate(tokens="a"), "`tokens='a'` must be a whole number"),
        (lambda it: it.line_scorer(last="5"), "`last='5'` must be a whole number"),
        (lambda it: it.line_scorer(by="lines"), "must be one of line, document; did you mean line?"),
        (lambda it: list(it.line_scorer().feed("text")), "a scorer is fed bytes, not str; give text.encode"),
        (lambda it: txl.load("x", memory="a"), "`memory='a'` must be a whole number"),
        (lambda it: txl.fit("x", minutes="4"), "`minutes='4'` must be a number"),
        (lambda it: txl.fit("x", minutes=None), "`minutes=None` must be a number"),
        (lambda it: txl.fit(None), "`what=None` must be a path or a text or a list"),
        (lambda it: txl.fit(b"x"), "`what=b'x'` must be a path"),
        (lambda it: txl.prepare("x", documents="x"), "must be one of file, blank-line, separator"),
        (lambda it: txl.prepare("x", vocabulary_size=300.5), "`vocabulary_size=300.5` must be a whole number"),
        (lambda it: txl.prepare("x", shares="a"), "`shares='a'` must be a list"),
        (lambda it: txl.compress("text", model=it), "`data='text'` must be bytes"),
        (lambda it: txl.compress(b"x", model=5), "`model=5` must be a path or a text or a Loaded"),
        (lambda it: txl.compress(b"x", model=it, level="slow"), "must be one of fast, best"),
        (lambda it: txl.decompress(None, model=it), "`data=None` must be bytes"),
        (lambda it: txl.train(None), "`store=None` must be a Store or a path or a text"),
        (lambda it: txl.train("x", 5), "`preset=5` must be a text or a RunConfig"),
        (lambda it: txl.train("x", model=5), "`model=5` must be a dictionary"),
        (lambda it: txl.train("x", on_step=5), "`on_step=5` must be a function"),
    ],
)
def test_a_wrong_kind_is_one_sentence(loaded, call, told):
    with pytest.raises(InputError, match=told):
        call(loaded)


def test_a_picture_in_a_folder_that_is_not_there(loaded, tmp_path):
    with pytest.raises(InputError, match="there is no folder"):
        loaded.sweep([0, 8], split="valid", tokens=60).plot(tmp_path / "no" / "x.png")


def test_a_single_stop_string_is_one(loaded):
    assert loaded.generate("a", tokens=60, seed=3, stop="e") == loaded.generate("a", tokens=60, seed=3, stop=["e"])


def test_what_fits():
    assert fits(np.int64(3), int)
    assert fits(np.float32(3), float)
    assert fits(3, float)
    assert fits(range(3), txl.Loaded.sweep.__wrapped__.__annotations__["memories"])
    assert fits(Path("x"), Path | str)
    assert not fits("x", int | None)
    assert fits(None, int | None)


def test_every_public_call_is_checked_and_keeps_its_signature():
    calls = [txl.fit, txl.prepare, txl.train, txl.load, txl.from_pretrained, txl.compress, txl.decompress]
    calls += [call for name, call in vars(Loaded).items() if inspect.isfunction(call) and not name.startswith("_")]
    unchecked = {call.__name__ for call in calls if not hasattr(call, "__wrapped__")}
    assert unchecked <= {"store"}
    assert "minutes" in inspect.signature(txl.fit).parameters

    @checked
    def named(first: int, *, second: str = "") -> int:
        return first

    with pytest.raises(TypeError, match="third"):
        named(1, third=2)
