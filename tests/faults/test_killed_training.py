"""Training killed again and again, inside saving and anywhere: the same command goes on, and ends with the bits of a run that nobody killed."""

import json
import random
import re
import signal
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from kills import Attempt, Death, attempts, leftovers, random_writes

from small_run import SMALL
from transformer_xl.checkpoint import RunFolder
from transformer_xl.files import digest

pytestmark = pytest.mark.timeout(900)  # of the slow ones, on a busy machine

EVERY = 5
"""Steps from one checkpoint to the next."""
STEPS_PER_KILL = 20
"""More than one attempt takes, on average."""
CONFIG = replace(
    SMALL,
    model=replace(SMALL.model, dropout=0.2, attention_dropout=0.1),
    training=replace(SMALL.training, accumulation=2, warm_up=20, save_every=EVERY, validate_every=10 * EVERY),
)
WRITES = 23
"""What one checkpoint takes: files brought to the disk, and put in their place."""
LOADED = ("transformer_xl.training", "transformer_xl.cli.train", "torch._dynamo", "torch.utils.tensorboard.writer")


@pytest.fixture(scope="module")
def attempt():
    with attempts(*LOADED) as attempt:
        yield attempt


class Trained:
    """One run, by one command."""

    def __init__(self, folder: Path, data: Path, *, steps: int, **more: int) -> None:
        config = folder.parent / f"{folder.name}.json"
        config.write_text(json.dumps(asdict(replace(CONFIG, training=replace(CONFIG.training, steps=steps, **more)))))
        self.words = ["train", str(config), "--data", str(data), "--run", str(folder)]
        self.run, self.steps = RunFolder(folder), steps

    def digests(self) -> dict[str, str]:
        checkpoint = self.run.checkpoint_at(self.steps)
        return {name: digest(checkpoint / name) for name in ("model.safetensors", "training.safetensors")}


def started_from(death: Death) -> int:
    found = re.search(r"^going on from step (\d+)", death.said, re.MULTILINE)
    return int(found[1]) if found else 0


def drawn_kills(trained: Trained, kills: int) -> list[Attempt]:
    """Half at writes of a checkpoint, this one's first to third; half at random moments, of which one in five is a SIGTERM."""
    chance = random.Random(0)
    inside = [
        Attempt(words=trained.words, at_write=write, in_saving=True)
        for write in random_writes(chance, most=3 * WRITES, count=kills // 2)
    ]
    anywhere = [
        Attempt(
            words=trained.words,
            ready_at_step=chance.randint(1, 4 * EVERY),
            after_seconds=chance.uniform(0, 0.03),
            number=signal.SIGTERM if place % 5 == 4 else signal.SIGKILL,
        )
        for place in range(kills - len(inside))
    ]
    first = replace(anywhere[0], ready_at_step=2 * EVERY)  # so that there is something to go on from
    rest = [*anywhere[1:], *inside]
    chance.shuffle(rest)
    return [first, *rest]


@pytest.mark.parametrize("kills", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_again_and_again_training_ends_with_the_same_bits(kills, attempt, byte_store, tmp_path):
    steps = kills * STEPS_PER_KILL
    whole = Trained(tmp_path / "whole", byte_store.folder, steps=steps)
    killed = Trained(tmp_path / "killed", byte_store.folder, steps=steps)
    asked, deaths, half_written = drawn_kills(killed, kills), [], 0
    assert attempt(Attempt(words=whole.words)).code == 0
    for one in asked:
        deaths.append(attempt(one))
        half_written += leftovers(killed.run.checkpoints) > 0
    last = attempt(Attempt(words=killed.words))
    expected = [143 if one.number == signal.SIGTERM else -signal.SIGKILL for one in asked]
    assert [death.code for death in deaths] == expected  # none came too early, or after the end
    assert last.code == 0, last.said
    resumes = [started_from(death) for death in [*deaths[1:], last]]
    going_on = sum(step > 0 for step in resumes)
    print(
        f"{kills} kills ({expected.count(143)} SIGTERM), the last at a run that had begun at step {resumes[-2]} of {steps}:"
        f" {going_on} of {kills} resumes from a step > 0, {half_written} of {kills} kills left a half-written save"
    )
    assert resumes == sorted(resumes)  # nothing that was saved is lost
    assert resumes[-1] < steps
    assert going_on >= 0.9 * kills
    assert half_written >= 0.2 * kills
    assert leftovers(killed.run.path) == 0
    assert killed.digests() == whole.digests()
    assert killed.run.best_step() == whole.run.best_step()


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_sigterm_saves_where_it_stopped_and_the_same_command_goes_on(kills, attempt, byte_store, tmp_path):
    steps = 2 * kills * STEPS_PER_KILL
    whole = Trained(tmp_path / "whole", byte_store.folder, steps=steps)
    stopped = Trained(tmp_path / "stopped", byte_store.folder, steps=steps)
    chance, from_step, slowest = random.Random(1), 0, 0.0
    assert attempt(Attempt(words=whole.words)).code == 0
    for _ in range(kills):
        death = attempt(
            Attempt(
                words=stopped.words,
                ready_at_step=chance.randint(1, STEPS_PER_KILL),
                after_seconds=chance.uniform(0, 0.03),
                number=signal.SIGTERM,
            )
        )
        assert death.code == 143, death.said
        assert started_from(death) == from_step
        from_step = stopped.run.steps()[-1]
        assert f"stopped at step {from_step} and saved" in death.said
        assert death.seconds < 5  # with the step it was at, which takes milliseconds here
        slowest = max(slowest, death.seconds)
    last = attempt(Attempt(words=stopped.words))
    assert last.code == 0, last.said
    assert started_from(last) == from_step < steps
    assert stopped.digests() == whole.digests()
    print(f"{kills} times SIGTERM, the last at step {from_step} of {steps}: saved and left within {slowest:.2f} s")


def test_the_best_checkpoint_is_known_as_such_though_killed_before_that_was_written_down(attempt, byte_store, tmp_path):
    for at_write in (WRITES, WRITES + 1, WRITES + 2):  # the checkpoint stands, and best.json does not yet name it
        folder = tmp_path / str(at_write)
        killed = Trained(folder, byte_store.folder, steps=4 * EVERY, save_every=0, validate_every=EVERY)
        assert attempt(Attempt(words=killed.words, at_write=at_write, in_saving=True)).code == -signal.SIGKILL
        assert (killed.run.steps(), killed.run.best_step()) == ([EVERY], None)
        again = Attempt(words=killed.words, ready_at_step=1, after_seconds=0, number=signal.SIGTERM)
        assert attempt(again).code == 143
        assert EVERY < killed.run.steps()[-1] < 2 * EVERY  # before anything is validated again
        assert killed.run.best_step() == EVERY
