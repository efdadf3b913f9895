"""training.json has one form, whoever wrote it: what is saved is read back, and a run that was imported has the fields of one that was trained."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from transformer_xl.checkpoint import Counters, Timetable, Window
from transformer_xl.errors import CheckpointError

TRAINED = Counters(
    step=7,
    tokens=84,
    seconds=1.5,
    skipped=1,
    rate_scale=0.5,
    best_nats=None,
    average_count=3,
    window=Window(nats=2.0, tokens=12, seconds=0.1, steps=1, norm=0.3),
    lanes={"kind": "lanes", "offset": 12},
    data="fingerprint",
    origin="fingerprint of weights",
    scaler={},
    ranks=2,
    timetable=Timetable(
        minutes=2.0,
        steps=50,
        validation_tokens=100,
        validating=0.5,
        saving=0.25,
        spent=3.0,
        before=1.0,
        step=5,
        seconds=1.25,
        position=5.5,
        pace=1.125,
        mark=11,
    ),
)


def read_back(counters: Counters) -> Counters:
    return Counters.from_json(json.loads(json.dumps(counters.to_json())), path=Path("training.json"))


@pytest.mark.parametrize("counters", [TRAINED, Counters.unbegun(step=3)], ids=["trained", "imported"])
def test_what_is_written_is_read_back(counters):
    assert read_back(counters) == counters


def test_fields_stand_in_their_order_and_what_goes_without_saying_is_left_out():
    names = [field.name for field in fields(Counters)]
    assert list(TRAINED.to_json()) == names
    unsaid = ("data", "origin", "ranks", "timetable")
    assert list(Counters.unbegun(step=3).to_json()) == [name for name in names if name not in unsaid]


@pytest.mark.parametrize("name", ["data", "origin"])
@pytest.mark.parametrize("value", [None, 5, ["fingerprint"]])
def test_a_fingerprint_is_text_or_left_out(name, value):
    with pytest.raises(CheckpointError, match=rf"training.json: {name}: expected a word, found"):
        Counters.from_json({**TRAINED.to_json(), name: value}, path=Path("training.json"))
