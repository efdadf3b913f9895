"""What a server counts, as Prometheus reads it."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from transformer_xl.serving.api.admission import Admission
from transformer_xl.serving.api.models import Served
from transformer_xl.serving.api.sessions import Sessions
from transformer_xl.serving.http.gate import BOUNDS_SECONDS, Histogram, Requests

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

COUNTED = {
    "tokens_read": "Tokens read from prompts and texts.",
    "tokens_written": "Tokens drawn.",
    "steps": "Steps of all texts of a model together.",
    "step_seconds": "Time spent in these steps.",
    "threads_abandoned": "Threads that never came back from a model.",
    "threads_died": "Threads that ended by an error and were replaced.",
}


def _of(model: str) -> str:
    """A label: names are folders', which may hold anything."""
    for character, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n")):
        model = model.replace(character, escaped)
    return f'{{model="{model}"}}'


def _histogram(name: str, route: str, histogram: Histogram) -> Iterator[str]:
    """Each bucket counts all below its bound, as Prometheus has it."""
    below = list(accumulate(histogram.counts))
    for bound, count in zip((*map(str, BOUNDS_SECONDS), "+Inf"), below, strict=True):
        yield f'{name}_bucket{{route="{route}",le="{bound}"}} {count}'
    yield f'{name}_sum{{route="{route}"}} {histogram.sum:.10g}'
    yield f'{name}_count{{route="{route}"}} {below[-1]}'


def prometheus(requests: Requests, models: Mapping[str, Served], *, admission: Admission, sessions: Sessions) -> str:
    lines = list[str]()

    def metric(name: str, kind: str, about: str, values: Iterable[tuple[str, float]]) -> None:
        lines.append(f"# HELP txl_{name} {about}")
        lines.append(f"# TYPE txl_{name} {kind}")
        lines.extend(f"txl_{name}{labels} {value:.10g}" for labels, value in values)

    by_route = sorted(requests.answered.items())
    answered = [(f'{{route="{route}",status="{status}"}}', count) for (route, status), count in by_route]
    metric("requests_total", "counter", "Requests answered.", answered)
    for name, about, by_route_seconds in (
        ("request_seconds", "Time from a request to the end of its answer.", requests.seconds),
        ("first_byte_seconds", "Time from a request to the first byte of its answer.", requests.first_byte_seconds),
    ):
        metric(name, "histogram", about, [])
        for route, histogram in sorted(by_route_seconds.items()):
            lines.extend(_histogram(f"txl_{name}", route, histogram))
    labelled = [(_of(name), served) for name, served in models.items()]
    for name, about in COUNTED.items():
        values = [(label, float(getattr(served.counts, name))) for label, served in labelled]
        metric(f"{name}_total", "counter", about, values)
    under_way = [(label, float(served.under_way)) for label, served in labelled]
    well = [(label, float(served.state() == "ok")) for label, served in labelled]
    metric("under_way", "gauge", "Texts and tasks that a model's thread has.", under_way)
    metric("answering", "gauge", "1 where a model can answer.", well)
    limits = admission.limits
    for name, about, value in (
        ("in_flight", "Texts and tasks admitted.", admission.in_flight),
        ("in_flight_most", "How many are admitted: as asked for, or as there is memory for.", limits.admitted),
        ("sessions", "Sessions in memory.", len(sessions)),
        ("sessions_most", "How many there may be: as asked for, or as there is memory for.", limits.sessions),
        ("sessions_learning", "Of these, the sessions that learn.", len(sessions.learning)),
        ("sessions_learning_most", "How many there may be.", limits.learning),
        ("draining", "1 after SIGTERM.", int(admission.draining)),
    ):
        metric(name, "gauge", about, [("", value)])
    return "\n".join(lines) + "\n"
