"""How large a study is: the published models, small ones for one GPU or a patient CPU, tiny ones for two cores and an hour. Data only."""

from dataclasses import dataclass, field
from typing import Literal

from transformer_xl.errors import ConfigError, suggest
from transformer_xl.studies.models import Base


@dataclass(frozen=True, kw_only=True)
class Scale:
    name: str
    ablation: Base
    """Tables 6 and 8 (second group) and Appendix A."""
    standard: Base
    """Table 8 (first group) and the third block of Table 6."""
    best: Base
    """Appendix E: the paper's best model."""
    sentences: Base
    """Table 7: a corpus whose sentences have no order."""
    reading: Base
    """Learning while reading, of bytes or characters."""
    reading_words: Base
    lstm: Base | None
    """Of about as many parameters as `standard`; None: Table 8 without its first group."""
    qrnn: Base | None
    seeds: dict[str, int] = field(default_factory=dict)
    """How many models each row is the mean of, by study; 1 where it is not named."""
    test_tokens: int | None = None
    """How many tokens of the valid and of the test split are read; None: all."""
    window_tokens: int | None = None
    """How many tokens of the test split are read in a window each, which costs as many times more as a window has tokens; None: all."""
    context_step: int
    """Of RECL: how much longer each context is than the one before."""
    longest_context: int
    context_tokens: int
    """How many tokens of the test split RECL reads with each context."""
    bench: Literal["tiny", "full"]
    written_tokens: tuple[int, ...] = (500, 500, 1000)
    """Of each example of Appendix E: the paper's own lengths."""
    caveat: str


# Pre-norm and Muon, as in every row: a model learns as much in a third of the time. Segments are so short that a longer attention has something to give:
# models of this size make use of about a hundred bytes.
_TINY = Base(
    name="tiny",
    corpus="enwik8",
    preset="modern-byte",
    words={
        "model.d_model": "128",
        "model.n_head": "4",
        "model.d_inner": "512",
        "model.memory": "32",
        "training.segment": "32",
        "training.lanes": "64",
        "training.steps": "800",
        "training.precision": "bfloat16",
        "training.validate_every": "0",
        "training.validation_tokens": "20000",
        "training.save_every": "400",
        "evaluation.segment": "32",
    },
)
_SMALL = Base(
    name="small",
    corpus="enwik8",
    preset="tiny-byte",
    words={
        "model.n_layer": "6",
        "model.d_model": "256",
        "model.n_head": "8",
        "model.d_inner": "1024",
        "model.memory": "128",
        "training.segment": "128",
        "training.steps": "5000",
        "training.learning_rate": "1e-3",
        "training.warm_up": "200",
        "training.average_decay": "0.999",
        "training.validate_every": "1000",
        "training.save_every": "500",
        "evaluation.segment": "128",
    },
)


_SENTENCES = {
    "model.memory": "32",
    "training.segment": "32",
    "training.lanes": "16",
    "evaluation.segment": "32",
    "evaluation.memory": "128",
}


def _recurrent(base: Base, *, cell: str, d_hidden: int) -> Base:
    """A recurrent network of about as many parameters, trained on as much text at a time and for as many steps."""
    shared = {
        name: value
        for name, value in base.words.items()
        if name == "model.d_model" or (name.startswith("training.") and name != "training.learning_rate")
    }
    words = {**shared, "model.d_hidden": str(d_hidden)}
    return Base(name=base.name, corpus=base.corpus, preset=f"tiny-byte-{cell}", words=words)


TINY = Scale(
    name="tiny",
    ablation=_TINY,
    standard=_TINY,
    best=_TINY,
    sentences=Base(
        name="tiny",
        corpus="ptb",
        preset="tiny-word",
        words={**_SENTENCES, "training.steps": "1500", "training.validate_every": "0", "training.save_every": "500"},
    ),
    reading=Base(name="tiny", corpus="enwik8", preset="bytes", words={"training.steps": "1500"}),
    reading_words=Base(name="tiny", corpus="ptb", preset="words", words={"training.steps": "1000"}),
    lstm=_recurrent(_TINY, cell="lstm", d_hidden=332),
    qrnn=_recurrent(_TINY, cell="qrnn", d_hidden=376),
    seeds={"ablation-encoding": 5, "ablation-fragmentation": 5, "memory-matched": 5, "recl": 3, "adaptation": 3},
    test_tokens=50_000,
    window_tokens=10_000,
    context_step=16,
    longest_context=256,
    context_tokens=50_000,
    bench="tiny",
    caveat="Models of under a million parameters that read a few million symbols each, where the paper's have 128 million and read a hundred"
    " million words many times over: an ordering that appears here is a sign that the code does what the paper describes, one that does not"
    " appear says little about the paper.",
)
SMALL = Scale(
    name="small",
    ablation=_SMALL,
    standard=_SMALL,
    best=_SMALL,
    sentences=Base(name="small", corpus="ptb", preset="tiny-word", words=_SENTENCES),
    reading=Base(name="small", corpus="enwik8", preset="bytes"),
    reading_words=Base(name="small", corpus="ptb", preset="words"),
    lstm=_recurrent(_SMALL, cell="lstm", d_hidden=876),
    qrnn=_recurrent(_SMALL, cell="qrnn", d_hidden=976),
    seeds={"ablation-encoding": 3, "ablation-fragmentation": 3, "memory-matched": 3, "recl": 3, "adaptation": 3},
    test_tokens=500_000,
    window_tokens=20_000,
    context_step=64,
    longest_context=1_024,
    context_tokens=50_000,
    bench="full",
    caveat="Models a hundredth the size of the paper's, on other data, trained on a small part of it: orderings can be compared with the paper's,"
    " figures cannot.",
)
PAPER = Scale(
    name="paper",
    ablation=Base(name="paper-ablation", corpus="wikitext-103", preset="wikitext-103-ablation"),
    standard=Base(name="paper-standard", corpus="wikitext-103", preset="wikitext-103-standard"),
    best=Base(name="paper-large", corpus="wikitext-103", preset="wikitext-103-large"),
    sentences=Base(name="paper-ablation", corpus="lm1b", preset="lm1b-ablation"),
    reading=Base(name="paper", corpus="enwik8", preset="enwik8-12l"),
    reading_words=Base(name="paper-standard", corpus="wikitext-103", preset="wikitext-103-standard"),
    lstm=Base(name="paper-standard", corpus="wikitext-103", preset="wikitext-103-lstm"),
    qrnn=Base(name="paper-standard", corpus="wikitext-103", preset="wikitext-103-qrnn"),
    context_step=100,
    longest_context=1_600,
    context_tokens=100_000,
    bench="full",
    caveat="The published configurations; widths of the ablation models are fitted to the parameter counts that the paper states, and the paper says"
    " neither how many steps they were trained nor how rows without memory were evaluated.",
)
SCALES = {scale.name: scale for scale in (TINY, SMALL, PAPER)}


def find_scale(name: str) -> Scale:
    if name not in SCALES:
        raise ConfigError(f"no scale {name}{suggest(name, SCALES)}")
    return SCALES[name]
