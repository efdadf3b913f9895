"""The tour's walk of one streamed completion names every file that it passes, and no other."""

import re
import threading
import time
from pathlib import Path
from types import FrameType

from serving_helpers import events, in_thread

import transformer_xl

SOURCE = Path(transformer_xl.__file__).parent
ROOMS = tuple(str(SOURCE / room) for room in ("serving", "batching"))
TOUR = Path(__file__).parents[2] / "docs" / "tour.md"


def test_the_tour_walks_a_streamed_completion(trained_run):
    passed, asked = set[str](), threading.Event()

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and asked.is_set() and name.startswith(ROOMS):
            passed.add(str(Path(name).relative_to(SOURCE)))

    threading.setprofile(note)
    try:
        with in_thread(trained_run) as server:
            asked.set()
            body = {"model": "small", "prompt": "def ", "max_tokens": 8, "stream": True}
            assert len(events(server.post("/v1/completions", **body).text)) == 9
            until = time.monotonic() + 5
            while server.server.app.state.admission.in_flight:
                assert time.monotonic() < until
            asked.clear()
    finally:
        threading.setprofile(None)
    section = TOUR.read_text().partition("## One request\n")[2].partition("\n## ")[0]
    assert passed == set(re.findall(r"`((?:serving|batching)/[\w/]+\.py)`", section))
    assert f"passes {len(passed)} files" in section
