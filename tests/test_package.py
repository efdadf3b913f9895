"""The package as others get it: a wheel that works outside the repository."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*command, cwd):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    answer = subprocess.run([str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_a_wheel_installs_into_another_environment_and_works_there(tmp_path):
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        tmp_path,
        ROOT,
        cwd=tmp_path,
    )
    wheel = next(tmp_path.glob("*.whl"))
    assert wheel.name.endswith(
        "-py3-none-any.whl"
    )  # for every system; those with built kernels: tests/native/test_shipped.py
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", wheel, cwd=tmp_path)
    # The dependencies are lent from this environment: installing torch again would show nothing more and cost minutes.
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run(python, "-c", "import transformer_xl; print(transformer_xl.__file__)", cwd=tmp_path)
    assert where.startswith(str(site))
    assert (site / "transformer_xl" / "py.typed").exists()
    presets = json.loads(run(tmp_path / "env" / "bin" / "txl", "presets", "--json", cwd=tmp_path))
    assert presets[0]["parameters"] == 41_055_436
