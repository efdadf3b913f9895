"""The scripts of examples/cluster/: sound as text, and what they start is started here, on two machines that are one: two torchruns, a process each.

What only a cluster can show (that SLURM queues a job again, that Kubernetes makes a lost pod anew) is stood in for by starting it again.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from torchrun import RANDOM, command, environment, final_bytes, launch, wait_for
from transformer_xl.checkpoint import RunFolder
from transformer_xl.cli import main

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks' processes in /proc"),
]
EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"
SLURM, KUBERNETES = EXAMPLES / "train.slurm", EXAMPLES / "train.yaml"
BIN = Path(sys.executable).parent

SRUN = f"""#!{sys.executable}
import signal, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    words.pop(0)
machines = [subprocess.Popen(words) for _ in range(2)]
signal.signal(signal.SIGTERM, lambda *_: [machine.terminate() for machine in machines])
sys.exit(max(abs(machine.wait()) for machine in machines))
"""
SCONTROL = """#!/bin/sh
case "$1" in
    show) echo localhost ;;
    requeue) echo "$2" >> "$REQUEUED" ;;
esac
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def whole(byte_store, tmp_path_factory) -> list[bytes]:
    """What two ranks come to that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    answer = launch(RANDOM, byte_store, folder)
    assert answer.returncode == 0, answer.stderr
    return final_bytes(folder)


def rank_process(folder: Path, rank: int) -> int:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"RANK={rank}".encode() in variables and str(folder).encode() in words:
            return int(process.name)
    raise AssertionError(f"no rank {rank} of {folder}")


def next_checkpoint(run: RunFolder, process: subprocess.Popen, said: Path) -> None:
    before = max(run.steps(), default=0)
    wait_for(lambda: max(run.steps(), default=0) > before, process, said)


def resumes(said: Path) -> list[int]:
    return [int(line.split()[4]) for line in said.read_text().splitlines() if line.startswith("going on from step")]


# --- SLURM


def test_the_slurm_script_is_sound():
    assert subprocess.run(["bash", "-n", SLURM]).returncode == 0
    shellcheck = BIN / "shellcheck"
    if not shellcheck.exists():
        pytest.skip("shellcheck is not installed")
    answer = subprocess.run([shellcheck, "--shell=bash", "--severity=style", SLURM], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout


def test_on_slurm_a_killed_rank_and_the_end_of_the_time_cost_no_bit(byte_store, whole, tmp_path):
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    folder, said, requeued = tmp_path / "run", tmp_path / "said", tmp_path / "requeued"
    words = ["bash", str(SLURM), *command(RANDOM, byte_store, folder)[2:]]

    def queued() -> subprocess.Popen:
        variables = environment() | {
            "PATH": f"{tmp_path}:{BIN}:{os.environ['PATH']}",
            "REQUEUED": str(requeued),
            "RENDEZVOUS_PORT": str(free_port()),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "machines[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_GPUS_ON_NODE": "1",
        }
        with said.open("a") as stderr:
            return subprocess.Popen(words, env=variables, stdout=subprocess.DEVNULL, stderr=stderr)

    run = RunFolder(folder)
    with queued() as job:
        next_checkpoint(run, job, said)
        os.kill(rank_process(folder, 1), signal.SIGKILL)
        wait_for(lambda: len(resumes(said)) == 1, job, said)
        next_checkpoint(run, job, said)
        job.send_signal(signal.SIGUSR1)
        assert job.wait() != 0
    assert requeued.read_text() == "7\n"
    stopped_at = run.steps()[-1]
    assert f"stopped at step {stopped_at} and saved" in said.read_text()
    assert stopped_at < RANDOM.training.steps
    with queued() as job:
        assert job.wait() == 0, said.read_text()
    assert resumes(said)[1:] == [stopped_at]
    assert requeued.read_text() == "7\n"  # a job that is done is not queued again
    assert final_bytes(folder) == whole


# --- Kubernetes


@pytest.fixture(scope="module")
def manifests() -> dict[str, dict]:
    return {each["kind"]: each for each in yaml.safe_load_all(KUBERNETES.read_text())}


def option(words: list[str], name: str) -> str:
    (found,) = [word.partition("=")[2] for word in words if word.startswith(f"--{name}=")]
    return found


def test_the_kubernetes_manifests_fit_together(manifests, byte_store, capsys):
    service, job = manifests["Service"], manifests["Job"]
    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    words = container["args"]
    name, subdomain = job["metadata"]["name"], service["metadata"]["name"]
    (port,) = [each["port"] for each in service["spec"]["ports"]]
    # The first pod of an indexed job is NAME-0, and is found there by the headless service that is its subdomain.
    assert job["spec"]["completionMode"] == "Indexed"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["subdomain"] == subdomain
    assert option(words, "rdzv-endpoint") == f"{name}-0.{subdomain}:{port}"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(option(words, "nnodes"))
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(option(words, "nproc-per-node"))
    assert pod["spec"]["restartPolicy"] == "Never"  # a failed pod stays, with its log
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert Path(option(words, "run")).is_relative_to(mounts["runs"])
    assert {"name": "XDG_CACHE_HOME", "value": mounts["cache"]} in container["env"]
    # What is trained is a preset with options that exist, and its lanes can be dealt to all processes.
    asked = words[words.index("transformer_xl") + 2 :]
    asked = [f"--data={byte_store.folder}" if word.startswith("--data=") else word for word in asked]
    assert main(["train", *asked, "--print_config"]) == 0
    lanes = int(capsys.readouterr().out.split('"lanes": ')[1].split(",")[0])
    assert lanes % (int(option(words, "nnodes")) * int(option(words, "nproc-per-node"))) == 0


@pytest.mark.slow  # a lost machine is noticed by its silence
def test_on_kubernetes_a_lost_pod_that_is_made_anew_costs_no_bit(manifests, byte_store, whole, tmp_path):
    """As a Job does it: a pod that fails is made anew, with the same number, so many times."""
    job = manifests["Job"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    folder, said = tmp_path / "run", tmp_path / "said"
    launcher = container["args"][: container["args"].index("transformer_xl")]
    here = {"nproc-per-node": "1", "rdzv-endpoint": f"localhost:{free_port()}"}
    for name, value in here.items():
        launcher[launcher.index(f"--{name}={option(launcher, name)}")] = f"--{name}={value}"
    words = [str(BIN / container["command"][0]), *launcher, *command(RANDOM, byte_store, folder)]

    def pod() -> subprocess.Popen:
        with said.open("a") as stderr:
            return subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL, stderr=stderr)

    pods = [pod(), pod()]
    failures = 0
    try:
        next_checkpoint(RunFolder(folder), pods[0], said)
        rank = rank_process(folder, 1)
        lost = next(each for each in pods if each.pid == parent_of(rank))
        for process in (lost.pid, rank):  # the machine is gone, with all that ran on it
            os.kill(process, signal.SIGKILL)
        while any(each.poll() != 0 for each in pods):
            for index, each in enumerate(pods):
                if each.poll():
                    failures += 1
                    assert failures <= job["backoffLimit"], said.read_text()
                    pods[index] = pod()
            time.sleep(0.1)
    finally:
        for each in pods:
            each.terminate()
    print(f"{failures} pods made anew; resumes from steps {resumes(said)}")
    assert resumes(said)[-1] > 0
    assert final_bytes(folder) == whole


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
