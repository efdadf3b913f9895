"""What other software is given: the authors' state comes back bit by bit, ONNX computes what torch computes, and what cannot be said is refused by name."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import transformer_xl as txl
from foreign import found
from small_models import build
from transformer_xl.checkpoint import About, Checkpoint, load_checkpoint, write_checkpoint
from transformer_xl.cli import main
from transformer_xl.config import RunConfig, TrainingConfig
from transformer_xl.data.text.tokenizers import ByteTokenizer, CharTokenizer, NumberTokenizer, Tokenizer
from transformer_xl.errors import CheckpointError, ConfigError
from transformer_xl.interop.exporting import export
from transformer_xl.interop.formats import onnx_graph
from transformer_xl.interop.formats.foreign_model import Lengths
from transformer_xl.interop.importing import import_run

VARIANTS = [path.parent for path in found("original/*/about.json")]
FREQUENCIES = "pos_emb.inv_freq"


def checkpoint_of(folder: Path, *, tokenizer: Tokenizer | None = None, **changes: object) -> Checkpoint:
    model = build(**changes).float()
    config = RunConfig(model=model.config, training=TrainingConfig(segment=4))
    about = About(corpus="none", rule="none", unit="perplexity_per_word", data="/somewhere/here", step=0)
    tokenizer = tokenizer or NumberTokenizer(model.config.vocabulary)
    write_checkpoint(folder, config=config, about=about, weights=model.state_dict(), tokenizer=tokenizer)
    return load_checkpoint(folder)


# --- the authors' code


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda path: path.name)
def test_the_authors_state_comes_back_bit_by_bit(variant, tmp_path):
    about = json.loads((variant / "about.json").read_text())
    import_run(variant / ("legacy" if (variant / "legacy").exists() else "zip"), tmp_path / "first", lengths=Lengths())
    first = load_checkpoint(tmp_path / "first")
    export(first, tmp_path / "theirs", to="original")

    state = torch.load(tmp_path / "theirs" / "state_dict.pt", weights_only=True)
    assert state.keys() == about["state_dict"].keys()
    for name, wanted in about["state_dict"].items():
        assert list(state[name].shape) == wanted["shape"], name
        if name != FREQUENCIES:  # computed here: equal to the last bits
            kept = state[name].half() if wanted["dtype"] == "float16" else state[name]
            assert hashlib.sha256(kept.numpy().tobytes()).hexdigest() == wanted["sha256"], name
    for names in about["tied_parameters"]:
        assert len({state[name].data_ptr() for name in names}) == 1
    told = json.loads((tmp_path / "theirs" / "constructor.json").read_text())
    projected = any(name.startswith("crit.out_projs.") for name in state)  # where none is, none can be tied
    assert told == {
        name: about["constructor"][name] if name != "tie_projs" or projected else [False] * len(told["tie_projs"])
        for name in told
    }

    import_run(tmp_path / "theirs", tmp_path / "second", lengths=Lengths())
    second = load_checkpoint(tmp_path / "second")
    assert (first.folder / "model.safetensors").read_bytes() == (second.folder / "model.safetensors").read_bytes()
    assert first.config.model == second.config.model
    assert first.tokenizer.decode(range(20)) == second.tokenizer.decode(range(20))


SHAPES = {
    "plain": {},
    "narrow, partly tied": {"cutoffs": (4, 8), "d_embed": 6, "tie_projections": (False, True, False)},
    "div_val 2, untied": {"cutoffs": (4, 8), "div_val": 2, "projections": "always", "tie_embeddings": False},
    "pre-norm, clamped, same length": {"norm": "pre", "clamp_len": 3, "same_length": True},
    "half frequencies": {"frequencies": "float16"},
    "learned distances": {"encoding": "shaw_biased", "learned_positions": 9, "clamp_len": 4},
    "positions in each layer": {"encoding": "per_layer", "memory": 0, "d_head": 4},
    "sinusoid": {"encoding": "absolute", "memory": 0, "norm": "pre_keys"},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_our_model_comes_back_from_the_authors_state(shape, tmp_path):
    ours = checkpoint_of(tmp_path / "ours", **SHAPES[shape])
    export(ours, tmp_path / "theirs", to="original")
    import_run(tmp_path / "theirs", tmp_path / "back", lengths=Lengths())
    back = load_checkpoint(tmp_path / "back")
    for name, value in ours.model.state_dict().items():
        assert torch.equal(back.model.state_dict()[name], value), name
    told_in_full = ("d_embed", "projections", "tie_projections", "init_std", "projection_init_std")
    for name, value in ours.config.model.__dict__.items():
        if name not in told_in_full:
            assert getattr(back.config.model, name) == value, name


@pytest.mark.parametrize(
    "tokenizer",
    [ByteTokenizer(), ByteTokenizer(bytes(range(32, 45)), dropped=b"\n"), CharTokenizer("abcdefghijkl ")],
    ids=["bytes", "some bytes", "characters"],
)
def test_bytes_and_characters_go_as_the_authors_write_them(tokenizer, tmp_path):
    ours = checkpoint_of(tmp_path / "ours", tokenizer=tokenizer, vocabulary=tokenizer.size)
    export(ours, tmp_path / "theirs", to="original")
    import_run(tmp_path / "theirs", tmp_path / "back", lengths=Lengths())
    back = load_checkpoint(tmp_path / "back").tokenizer
    assert back.kind == tokenizer.kind
    assert back.decode_bytes(range(back.size)) == tokenizer.decode_bytes(range(tokenizer.size))


def test_a_vocabulary_that_cannot_go_along_is_said(tmp_path):
    exported = export(checkpoint_of(tmp_path / "ours"), tmp_path / "theirs", to="original")
    assert exported.files == ["constructor.json", "state_dict.pt"]
    assert "number tokenizer" in exported.notes[-1]


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("initial_memory", {"initial_memory": "zeros"}),
        ("same_length_keys", {"same_length": True, "same_length_keys": "memory+1"}),
        ("share_biases", {"share_biases": False}),
        ("norm_eps", {"norm_eps": 1e-12}),
        ("encoding", {"encoding": "shaw"}),
        ("final_norm", {"norm": "pre", "final_norm": True}),
        ("neighbours", {"neighbours": 2}),
        ("ngrams", {"ngrams": (2,), "ngram_rows": 7, "d_ngram": 3}),
        ("norm", {"encoding": "absolute", "memory": 0, "norm": "pre"}),
        ("projections", {"cutoffs": (4, 8), "div_val": 2}),
        ("auxiliary_targets", {"auxiliary_targets": 1}),
        ("d_model", {"encoding": "per_layer", "memory": 0}),
        ("learned_positions", {"encoding": "shaw_biased", "learned_positions": 6}),
    ],
)
def test_what_the_authors_code_cannot_compute_is_refused(field, changes, tmp_path):
    with pytest.raises(ConfigError, match=rf"^model\.{field}: "):
        export(checkpoint_of(tmp_path / "ours", **changes), tmp_path / "theirs", to="original")
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize("to", ["huggingface", "original", "onnx"])
def test_a_recurrent_model_is_refused_by_name(to, recurrent_run, tmp_path, capsys):
    assert main(["export", str(recurrent_run), "--to", to, "--out", str(tmp_path / "out")]) == 2
    assert "model.cell: a recurrent model (lstm)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_constructor_that_is_none_is_refused(tmp_path, capsys):
    export(checkpoint_of(tmp_path / "ours"), tmp_path / "theirs", to="original")
    path = tmp_path / "theirs" / "constructor.json"
    told = json.loads(path.read_text())
    for name, value in {"attn_type": [0], "n_layer": "2", "clamp_len": None, "cutoffs": {"a": 1}}.items():
        path.write_text(json.dumps({**told, name: value}))
        assert main(["import", str(path), "--out", str(tmp_path / "run")]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    path.unlink()
    assert main(["import", str(tmp_path / "theirs"), "--out", str(tmp_path / "run")]) == 2
    assert "no whole model" in capsys.readouterr().err


# --- safetensors


@pytest.mark.parametrize("kind", ["trained_run", "recurrent_run"])
def test_a_safetensors_folder_stands_for_the_run(kind, request, tmp_path, capsys):
    run, out = request.getfixturevalue(kind), tmp_path / "out"
    assert main(["export", str(run), "--to", "safetensors", "--out", str(out)]) == 0
    names = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert names == {"about.json", "checksums.json", "config.json", "model.safetensors", "tokenizer/tokenizer.json"}
    assert json.loads((out / "about.json").read_text())["data"] == ""
    assert txl.load(out).generate("def ", tokens=8, seed=1) == txl.load(run).generate("def ", tokens=8, seed=1)
    assert main(["evaluate", str(out)]) == 2
    assert "no data came with it" in capsys.readouterr().err
    store = load_checkpoint(run).about.data
    assert main(["evaluate", str(out), "--data", store, "--tokens", "50"]) == 0
    assert main(["export", str(run), "--to", "safetensors", "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err


# --- ONNX

GRAPHS = {
    "clamped, same length, div_val 2": {"cutoffs": (4, 8), "div_val": 2, "same_length": True, "clamp_len": 3},
    "zeros, own biases, pre-norm, partly tied": {
        "cutoffs": (4, 8),
        "d_embed": 6,
        "tie_projections": (False, True, False),
        "initial_memory": "zeros",
        "share_biases": False,
        "norm": "pre",
        "final_norm": True,
    },
    "learned distances, untied": {"encoding": "shaw_biased", "tie_embeddings": False},
    "positions in each layer": {"encoding": "per_layer", "memory": 0},
    "neighbours": {"neighbours": 3, "norm": "pre", "final_norm": True},
    "runs of tokens": {"ngrams": (2, 3), "ngram_rows": 11, "d_ngram": 5},
}


@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=pytest.mark.slow) if "learned" in shape else shape for shape in GRAPHS]
)
def test_onnxruntime_gives_what_torch_gives(shape, tmp_path):
    """Segments that follow each other, of other lengths than the graph was traced and checked with, from the first memory to one that is full."""
    onnxruntime = pytest.importorskip("onnxruntime")
    checkpoint = checkpoint_of(tmp_path / "ours", **GRAPHS[shape])
    export(checkpoint, tmp_path / "out", to="onnx")
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx", providers=["CPUExecutionProvider"])
    model, remembers = checkpoint.model, checkpoint.model.config.memory > 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["longest_memory"] == model.config.memory
    for lanes, lengths in ((3, (2, 5, 1)), (1, (1, 1, 3))):
        memory = model.start_memory(lanes)
        layers = [layer.numpy() for layer in memory.layers]
        for length in lengths:
            tokens_BT = torch.randint(model.config.vocabulary, (lanes, length))
            given = {f"memory_{n}": layer for n, layer in enumerate(layers)} if remembers else {}
            given |= {} if memory.recent_BP is None else {"recent": memory.recent_BP.numpy()}
            log_probabilities, *found = session.run(None, {"tokens": tokens_BT.numpy(), **given})
            layers = found[: model.config.n_layer]
            with torch.no_grad():
                output = model(tokens_BT, memory=memory)
                wanted_BTV = model.log_probabilities(output.hidden_BTD)
            memory = output.memory
            if memory.recent_BP is not None:
                assert np.array_equal(found[-1], memory.recent_BP.numpy())
            np.testing.assert_allclose(log_probabilities, wanted_BTV.numpy(), rtol=0, atol=1e-5)
            for ours, theirs in zip(memory.layers if remembers else (), layers, strict=True):
                np.testing.assert_allclose(theirs, ours.numpy(), rtol=0, atol=1e-5)


def test_onnx_gives_the_losses_of_the_code_that_made_the_checkpoint(tmp_path, capsys):
    """Import, export, run: the numbers of an old checkpoint come out of onnxruntime."""
    onnxruntime = pytest.importorskip("onnxruntime")
    variant = found("original/b-adaptive-div1", "original/a-plain")[0]
    assert main(["import", str(variant / "zip"), "--out", str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), "--to", "onnx", "--out", str(tmp_path / "out")]) == 0
    assert "onnxruntime gives what torch gives" in capsys.readouterr().out
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx", providers=["CPUExecutionProvider"])
    expected = np.load(variant / "expected.npz")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    tokens_TB = expected["seg0_input"]
    layers = [np.zeros((tokens_TB.shape[1], 0, config["width"]), dtype=np.float32)] * config["layers"]
    for segment in range(int(expected["n_segments"])):
        tokens_TB, targets_TB = expected[f"seg{segment}_input"], expected[f"seg{segment}_target"]
        given = {f"memory_{n}": layer for n, layer in enumerate(layers)}
        log_probabilities, *layers = session.run(None, {"tokens": tokens_TB.T.copy(), **given})
        loss_BT = -np.take_along_axis(log_probabilities, targets_TB.T[..., None], axis=-1)[..., 0]
        np.testing.assert_allclose(loss_BT, expected[f"seg{segment}_nll"].T, rtol=0, atol=5e-6)


def test_a_graph_that_differs_is_not_kept(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    checkpoint = checkpoint_of(tmp_path / "ours", n_layer=1)

    def write_other(model, path, write=onnx_graph.write_graph):
        write(model, path)
        with torch.no_grad():
            model.vocabulary.bias_V[3] += 0.01

    monkeypatch.setattr("transformer_xl.interop.exporting.write_graph", write_other)
    with pytest.raises(
        CheckpointError, match=r"differs from the model by \d\.\de-0[234] of its values on a segment of 4 tokens"
    ):
        export(checkpoint, tmp_path / "out", to="onnx")
    assert not (tmp_path / "out").exists()


def test_missing_packages_are_one_sentence(trained_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(onnx_graph, "find_spec", lambda name: None if name == "onnxruntime" else "here")
    assert main(["export", str(trained_run), "--to", "onnx", "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert told == "txl: exporting to ONNX needs onnxruntime; install with: pip install 'transformer-xl[onnx]'\n"
    assert not (tmp_path / "out").exists()
