"""Sessions that learn while they read: what is asked for becomes settings, and is opened where there is room.

given in the request  >  what `txl tune-adaptation` wrote into the run  >  DEFAULT
"""

from collections.abc import Generator, Sequence
from dataclasses import replace

from transformer_xl.adaptation.statistics import Statistics, read_statistics
from transformer_xl.batching.budget import LearningCost
from transformer_xl.batching.events import Mailbox
from transformer_xl.batching.learning import LESSON_WEIGHT, Learned, Learner, learn
from transformer_xl.batching.requests import ReadRequest
from transformer_xl.checkpoint.adapter_file import fingerprint
from transformer_xl.checkpoint.run_folder import GRADIENT_SIZES
from transformer_xl.config import AdaptationConfig
from transformer_xl.errors import CheckpointError, ConfigError, InputError
from transformer_xl.inference.reader import CHUNK
from transformer_xl.model.adapters import UP, check_rank
from transformer_xl.serving.api.admission import Ticket
from transformer_xl.serving.api.bodies import Adapt
from transformer_xl.serving.api.models import Served
from transformer_xl.serving.api.refusals import Refusal
from transformer_xl.serving.api.sessions import Session, Sessions

DEFAULT = AdaptationConfig(
    rate=0.05, decay=0.001, learns="adapters", rank=8, cache_lambda=0.1, cache_theta=0.1, cache_size=2000
)
"""Where nothing was tuned: what helped a small model of bytes on a book (docs/reading.md)."""
OF_WEIGHTS = ("rate", "rule", "decay", "learns", "rank")
WRONG = (
    "adapt: what was tuned for this run is damaged, or is of other weights; run txl tune-adaptation again and start the server anew,"
    " or remove adaptation.json from the run"
)
NO_SIZES = "adapt.rule: rms needs the sizes of gradients that txl tune-adaptation gathers for a run, of the same rank; take sgd"
NOTHING = "adapt: learning so only hurt where this run was tuned; give a rate or a cache_lambda yourself"
ALL = "adapt.learns: only all is for a recurrent model"
RANK = "adapt.rank: larger than this model's narrowest matrix; take a smaller one"
STRAYED = "the weights of this session have moved to where its model computes no numbers; open another with a smaller adapt.rate"


def settings(served: Served, asked: Adapt) -> AdaptationConfig:
    if served.tuned_is_wrong:
        raise Refusal(409, WRONG)
    given = asked.model_dump(exclude={"by", "compare"}, exclude_none=True)
    how = replace(DEFAULT, learns="all") if served.model.config.recurrent else DEFAULT
    if served.tuned is not None:
        tuned: AdaptationConfig = getattr(served.tuned, asked.by).how
        # A rate belongs to the weights that it moved, and to their rule.
        if any(given.get(name, getattr(tuned, name)) != getattr(tuned, name) for name in ("rule", "learns", "rank")):
            tuned = replace(tuned, **{name: getattr(how, name) for name in OF_WEIGHTS})
        how = tuned
    segment = min(how.segment or served.checkpoint.config.evaluation.segment, CHUNK)
    how = replace(how, **{"segment": segment, "cache_size": how.cache_size or DEFAULT.cache_size, **given})
    if asked.by != "both":
        how = how.without("cache" if asked.by == "gradient" else "gradient")
    if not (how.moves or how.caches):
        raise Refusal(409, NOTHING)
    if how.moves and served.model.config.recurrent and how.learns != "all":
        raise Refusal(422, ALL)
    if how.moves and how.learns == "adapters":
        try:
            check_rank(served.model, how.rank)
        except ConfigError:
            raise Refusal(422, RANK) from None
    return how


async def open_learning(served: Served, asked: Adapt, sessions: Sessions, ticket: Ticket) -> Session:
    """Made on the model's thread: a model of its own parameters takes a while."""
    how, compare = settings(served, asked), asked.compare
    taken = LearningCost.of(served.model, how, compare=compare).session
    sessions.check_room(served, learning_bytes=taken)
    mailbox = ticket.take(served)

    def pieces() -> Generator[int, None, Learner | None]:
        yield 0
        try:
            statistics = statistics_for(served, how)
            return Learner.begin(served.model, how, statistics=statistics, compare=compare)
        except ConfigError:
            return None

    served.submit(ReadRequest(pieces(), mailbox=mailbox))
    learner = await ticket.result(mailbox)
    if not isinstance(learner, Learner):
        raise Refusal(409, NO_SIZES)
    return sessions.add(Session(served=served, reader=learner, text=served.text_stream(), learning_bytes=taken))


def statistics_for(served: Served, how: AdaptationConfig) -> Statistics | None:
    """Of the weights that move, where the rule asks for them. A ConfigError where there are none."""
    if not (how.moves and how.rule == "rms"):
        return None
    run = served.checkpoint.run
    if run is None or not (run.path / GRADIENT_SIZES).exists():
        raise ConfigError(NO_SIZES)
    try:
        base = fingerprint(served.model.state_dict())
        found = read_statistics(run.path / GRADIENT_SIZES, model=served.model, base=base)
    except CheckpointError:
        raise ConfigError(NO_SIZES) from None
    adapters = how.learns == "adapters"
    return replace(found, sizes={name: size for name, size in found.sizes.items() if name.endswith(UP) == adapters})


async def learned(
    served: Served, learner: Learner, tokens: Sequence[int], *, ticket: Ticket, mailbox: Mailbox
) -> Learned:
    """A fork that has read on, and what each token cost it before it learned from it."""

    def pieces() -> Generator[int, None, Learned | None]:
        try:
            return (yield from learn(learner, tokens))
        except InputError:
            return None

    served.submit(ReadRequest(pieces(), mailbox=mailbox, weight=LESSON_WEIGHT if learner.how.moves else 1))
    found = await ticket.result(mailbox)
    if not isinstance(found, Learned):
        raise Refusal(409, STRAYED)
    return found
