"""Whatever the locale says of letters, files are UTF-8, folders may have any name, and nothing ends in a traceback."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

from small_run import SMALL
from transformer_xl.checkpoint import RunFolder
from transformer_xl.checkpoint.folder import read_about
from transformer_xl.cli import main
from transformer_xl.files import readable, write_json

ALL = """
import sys
from transformer_xl.cli import main
words = sys.argv[1:]
while words:
    end = words.index("then")
    print("txl", *map(ascii, words[:end]), file=sys.stderr, flush=True)
    if code := main(words[:end]):
        sys.exit(code)
    words = words[end + 1 :]
"""
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
TEXT = "L'été à l'hôtel, naïve façade; 日本語 и ещё слова.\n" * 200


def told(*commands: list[str]) -> str:
    """What these commands print under an ASCII locale, in one process: loading torch takes longer than all of them."""
    words = [word for command in commands for word in (*command, "then")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONIOENCODING"}
    answer = subprocess.run(
        [sys.executable, "-c", ALL, *words], capture_output=True, env={**environment, **ASCII}, check=False
    )
    said = answer.stderr.decode("utf-8")
    assert answer.returncode == 0, said
    assert "Traceback" not in said
    return answer.stdout.decode("utf-8")


def test_prepared_trained_and_used_under_accented_names_and_an_ascii_locale(tmp_path, capsys):
    place = tmp_path / "dönnées-日本"
    place.mkdir()
    text, data, run = (str(place / name) for name in ("téxte.txt", "störe", "rün"))
    Path(text).write_text(TEXT, encoding="utf-8")
    for steps in (2, 3):
        config = replace(SMALL, training=replace(SMALL.training, steps=steps, validate_every=steps))
        write_json(tmp_path / f"{steps}.json", asdict(config))
    said = told(
        ["prepare", text, "--tokenizer", "byte", "--out", data],
        ["data", data],
        ["train", str(tmp_path / "2.json"), "--data", data, "--run", run],
        ["train", str(tmp_path / "3.json"), "--data", data, "--run", run],
        ["evaluate", run, "--split", "valid", "--tokens", "60"],
        ["generate", run, "--prompt", "été ", "--tokens", "30"],
        ["generate", run, "--prompt", "été ", "--stop", "日", "--tokens", "30", "--json"],
    )
    assert "日本語 и ещё" in said  # the sample that `txl data` shows
    assert "\nété " in said
    assert json.loads(said[said.rindex("\n{\n") :])["prompt"] == "été "
    assert main(["evaluate", run, "--split", "valid", "--tokens", "60"]) == 0  # the locale of before or not
    assert read_about(RunFolder(run).checkpoint_at(3) / "about.json").data == data
    for path in place.rglob("*"):
        if path.suffix in (".json", ".jsonl", ".md", ".txt"):
            path.read_bytes().decode("utf-8")
    assert "--run 'rün'" in (Path(run) / "README.md").read_text(encoding="utf-8").replace(f"{place}/", "")
    assert (Path(run) / "figures" / "loss.png").is_file()


def test_a_run_under_a_name_that_could_not_be_read_again_is_refused(byte_store, tmp_path, capsys):
    """Data may lie there."""
    place = Path(os.fsdecode(os.fsencode(tmp_path) + b"/d\xf6nn\xe9es"))
    shutil.copytree(byte_store.folder, place)
    write_json(tmp_path / "small.json", asdict(SMALL))
    words = ["train", str(tmp_path / "small.json"), "--data", str(place), "--training.steps", "1", "--run"]
    assert main([*words, str(place / "run")]) == 2
    assert "choose another --run" in capsys.readouterr().err
    assert not (place / "run").exists()
    assert main([*words, str(tmp_path / "run")]) == 0
    assert main(["evaluate", str(tmp_path / "run"), "--tokens", "60"]) == 0


def test_a_prompt_that_is_no_text_is_refused(trained_run, capsys):
    assert main(["generate", str(trained_run), "--prompt", os.fsdecode(b"\xff\xfe")]) == 2
    assert (
        capsys.readouterr().err == "txl: --prompt is not UTF-8; convert it, or give it in a file with --prompt-file\n"
    )


def test_letters_that_came_byte_by_byte_are_letters_again(tmp_path):
    typed = "dönnées".encode().decode("ascii", "surrogateescape")
    assert readable(typed) == "dönnées"
    assert readable("d\udcf6n \ud800") == "d\\udcf6n \\ud800"
    write_json(tmp_path / "names.json", [typed, "d\udcf6n", "\ud800"])
    assert json.loads((tmp_path / "names.json").read_text(encoding="utf-8")) == ["dönnées", "d\udcf6n", "\ud800"]
