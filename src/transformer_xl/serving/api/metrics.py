"""What a server counts, as Prometheus reads it."""

from collections.abc import Iterable

from transformer_xl.batching.scheduler import Counts
from transformer_xl.serving.http.gate import Requests
from transformer_xl.serving.limits import Limits

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


def prometheus(
    requests: Requests,
    models: dict[str, tuple[Counts, int, bool]],
    *,
    limits: Limits,
    in_flight: int,
    sessions: int,
    draining: bool,
) -> str:
    """`models`: by name, what each counted, how many texts and tasks it has under way, and whether it can answer."""
    lines = list[str]()

    def metric(name: str, kind: str, about: str, values: Iterable[tuple[str, float]]) -> None:
        lines.append(f"# HELP txl_{name} {about}")
        lines.append(f"# TYPE txl_{name} {kind}")
        lines.extend(f"txl_{name}{labels} {value:.10g}" for labels, value in values)

    by_route = sorted(requests.answered.items())
    answered = [(f'{{route="{route}",status="{status}"}}', count) for (route, status), count in by_route]
    metric("requests_total", "counter", "Requests answered.", answered)
    seconds = [(f'{{route="{route}"}}', value) for route, value in sorted(requests.seconds.items())]
    metric("request_seconds_total", "counter", "Time from request to the end of its answer.", seconds)
    for name, about in COUNTED.items():
        values = [(_of(model), float(getattr(counts, name))) for model, (counts, _, _) in models.items()]
        metric(f"{name}_total", "counter", about, values)
    under_way = [(_of(model), float(count)) for model, (_, count, _) in models.items()]
    well = [(_of(model), float(answers)) for model, (_, _, answers) in models.items()]
    metric("under_way", "gauge", "Texts and tasks that a model's thread has.", under_way)
    metric("answering", "gauge", "1 where a model can answer.", well)
    metric("in_flight", "gauge", "Texts and tasks admitted.", [("", in_flight)])
    metric(
        "in_flight_most",
        "gauge",
        "How many are admitted: as asked for, or as there is memory for.",
        [("", limits.admitted)],
    )
    metric("sessions", "gauge", "Sessions in memory.", [("", sessions)])
    metric(
        "sessions_most",
        "gauge",
        "How many there may be: as asked for, or as there is memory for.",
        [("", limits.sessions)],
    )
    metric("draining", "gauge", "1 after SIGTERM.", [("", int(draining))])
    return "\n".join(lines) + "\n"
