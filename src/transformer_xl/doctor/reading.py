"""Whether a model reads, writes, scores, remembers and answers on this device as its own forward pass on the processor says."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import torch
from torch import Tensor

from transformer_xl.checkpoint import About, Checkpoint, load_checkpoint, write_checkpoint
from transformer_xl.config import ModelConfig
from transformer_xl.data.text.tokenizers import ByteTokenizer
from transformer_xl.decoding import Sampling, generate
from transformer_xl.doctor.kernels import Precision, like, precisions
from transformer_xl.doctor.pretended import LABEL, elsewhere
from transformer_xl.doctor.setting import (
    ISSUE,
    LANES,
    SMALL,
    SMALL_MODEL,
    Result,
    Setting,
    differences,
    drawn_model,
    drawn_tokens,
    joined,
    one_layer,
    worst,
)
from transformer_xl.inference import Engine, make_reader, restore_reader
from transformer_xl.model import TransformerXL
from transformer_xl.model.reference import reference_attend

READ, REMEMBERED = 80, 30
SINGLE = 24
"""Read one at a time: so many that a CUDA graph is recorded, and used."""
WRITTEN, PRETENDED = 48, 12
"""Tokens, on the device and on one that is not there."""
WAIT_SECONDS = 30.0
PROMPT = "def forward(self"


# --- the engine


def engine(setting: Setting) -> Result:
    """Hidden states of one layer of each preset: a text read at once and then token by token, beside one forward pass of all of it."""
    off: dict[str, dict[str, float]] = {}
    wrong: list[str] = []
    exactly = [way for way in precisions(setting.device) if way.autocast is None]
    for names, config in _layers(setting).items():
        exact, tokens_BT = drawn_model(config).eval(), drawn_tokens(LANES, READ)
        exact.attend = reference_attend
        with torch.inference_mode():
            expected_BTD = exact(tokens_BT).hidden_BTD
        exact.attend = None
        for precision in exactly:
            model = deepcopy(exact).to(setting.device, precision.weights)
            with precision.on(setting.device):
                hidden_BTD = _read(model, tokens_BT.to(setting.device))
            _, share = worst(differences({"read": hidden_BTD}, {"read": expected_BTD}))
            off.setdefault(names, {})[precision.name] = share
            if not share <= 2 * precision.within:
                wrong.append(f"{names} in {precision.name} ({share:.1e} off)")
    if wrong:
        return Result(
            status="failed",
            figure=f"{len(wrong)} wrong",
            sentence=f"the engine reads something else than the model's forward pass: {joined(wrong)}",
            remedy=f"do not evaluate, generate or serve on {setting.device}; {ISSUE}",
            details=off,
        )
    return Result(status="ok", figure=f"{len(off)} layers as the forward pass", details=off)


def _layers(setting: Setting) -> dict[str, ModelConfig]:
    """One layer of each preset, whole, in which every token sees so many before it, however a text is cut; those that are alike once, under the first
    one's name."""
    lengths = {"memory": REMEMBERED, "same_length": True, "same_length_keys": "memory+1"}
    found: dict[ModelConfig, str] = {}
    for name, config in setting.models.items():
        found.setdefault(one_layer(config, **lengths, cutoffs=(), div_val=1, tie_projections=()), name)
    return {name: config for config, name in found.items()}


def _read(model: TransformerXL, tokens_BT: Tensor) -> Tensor:
    reader = Engine(model, lanes=len(tokens_BT))
    parts = [reader.read(tokens_BT[:, : READ - SINGLE])]
    parts += [reader.read(tokens_BT[:, place : place + 1]) for place in range(READ - SINGLE, READ)]
    return torch.cat(parts, dim=1)


# --- everything on one device


def one_device(setting: Setting) -> Result:
    """Reading, writing, scoring, saving and restoring on a device that is not there: nothing of the processor's may be among its tensors."""
    model, saved = drawn_model(SMALL_MODEL).float().eval(), setting.folder / "elsewhere.safetensors"
    tokens_BT, said = drawn_tokens(LANES, 40), Sampling(seed=3)
    with torch.inference_mode():
        expected_BT = make_reader(model, lanes=LANES).score(tokens_BT)
    text = list(generate(model, tokens_BT[0].tolist(), tokens=PRETENDED, sampling=said))
    with elsewhere(model) as seen:
        away_BT = tokens_BT.to(LABEL)
        reader = make_reader(model, lanes=LANES)
        parts = [reader.score(away_BT[:, :20]), reader.score(away_BT[:, 20:21])]
        reader.save(saved)
        reader = restore_reader(model, saved)
        parts.append(reader.score(away_BT[:, 21:]))
        written = list(generate(model, tokens_BT[0].tolist(), tokens=PRETENDED, sampling=said))
        found_BT = torch.cat(parts, dim=1).cpu()
    if seen.mixed:
        places = [f"{place} ({name})" for place, name in seen.mixed.items()]
        return Result(
            status="failed",
            figure=f"{len(places)} places",
            sentence=f"a tensor of the processor meets those of the device while a model is read: {joined(places)}",
            remedy=f"reading fails on every device but the processor; {ISSUE}",
            details={"places": places},
        )
    apart = float((found_BT - expected_BT).abs().nan_to_num().max())
    if written != text or not apart < 1e-4:
        return Result(
            status="failed",
            figure="other numbers",
            sentence=f"torch's own operations read something else than the kernels ({apart:.1e} nats; texts {'differ' if written != text else 'agree'})",
            remedy=ISSUE,
        )
    return Result(status="ok", figure="nothing of the processor's among them")


