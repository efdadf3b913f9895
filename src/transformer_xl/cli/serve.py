"""A page and an HTTP API for one or more trained models, like OpenAI's, with sessions that remember.

    txl serve                                             (the model in the box, at http://127.0.0.1:8000, for this machine alone)
    txl serve runs/first runs/second --sessions saved     (two models; sessions can be saved there)

An API key, where one is wanted, comes from --api-key-file or from the environment's TXL_API_KEY. SIGTERM and Ctrl-C let what is under way finish."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_xl.cli.devices import add_device, add_precision
from transformer_xl.cli.models import RUN_HELP, load_named
from transformer_xl.errors import InputError

if TYPE_CHECKING:
    from transformer_xl.devices import Precision
    from transformer_xl.serving.api.models import Served
    from transformer_xl.serving.limits import Limits


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="*", help=RUN_HELP)
    add("--host", default="127.0.0.1", help="where to listen; other than loopback needs a key (127.0.0.1)")
    add("--port", type=int, default=8000, help="0 takes a free one (8000)")
    add("--sessions", metavar="DIR", help="an existing folder in which sessions can be saved")
    add("--api-key-file", metavar="FILE", help="a file that holds the key and nothing else")
    add("--allow-host", metavar="NAME", action="append", default=[], help="a further host name by which it is reached")
    add("--memory", metavar="M", type=int, help="positions remembered, where not as trained")
    add("--admit", metavar="N", type=int, default=64, help="texts at a time; more are answered 429 (64)")
    add("--max-sessions", metavar="N", type=int, default=32, help="sessions in memory; more are answered 409 (32)")
    add(
        "--max-learning",
        metavar="N",
        type=int,
        default=8,
        help="of these, sessions that learn; more are answered 409 (8)",
    )
    add("--replica", metavar="NAME", help="this server's name among several, with which the ids of its sessions begin")
    add(
        "--log-requests",
        action="store_true",
        help="a line of JSON on stderr for each request; nothing that was sent is in it",
    )
    add("--deadline", metavar="SECONDS", type=float, default=120.0, help="for one request, then 504 (120)")
    add_device(parser)
    add_precision(parser, default="auto")


def run(arguments: argparse.Namespace) -> int:
    key = api_key(arguments.api_key_file)
    folder = None if arguments.sessions is None else Path(arguments.sessions)
    if folder is not None and not folder.is_dir():
        raise InputError(f"--sessions: there is no folder {folder}; make it first")
    try:
        from transformer_xl.serving.api.app import make_app
        from transformer_xl.serving.http.logs import LinesAside
        from transformer_xl.serving.http.server import make_server, serve
    except ModuleNotFoundError as error:
        raise InputError(f"serving needs {error.name}; install it with: pip install 'transformer-xl[serve]'") from None
    from transformer_xl.console import say
    from transformer_xl.devices import choose_device, computing_on, half_of
    from transformer_xl.serving.api.saved import writable_by_others
    from transformer_xl.serving.limits import Limits

    asked = Limits(
        admitted=arguments.admit,
        sessions=arguments.max_sessions,
        learning=arguments.max_learning,
        deadline_seconds=arguments.deadline,
    )
    runs, device = arguments.runs or [None], choose_device(arguments.device)
    where = {"device": str(device), "precision": arguments.precision}
    models, limits = load_models(runs, memory=arguments.memory, limits=asked, **where)
    if (limits.admitted, limits.sessions) != (asked.admitted, asked.sessions):
        say(
            f"there is memory for {limits.admitted} texts and {limits.sessions} sessions at a time, not for {asked.admitted} and {asked.sessions};"
            " a smaller --memory makes room for more, a smaller --max-sessions for more texts"
        )
    if folder is not None and writable_by_others(folder):
        say(f"others can write to {folder}, and so change what sessions remember; run: chmod go-w {folder}")
    host, allowed = arguments.host, arguments.allow_host
    app = make_app(
        models,
        limits=limits,
        sessions=folder,
        host=host,
        allowed=allowed,
        key=key,
        replica=arguments.replica,
        log_request=LinesAside() if arguments.log_requests else None,
    )
    server = make_server(app, limits=limits, host=host, port=arguments.port)
    names = ", ".join(one.name for one in models)
    say(computing_on(device, half=half_of(arguments.precision, device)))
    if not serve(server, ready=lambda address: say(f"serving {names} at {address}")):
        sys.stderr.flush()
        os._exit(0)
    return 0


def load_models(
    runs: list[str | None], *, memory: int | None, limits: "Limits", device: str, precision: "Precision"
) -> tuple[list["Served"], "Limits"]:
    """The models, and the limits that there is memory for: reckoned before any of it is taken."""
    from transformer_xl.batching.budget import Cost, free_on
    from transformer_xl.checkpoint.box import BOX
    from transformer_xl.serving.api.admission import within_memory
    from transformer_xl.serving.api.models import Served, name_of

    models, costs, fitting = list[Served](), list[Cost](), limits
    for run in runs:
        checkpoint = load_named(run, memory=memory, device=device, precision=precision).checkpoint
        costs.append(Cost.of(checkpoint.model, segment=checkpoint.config.training.segment))
        fitting = within_memory(limits, costs, available=free_on(checkpoint.model.vocabulary.bias_V.device))
        models.append(Served(name_of(Path(run or BOX), [one.name for one in models]), checkpoint, limits=limits))
    return models, fitting


def api_key(file: str | None) -> str | None:
    """Never a word of the command line, which every user of the machine can read."""
    if file is None:
        return os.environ.get("TXL_API_KEY") or None
    try:
        key = Path(file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise InputError(f"--api-key-file: {file} cannot be read ({error.strerror}); give a file with a key") from None
    except UnicodeDecodeError:
        raise InputError(f"--api-key-file: {file} is not UTF-8; write a key into it") from None
    if not key:
        raise InputError(f"--api-key-file: {file} is empty; write a key into it")
    return key
