"""The evaluation harness with our model: the figures it prints are ours, and a document is read once with memory all through it."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import transformer_xl as txl
from transformer_xl.errors import InputError
from transformer_xl.training import train

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'transformer-xl[hf]'")
harness = pytest.importorskip("transformer_xl.lm_eval")

TEXT = (Path(json.__file__).parent / "encoder.py").read_text()
TASKS = {
    "documents": """
task: documents
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}, {metric: byte_perplexity}]
""",
    "choices": """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{options}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
""",
    "writing": """
task: writing
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{written}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def word_run(word_store, word_config, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "words"
    config = replace(word_config, training=replace(word_config.training, steps=3))
    train(config, store=word_store, folder=folder, command="txl train words")
    return folder


def requests(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]


def log_probability(loaded, before, after):
    """Of the second tokens after the first, by the model's own forward with memory, one token at a time."""
    memory, total, likeliest = None, 0.0, True
    with torch.no_grad():
        for token, target in zip([*before, *after], [*before[1:], *after, -1], strict=False):
            output = loaded.model(torch.tensor([[token]]), memory=memory)
            memory = output.memory
            scores = loaded.model.log_probabilities(output.hidden_BTD)[0, 0]
            if len(before) <= 1:
                total += float(scores[target]) if target >= 0 else 0.0
                likeliest = likeliest and (target < 0 or int(scores.argmax()) == target)
            before = before[1:]
    return total, likeliest


def test_a_document_is_read_once_with_memory_all_through(trained_run):
    model = harness.TransformerXLHarness(str(trained_run))
    long, short = TEXT[:3000], "x"
    found = model.loglikelihood_rolling(requests("loglikelihood_rolling", (long,), (short,)))
    loaded = txl.load(trained_run)
    expected = [-float(loaded.score("\n" + text).nats[1:].astype(np.float64).sum()) for text in (long, short)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    more = harness.TransformerXLHarness(str(trained_run), memory=24)
    assert more.loglikelihood_rolling(requests("loglikelihood_rolling", (long,))) != found[:1]


@pytest.mark.parametrize("run", ["trained_run", "word_run"])
def test_continuations_have_the_models_own_probabilities(run, request):
    folder = request.getfixturevalue(run)
    loaded, model = txl.load(folder), harness.TransformerXLHarness(str(folder))
    pairs = [
        ("def encode(self):\n    ", "return o"),
        ("", "def f"),
        ("def encode(self):\n    ", "raise o"),
        ("a b", " c"),
    ]
    found = model.loglikelihood(requests("loglikelihood", *pairs))
    for (context, continuation), (total, likeliest) in zip(pairs, found, strict=True):
        whole = loaded.tokenizer.encode(context + continuation).tolist()
        cut = len(loaded.tokenizer.encode(context))
        before = whole[:cut] or loaded.tokenizer.encode("\n").tolist()
        expected, is_likeliest = log_probability(loaded, before, whole[cut:])
        assert (total, likeliest) == (pytest.approx(expected, abs=1e-4), is_likeliest)
    context = "def encode(self):\n"
    text = loaded.generate(context, tokens=3, temperature=0.0)
    if run == "trained_run":
        assert model.loglikelihood(requests("loglikelihood", (context, text)))[0][1] is True


def test_texts_end_before_their_stop_and_settings_are_not_dropped(trained_run):
    loaded, model = txl.load(trained_run), harness.TransformerXLHarness(str(trained_run), batch_size=2)
    asked = [
        ("def ", {"until": ["\n"], "max_gen_toks": 30}),
        ("import ", {"until": "\n", "max_gen_toks": 30}),
        ("", {"until": [], "max_gen_toks": 5, "do_sample": False, "temperature": 0.9}),
        ("class ", {"until": ["\n"], "max_gen_toks": 30}),
        ("x", {"do_sample": True, "temperature": 0.5, "top_k": 3, "max_gen_toks": 9}),
    ]
    expected = [
        loaded.generate("def ", tokens=30, stop=["\n"], temperature=0.0),
        loaded.generate("import ", tokens=30, stop=["\n"], temperature=0.0),
        loaded.generate("", tokens=5, temperature=0.0),
        loaded.generate("class ", tokens=30, stop=["\n"], temperature=0.0),
        loaded.generate("x", tokens=9, temperature=0.5, top_k=3),
    ]
    assert model.generate_until(requests("generate_until", *asked)) == expected
    with pytest.raises(InputError, match=r"generation_kwargs: num_beams is not known here"):
        model.generate_until(requests("generate_until", ("x", {"num_beams": 3})))


def test_models_that_remember_nothing_are_refused(trained_run):
    with pytest.raises(InputError, match="memory 0 sees no text before a token"):
        harness.TransformerXLHarness(str(trained_run), memory=0)


def test_the_harness_prints_our_figures(trained_run, tmp_path):
    """Its own command line in a process of its own, on tasks and data that lie in a folder."""
    loaded = txl.load(trained_run)
    questions = ["def encode(self, o):\n", "import "]
    options = [["    return o", "    raise o"], ["json", "sys"]]
    scores = [
        [float(loaded.score(question + choice).nats[len(question) :].sum()) for choice in choices]
        for question, choices in zip(questions, options, strict=True)
    ]
    likeliest = [int(np.argmin(each)) for each in scores]
    written = [loaded.generate(question, tokens=12, stop=["\n"], temperature=0.0) for question in questions]
    rows = {
        "documents": [{"text": TEXT[:2000]}, {"text": TEXT[2000:2500]}],
        "choices": [
            {"question": question, "options": choices, "answer": answer}
            for question, choices, answer in zip(questions, options, [likeliest[0], 1 - likeliest[1]], strict=True)
        ],
        "writing": [{"question": question, "written": text} for question, text in zip(questions, written, strict=True)],
    }
    for name, yaml in TASKS.items():
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        (tmp_path / f"{name}.yaml").write_text(yaml.replace("DATA", str(data)))
    command = [sys.executable, "-m", "transformer_xl.lm_eval", "--model", "transformer-xl"]
    command += ["--model_args", f"run={trained_run}", "--tasks", ",".join(TASKS), "--include_path", str(tmp_path)]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(
        [*command, "--output_path", str(tmp_path / "out")], env=environment, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
    results = json.loads(next((tmp_path / "out").rglob("results*.json")).read_text())["results"]
    nats = [float(loaded.score("\n" + row["text"]).nats[1:].astype(np.float64).sum()) for row in rows["documents"]]
    bits_per_byte = sum(nats) / math.log(2) / sum(len(row["text"].encode()) for row in rows["documents"])
    assert results["documents"]["bits_per_byte,none"] == pytest.approx(bits_per_byte, rel=1e-5)
    assert results["choices"]["acc,none"] == 0.5
    assert results["writing"]["exact_match,none"] == 1.0


def test_our_errors_are_one_sentence_there_too(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        "lm_eval.__main__.cli_evaluate", lambda: harness.TransformerXLHarness(str(tmp_path / "nothing"))
    )
    assert harness.main() == 2
    assert capsys.readouterr().err.startswith(f"lm_eval: there is no run {tmp_path / 'nothing'}")
