"""After `import transformer_xl.huggingface`, transformers' own doors open our folders: Auto classes, pipeline, Trainer, save and load."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import transformer_xl as txl
from small_run import SMALL, prepare
from transformer_xl.checkpoint import RunFolder
from transformer_xl.cli import main
from transformer_xl.errors import CheckpointError, ConfigError, DataError, ImportRefused, InputError
from transformer_xl.interop.formats.foreign_model import Lengths
from transformer_xl.interop.importing import import_run
from transformer_xl.training import train

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'transformer-xl[hf]'"
)
huggingface = pytest.importorskip("transformer_xl.huggingface")

TEXT = "The Émigré's  file\n\nnaïve: 日本 <pad> <unk> ok\n"


@pytest.fixture(scope="module")
def word_run(word_store, word_config, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "words"
    config = replace(word_config, training=replace(word_config.training, steps=3))
    train(config, store=word_store, folder=folder, command="txl train words")
    return folder


@pytest.fixture(scope="module")
def bpe_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bpe")
    (folder / "text.txt").write_text(TEXT * 300)
    store = prepare(folder / "text.txt", folder / "store", "bpe")
    size = store.manifest.vocabulary_size
    config = replace(SMALL, model=replace(SMALL.model, vocabulary=size), training=replace(SMALL.training, steps=2))
    train(config, store=store, folder=folder / "run", command="txl train bpe")
    return folder / "run"


@pytest.fixture(scope="module")
def char_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("chars")
    (folder / "text.txt").write_text(TEXT * 300)
    store = prepare(folder / "text.txt", folder / "store", "char")
    size = store.manifest.vocabulary_size
    config = replace(SMALL, model=replace(SMALL.model, vocabulary=size), training=replace(SMALL.training, steps=2))
    train(config, store=store, folder=folder / "run", command="txl train chars")
    return folder / "run"


@pytest.fixture(params=["trained_run", "word_run", "bpe_run", "char_run"])
def any_run(request) -> Path:
    return request.getfixturevalue(request.param)


def opened(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def test_a_run_opens_and_writes_what_it_writes_natively(any_run):
    loaded = txl.load(any_run)
    model, tokenizer = opened(any_run)
    assert type(transformers.AutoConfig.from_pretrained(any_run)) is huggingface.TransformerXLConfig
    assert not model.training
    prompt = "The file\n"
    ids = tokenizer(prompt, return_tensors="pt")
    made = model.generate(**ids, max_new_tokens=30, do_sample=False)
    text = tokenizer.decode(made[0], skip_special_tokens=True)
    before = ids["input_ids"][0].tolist()
    expected = list(
        txl.decoding.generate(loaded.model, before, tokens=30, sampling=txl.decoding.Sampling(temperature=0.0))
    )
    assert made[0].tolist() == before + expected
    assert text == loaded.tokenizer.decode(before + expected)


def test_tokenizers_give_our_numbers_and_our_text(any_run):
    native, tokenizer = txl.load(any_run).tokenizer, transformers.AutoTokenizer.from_pretrained(any_run)
    ids = native.encode(TEXT).tolist()
    assert tokenizer(TEXT)["input_ids"] == ids == tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == native.decode(ids)
    assert tokenizer.decode(ids[0]) == native.decode(ids[:1])
    assert tokenizer.convert_tokens_to_ids(tokenizer.tokenize(TEXT)) == ids
    assert tokenizer.convert_tokens_to_string(tokenizer.tokenize(TEXT)) == native.decode(ids)
    assert sorted(tokenizer.get_vocab().values()) == [*range(native.size + 1)]
    assert (len(tokenizer), tokenizer.vocab_size, tokenizer.pad_token_id) == (native.size + 1, native.size, native.size)
    batch = tokenizer(["The file", TEXT], padding=True, return_tensors="pt")
    short = native.encode("The file").tolist()
    padding = len(ids) - len(short)
    assert batch["input_ids"].tolist() == [[native.size] * padding + short, ids]
    assert batch["attention_mask"].tolist() == [[0] * padding + [1] * len(short), [1] * len(ids)]
    assert tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True) == [
        native.decode(short),
        native.decode(ids),
    ]
    assert tokenizer.decode(batch["input_ids"][0]).startswith(tokenizer.pad_token)
    assert "token_type_ids" not in batch


def test_what_is_saved_comes_back_the_same(any_run, tmp_path):
    model, tokenizer = opened(any_run)
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    names = {path.suffix for path in (tmp_path / "saved").rglob("*") if path.is_file()}
    assert names <= {".json", ".safetensors", ".txt"}
    again, tokens_again = opened(tmp_path / "saved")
    assert again.config.native == model.config.native
    assert (again.config.training, again.config.evaluation) == (model.config.training, model.config.evaluation)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert tokens_again(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
    assert again.generation_config.pad_token_id == tokens_again.pad_token_id
    ids = tokenizer("The file", return_tensors="pt")
    options = {"max_new_tokens": 20, "do_sample": False}
    assert torch.equal(again.generate(**ids, **options), model.generate(**ids, **options))


def test_what_transformers_saved_becomes_a_run_again(any_run, tmp_path, capsys):
    model, tokenizer = opened(any_run)
    with torch.no_grad():
        model.transformer.vocabulary.bias_V.add_(0.5 * torch.randn(tokenizer.vocab_size))  # as if it had been trained
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    assert main(["import", str(tmp_path / "saved"), "--out", str(tmp_path / "run")]) == 0
    assert "our own classes for transformers" in capsys.readouterr().out
    again = txl.load(tmp_path / "run")
    assert again.model.config == txl.load(any_run).model.config
    assert (tmp_path / "saved" / "tokenizer" / "tokenizer.json").read_bytes() == (
        again.checkpoint.folder / "tokenizer" / "tokenizer.json"
    ).read_bytes()
    for name, value in model.transformer.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    for layers, said in (
        (10**9, "model.n_layer: 1000000000 is too large"),
        (4000, r"4,000 layers for a file of \d+ tensors"),
    ):
        config["model"]["n_layer"] = layers
        (tmp_path / "saved" / "config.json").write_text(json.dumps(config))
        with pytest.raises(ImportRefused, match=said):
            txl.from_pretrained(tmp_path / "saved")


def test_a_saved_folder_must_hold_the_weights_of_its_configuration(trained_run, tmp_path):
    """transformers makes room for what is missing, as large as the configuration says, and draws nothing into it."""
    from safetensors.torch import load_file, save_file

    model, _ = opened(trained_run)
    model.save_pretrained(tmp_path)
    config, weights = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    for field, value in {"vocabulary": 2**31 - 2, "d_inner": 2**31 - 2, "n_layer": 4000, "d_model": 2**31 - 2}.items():
        (tmp_path / "config.json").write_text(json.dumps({**config, "model": {**config["model"], field: value}}))
        with pytest.raises(CheckpointError, match=r"has shape|exists on one side|layers for a file|larger than any"):
            opened(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    del weights["transformer.vocabulary.bias_V"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"vocabulary\.bias_V exists on one side only"):
        opened(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="damaged"):
        opened(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no model\.safetensors"):
        opened(tmp_path)


def test_checkpoints_runs_from_before_and_imported_runs_open(trained_run, tmp_path):
    model, _ = opened(trained_run)
    ids = torch.tensor([[100, 101, 102]])
    expected = model(ids).logits
    assert torch.equal(opened(RunFolder(trained_run).chosen_checkpoint())[0](ids).logits, expected)

    older = Path(shutil.copytree(trained_run, tmp_path / "older"))
    config = json.loads((older / "config.json").read_text())
    del config["model_type"]
    (older / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="model_type"):
        transformers.AutoConfig.from_pretrained(older)
    assert torch.equal(huggingface.TransformerXLForCausalLM.from_pretrained(older)(ids).logits, expected)
    assert huggingface.TransformerXLTokenizer.from_pretrained(older)("def")["input_ids"] == [100, 101, 102]


def test_the_folder_of_an_imported_run_opens(tmp_path):
    from safetensors.torch import save_file

    from small_models import build
    from transformer_xl.interop.formats.huggingface import config_to_huggingface, weights_to_huggingface

    ours = build(initial_memory="zeros", cutoffs=(4, 8), norm="pre").float()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config_to_huggingface(ours.config)))
    save_file(weights_to_huggingface(ours.state_dict(), ours.config), tmp_path / "theirs" / "model.safetensors")
    import_run(tmp_path / "theirs", tmp_path / "run", lengths=Lengths())
    model, tokenizer = opened(tmp_path / "run")
    assert tokenizer("3 1 4")["input_ids"] == [3, 1, 4]
    made = model.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=20, do_sample=False)[0, 3:].tolist()
    assert tokenizer.decode(made) == txl.load(tmp_path / "run").generate("3 1 4", tokens=20, temperature=0.0)


def test_other_lengths_and_types_are_honoured_and_other_models_refused(trained_run):
    config = transformers.AutoConfig.from_pretrained(trained_run)
    config.model["memory"], config.model["clamp_len"] = 30, 5
    model = transformers.AutoModelForCausalLM.from_pretrained(trained_run, config=config, dtype=torch.float64)
    assert (model.transformer.config.memory, model.transformer.config.clamp_len, model.dtype) == (30, 5, torch.float64)
    expected = txl.load(trained_run, memory=30, clamp_len=5).generate("def ", tokens=40, temperature=0.0)
    made = model.generate(torch.tensor([list(b"def ")]), max_new_tokens=40, do_sample=False)
    assert bytes(made[0, 4:].tolist()).decode(errors="replace") == expected
    config.model["d_inner"] = 7
    with pytest.raises(CheckpointError, match="holds another model than the configuration describes"):
        transformers.AutoModelForCausalLM.from_pretrained(trained_run, config=config)
    with pytest.raises(InputError, match="quantization_config is nothing that the run"):
        transformers.AutoModelForCausalLM.from_pretrained(trained_run, quantization_config={"load_in_8bit": True})
    with pytest.raises(InputError, match="device_map"):
        transformers.AutoModelForCausalLM.from_pretrained(trained_run, device_map={"transformer": "cpu"})


def test_what_is_no_model_of_this_kind_is_refused(recurrent_run, tmp_path):
    with pytest.raises(ConfigError, match=r"model.cell: the lstm"):
        transformers.AutoModelForCausalLM.from_pretrained(recurrent_run)
    (tmp_path / "config.json").write_text('{"model_type": "transformer-xl"}')
    with pytest.raises(DataError, match=r"there is no tokenizer/tokenizer.json"):
        transformers.AutoTokenizer.from_pretrained(tmp_path)


def test_pipeline_and_text_streaming(trained_run, capsys):
    model, tokenizer = opened(trained_run)
    write = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompts = ["def ", "import json\n"]
    expected = [txl.load(trained_run).generate(prompt, tokens=15, temperature=0.0) for prompt in prompts]
    options = {"max_new_tokens": 15, "do_sample": False, "return_full_text": False}
    for batch_size in (1, 2):
        made = write(prompts, batch_size=batch_size, **options)
        assert [each[0]["generated_text"] for each in made] == expected
    by_name = transformers.pipeline("text-generation", model=str(trained_run))
    assert by_name(prompts[0], **options)[0]["generated_text"] == expected[0]
    streamer = transformers.TextStreamer(tokenizer, skip_prompt=True)
    model.generate(**tokenizer(prompts[0], return_tensors="pt"), streamer=streamer, max_new_tokens=15, do_sample=False)
    assert capsys.readouterr().out == expected[0] + "\n"
    stop = expected[1][4:6]
    ids = tokenizer(prompts[1], return_tensors="pt")
    ended = model.generate(**ids, stop_strings=[stop], tokenizer=tokenizer, max_new_tokens=15, do_sample=False)
    ended = tokenizer.decode(ended[0, len(prompts[1]) :])
    assert ended == expected[1][: expected[1].index(stop) + len(stop)]


def test_the_loss_is_that_of_the_model_itself(word_run):
    model, loaded = opened(word_run)[0], txl.load(word_run)
    tokens = torch.from_numpy(loaded.store().split("valid").tokens[:24].astype("int64")).view(2, 12)
    labels = tokens.clone()
    labels[0, 5] = labels[1, :3] = -100
    output = model(tokens, labels=labels)
    every = loaded.model(tokens[:, :-1], targets_BT=tokens[:, 1:]).loss_BT
    scored = labels[:, 1:] != -100
    torch.testing.assert_close(output.loss, every[scored].mean())
    assert output.logits.shape == (2, 12, loaded.tokenizer.size + 1)
    torch.testing.assert_close(model(tokens, labels=labels, num_items_in_batch=7).loss, every[scored].sum() / 7)
    right = torch.nn.functional.pad(tokens, (0, 4), value=model.config.pad_token_id)
    mask = (right != model.config.pad_token_id).long()
    padded = model(right, attention_mask=mask, labels=torch.nn.functional.pad(labels, (0, 4), value=-100))
    torch.testing.assert_close(padded.loss, output.loss)


def test_trainer_trains(trained_run, byte_store, tmp_path):
    pytest.importorskip(
        "accelerate", reason="accelerate is not installed, without which transformers' Trainer does not start"
    )
    model, tokenizer = opened(trained_run)
    tokens = torch.from_numpy(byte_store.split("train").tokens[:4096].astype("int64")).view(-1, 32)
    data = [{"input_ids": row[: 32 - number % 5].tolist()} for number, row in enumerate(tokens)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "trained"),
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        max_steps=40,
        gradient_accumulation_steps=2,
        save_strategy="no",
        logging_steps=10,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data, data_collator=collator
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after < 0.9 * before
    trainer.save_model(str(tmp_path / "trained"))
    tokenizer.save_pretrained(tmp_path / "trained")
    again, _ = opened(tmp_path / "trained")
    torch.testing.assert_close(again.eval()(tokens[:2]).logits, trainer.model.eval()(tokens[:2]).logits)
