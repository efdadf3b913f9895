"""The files of examples/serve/: each is read by who is made to read it, where that is here, and what they ask of `txl serve` exists."""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from transformer_xl.cli import serve
from transformer_xl.serving.api.bodies import REPLICA, SESSION_ID
from transformer_xl.serving.limits import BODY_BYTES, Limits

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "serve"


def asked(words: list[str]) -> argparse.Namespace:
    """What `txl serve` makes of these words; one that it does not know ends the test."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    serve.configure(parser)
    return parser.parse_args(words)


@pytest.fixture(scope="module")
def instructions() -> list[tuple[str, str]]:
    text = (EXAMPLES / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


def test_hadolint_has_nothing_to_say_of_the_dockerfile():
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not installed")
    # Debian's packages are pinned by the image's own tag.
    answer = subprocess.run([hadolint, "--ignore", "DL3008", EXAMPLES / "Dockerfile"], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout


def test_the_image_serves_as_a_user_without_rights(instructions):
    last = dict(instructions)
    order = [name for name, _ in instructions]
    assert last["USER"].isdigit()
    assert int(last["USER"]) > 0
    assert order.index("USER") < order.index("ENTRYPOINT")
    words = [*json.loads(last["ENTRYPOINT"]), *json.loads(last["CMD"])]
    assert words[:2] == ["txl", "serve"]
    arguments = asked(words[2:])
    assert str(arguments.port) == last["EXPOSE"]
    assert arguments.sessions == last["VOLUME"]
    assert f"127.0.0.1:{arguments.port}/health" in last["HEALTHCHECK"]
    assert not [value for name, value in instructions if name in ("ENV", "ARG") and "KEY" in value]  # no secrets
    for source in (word for name, value in instructions if name == "COPY" for word in value.split()[:-1]):
        assert (ROOT / source).exists(), source


def test_the_systemd_unit_is_sound(tmp_path):
    text = (EXAMPLES / "txl-serve.service").read_text()
    (command,) = re.findall("^ExecStart=(.*)$", text, re.MULTILINE)
    program, *words = command.split()
    assert (Path(program).name, words[0]) == ("txl", "serve")
    arguments = asked(words[1:])
    assert arguments.sessions == f"/var/lib/{re.findall('^StateDirectory=(.*)$', text, re.MULTILINE)[0]}"
    assert arguments.api_key_file == "${CREDENTIALS_DIRECTORY}/key"
    assert int(re.findall("^TimeoutStopSec=(.*)$", text, re.MULTILINE)[0]) > Limits().drain_seconds
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    unit = tmp_path / "txl-serve.service"
    unit.write_text(text.replace(program, sys.executable))  # a program that is here
    answer = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert "txl-serve" not in answer.stderr, answer.stderr
    assert answer.returncode == 0, answer.stderr


def test_the_kubernetes_manifests_fit_together(instructions):
    found = {each["kind"]: each for each in yaml.safe_load_all((EXAMPLES / "serve.yaml").read_text())}
    service, servers = found["Service"], found["StatefulSet"]["spec"]
    pod = servers["template"]
    labels = pod["metadata"]["labels"]
    assert service["spec"]["selector"] == servers["selector"]["matchLabels"] == labels
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert servers["serviceName"] == service["metadata"]["name"]
    assert servers["replicas"] > 1
    (container,) = pod["spec"]["containers"]
    entry = json.loads(dict(instructions)["ENTRYPOINT"])[2:]
    arguments = asked([*entry, *container["args"]])
    (port,) = container["ports"]
    assert arguments.port == port["containerPort"] == service["spec"]["ports"][0]["port"]
    assert arguments.replica == "$(POD_NAME)"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert arguments.sessions == mounts["sessions"]
    assert Path(arguments.runs[0]).is_relative_to(mounts["runs"])
    variables = {variable["name"]: variable for variable in container["env"]}
    assert variables["XDG_CACHE_HOME"]["value"] == mounts["cache"]
    assert "secretKeyRef" in variables["TXL_API_KEY"]["valueFrom"]
    assert pod["spec"]["terminationGracePeriodSeconds"] > Limits().drain_seconds
    assert pod["spec"]["securityContext"]["runAsUser"] == int(dict(instructions)["USER"])


def test_the_proxy_finds_the_server_that_has_a_session():
    text = (EXAMPLES / "nginx.conf").read_text()
    ((pattern, place),) = re.findall(r'^\s*"~(.*?)"\s+(\S+);', text, re.MULTILINE)
    pattern = pattern.replace("(?<", "(?P<")

    def place_of(address: str) -> str | None:
        match = re.search(pattern, address)
        return place.replace("$replica", match["replica"]) if match else None

    id = f"txl-serve-1-{'0f' * 16}"
    assert re.fullmatch(SESSION_ID, id)
    for end in ("", "/feed", "/generate"):
        assert place_of(f"/v1/sessions/{id}{end}") == "txl-serve-1.txl-serve"
    for anywhere in (
        "/v1/sessions",
        "/v1/sessions/restore",
        f"/v1/sessions/{'0f' * 16}",
        "/v1/completions",
        f"/x/{id}",
    ):
        assert place_of(anywhere) is None
    for hostile in ("evil.example", "a@b", "a%2fb", "A", "a:1", "-a"):
        assert place_of(f"/v1/sessions/{hostile}-{'0f' * 16}") is None
    assert re.fullmatch(REPLICA, "txl-serve-1")
    assert int(re.findall(r"client_max_body_size (\d+)k", text)[0]) * 1024 > BODY_BYTES
    assert float(re.findall(r"proxy_read_timeout (\d+)s", text)[0]) > Limits().deadline_seconds
    assert "proxy_buffering off;" in text
