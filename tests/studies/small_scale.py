"""The smallest scale that still has every row: 2 layers of width 16, three steps."""

from transformer_xl.studies.models import Base
from transformer_xl.studies.scales import Scale

WORDS = {
    "model.n_layer": "2",
    "model.d_model": "16",
    "model.n_head": "2",
    "model.d_head": "8",
    "model.d_inner": "32",
    "model.memory": "8",
    "training.segment": "8",
    "training.lanes": "4",
    "training.steps": "3",
    "training.validate_every": "0",
    "training.validation_tokens": "60",
    "training.save_every": "0",
    "training.log_every": "1",
}
BYTES = Base(name="minimal", corpus="enwik8", preset="tiny-byte", words=WORDS)
RECURRENT = {name: word for name, word in WORDS.items() if name.startswith("training.")}
RECURRENT |= {"model.n_layer": "1", "model.d_model": "16", "model.d_hidden": "16"}
LSTM = Base(name="minimal", corpus="enwik8", preset="tiny-byte-lstm", words=RECURRENT)
QRNN = Base(name="minimal", corpus="enwik8", preset="tiny-byte-qrnn", words=RECURRENT)
READING = Base(name="minimal", corpus="enwik8", preset="bytes", words=WORDS)
SENTENCES = Base(name="minimal", corpus="ptb", preset="tiny-byte", words=WORDS)
MINIMAL = Scale(
    name="minimal",
    ablation=BYTES,
    standard=BYTES,
    best=BYTES,
    sentences=SENTENCES,
    reading=READING,
    reading_words=BYTES,
    lstm=LSTM,
    qrnn=QRNN,
    seeds={"ablation-encoding": 2},
    test_tokens=150,
    window_tokens=40,
    context_step=4,
    longest_context=16,
    context_tokens=40,
    bench="tiny",
    written_tokens=(12, 12, 20),
    caveat="Nothing can be learned from these.",
)
