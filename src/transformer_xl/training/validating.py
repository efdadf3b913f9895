"""How good the model is by now: the first tokens of valid, with the lengths of training; then a sample of text, for people."""

from transformer_xl.checkpoint import RunFolder
from transformer_xl.config import EvaluationConfig, RunConfig
from transformer_xl.console import progress, say
from transformer_xl.data.store import Split, Store
from transformer_xl.decoding import Sampling, generate, start_tokens
from transformer_xl.evaluation import UNIT_NAMES, Figures, evaluate, make_rule
from transformer_xl.files import write_text
from transformer_xl.model import AnyModel
from transformer_xl.training.lifetime import StopAsked, StopRequest
from transformer_xl.training.optimisation import PLATEAU_FACTOR
from transformer_xl.training.recording import Metrics
from transformer_xl.training.session import Measured, Session

SAMPLE_TOKENS = 200


def validate(session: Session, run: RunFolder, store: Store, metrics: Metrics, stop: StopRequest) -> Measured | None:
    """On the first tokens of the valid split, with the lengths of training; then a sample of text, for people. A request to stop ends it.

    Rank 0 does it, and tells the others what it found.
    """
    config, unit = session.config, store.manifest.unit
    split, lengths = validation_split(session, store), lengths_of_training(config)

    def measure(model: AnyModel) -> Figures | None:
        try:
            with progress("validating", total=len(split) - 1, unit="tokens") as advance:
                rule = make_rule(model, lengths, tokens=len(split))
                found = evaluate(model, split, rule=rule, advance=stop.interrupting(advance))
                sample(model, session, run, store)
                return found
        except StopAsked:
            return None

    with session.model_to_use() as model_to_use:
        found = session.ranks.from_first(lambda: measure(model_to_use))
    if found is None:
        return None
    metrics.write("validation", step=session.step, loss_nats=found.loss_nats, bits_per_byte=found.bits_per_byte)
    say(f"step {session.step}: valid {UNIT_NAMES[unit]} {found.value(unit):.4f}")
    if config.training.schedule == "plateau" and session.best_nats is not None and found.loss_nats >= session.best_nats:
        session.rate_scale = max(session.rate_scale * PLATEAU_FACTOR, config.training.floor)
    return Measured(step=session.step, figures=found)


def sample(model: AnyModel, session: Session, run: RunFolder, store: Store) -> None:
    prompt = start_tokens(store.tokenizer, "")
    drawn = list(generate(model, prompt, tokens=SAMPLE_TOKENS, sampling=Sampling(seed=session.config.training.seed)))
    path = run.made("samples") / f"step-{session.step:08d}.txt"
    write_text(path, store.tokenizer.decode(drawn) + "\n")


def validation_split(session: Session, store: Store) -> Split:
    """As many tokens as the configuration asks for and the clock allows."""
    split, table, asked = store.split("valid"), session.timetable, session.config.training.validation_tokens
    split = split.first(asked) if asked else split
    return split.first(max(2, table.validation_tokens)) if table is not None else split


def lengths_of_training(config: RunConfig) -> EvaluationConfig:
    model = config.model
    return EvaluationConfig(
        segment=config.training.segment, memory=model.memory, clamp_len=model.clamp_len, same_length=model.same_length
    )