# --- a model at rest, and what is done with it


def texts(setting: Setting) -> Result:
    """Writes, scores and goes on from what was saved, beside the processor in float64."""
    folder, precision = _random_run(setting), Precision(name="float32", within=1e-5)
    here, there = load_checkpoint(folder), load_checkpoint(folder, device=str(setting.device))
    exact = here.model.double().eval()
    assert isinstance(exact, TransformerXL)
    exact.attend = reference_attend
    prompt, ids = list(PROMPT.encode()), drawn_tokens(1, 100, vocabulary=256)
    said = Sampling(seed=5)
    with precision.on(setting.device):
        write = partial(generate, there.model, prompt, tokens=WRITTEN, sampling=said)
        written, again = list(write()), list(write())
        expected = list(generate(exact, prompt, tokens=WRITTEN, sampling=said))
        nats_BT = _gone_on(there, ids.to(setting.device), setting.folder / "engine.safetensors").cpu().double()
    right_BT = make_reader(exact).score(ids)
    apart = float((nats_BT - right_BT).abs().nan_to_num().max())
    wrong = ["the same seed writes another text each time"] * (written != again)
    wrong += ["the text is not the processor's"] * (written != expected)
    wrong += [f"scores are {apart:.1e} nats off, over a save and a restore"] * (not apart < 1e-3)
    if wrong:
        return Result(
            status="failed",
            figure=f"{len(wrong)} wrong",
            sentence=joined(wrong),
            remedy=f"do not generate or score on {setting.device}; {ISSUE}",
        )
    return Result(status="ok", figure=f"{WRITTEN} tokens as on the processor, scores to {apart:.0e} nats")


def _gone_on(checkpoint: Checkpoint, tokens_BT: Tensor, path: Path) -> Tensor:
    """Scores, of which the second half is read by a reader that was saved and restored."""
    model, half = checkpoint.model.eval(), tokens_BT.shape[1] // 2
    reader = make_reader(model)
    first = reader.score(tokens_BT[:, :half])
    reader.save(path)
    return torch.cat([first, restore_reader(model, path).score(tokens_BT[:, half:])], dim=1)


def _random_run(setting: Setting) -> Path:
    """A checkpoint of weights that nobody trained, and that have something to say."""
    folder = setting.folder / "random"
    if not folder.exists():
        weights = drawn_model(SMALL_MODEL).float().state_dict()
        about = About(corpus="none", rule="none", unit="bits_per_byte", data="", step=0)
        tokenizer = ByteTokenizer(bytes(range(256)))
        write_checkpoint(folder, config=SMALL, about=about, weights=weights, tokenizer=tokenizer)
    return folder


# --- a server


def serving(setting: Setting) -> Result:
    """A server of this process: a text, scores, a session that is saved and restored, all computed on the device."""
    try:
        from transformer_xl.serving.api.app import make_app
        from transformer_xl.serving.api.models import Served
        from transformer_xl.serving.http.server import make_server
    except ModuleNotFoundError as error:
        return Result(
            status="skipped",
            figure="not installed",
            sentence=f"serving needs {error.name}",
            remedy="pip install 'transformer-xl[serve]'",
        )
    from transformer_xl.serving.limits import Limits

    folder = _random_run(setting)
    sessions = setting.folder / "sessions"
    sessions.mkdir(mode=0o700, exist_ok=True)
    limits = Limits(deadline_seconds=WAIT_SECONDS)
    served = Served("doctor", load_checkpoint(folder, device=str(setting.device)), limits=limits)
    server = make_server(make_app([served], limits=limits, sessions=sessions), limits=limits)
    with Precision(name="float32", within=0.0).on(setting.device), _running(server) as post:
        asked = {"model": "doctor", "prompt": PROMPT, "max_tokens": WRITTEN, "temperature": 0.0}
        text = post("/v1/completions", **asked)["choices"][0]["text"]
        post("/v1/score", model="doctor", text=PROMPT)
        session = post("/v1/sessions", model="doctor")["id"]
        post(f"/v1/sessions/{session}/feed", text=PROMPT)
        post(f"/v1/sessions/{session}/save", name="doctor")
        restored = post("/v1/sessions/restore", name="doctor")["id"]
        alike = [
            post(f"/v1/sessions/{one}/generate", max_tokens=WRITTEN, temperature=0.0)["choices"][0]["text"]
            for one in (session, restored)
        ]
    if {text, *alike} != {text}:
        return Result(
            status="failed",
            figure="other texts",
            sentence="a completion, a session and the same session restored from its file do not write the same text",
            remedy=f"do not serve from {setting.device}; {ISSUE}",
            details={"texts": [text, *alike]},
        )
    where = str(like(served.model).device)  # type: ignore[arg-type]
    return Result(status="ok", figure="text, scores and a restored session", details={"device": where})


@contextmanager
def _running(server: Any) -> Iterator[Any]:
    listening = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})

    def post(path: str, **body: object) -> Any:
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        with urlopen(Request(address + path, data, headers), timeout=2 * WAIT_SECONDS) as answer:
            return json.load(answer)

    thread.start()
    try:
        until = time.monotonic() + WAIT_SECONDS
        while not server.started and time.monotonic() < until:
            time.sleep(0.02)
        yield post
    finally:
        server.should_exit = True
        thread.join(WAIT_SECONDS)
        listening.close()
