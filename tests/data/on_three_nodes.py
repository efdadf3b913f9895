"""A Ray cluster of three nodes on this machine, texts prepared on it, and one node killed on the way. Prints what it saw, as JSON.

    python on_three_nodes.py TEXT FOLDER

A process of its own (test_data_ray.py starts it): Ray's threads, signals and warnings stay out of the tests'.
"""

import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

LOOPBACK = "127.0.0.1"
"""Given this address, Ray's servers listen on loopback only."""
PIECE_BYTES = 200_000
"""The tokens of a piece are then too many to travel with Ray's answer (100 kB): they wait on the node that made them, and are lost with it."""
KILL_AT = 8
ITEMS = 60

os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Else Ray takes loopback for the machine's own address in its network, where nobody listens.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}

import ray  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from ray.experimental import get_object_locations  # noqa: E402

from transformer_xl.cli import main  # noqa: E402
from transformer_xl.data import store  # noqa: E402
from transformer_xl.data.corpora import dealing, pieces  # noqa: E402


def txl(*words: object) -> tuple[int, str]:
    """Exit code, and what was said on stderr."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main([str(word) for word in words])
    return code, said.getvalue()


def listening() -> list[str]:
    """Addresses that processes of this session listen on, other than 127.0.0.1, as /proc writes them."""
    session, sockets = os.getsid(0), set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((process / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                sockets |= {os.readlink(link) for link in (process / "fd").iterdir()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.append(fields[1])
    return [place for place in found if not place.partition(":")[0].endswith("0100007F")]


def observe(text: Path, folder: Path, cluster: Cluster, nodes: list) -> dict[str, object]:
    # As people type it: the command finds the cluster by itself, and leaves it.
    os.environ["RAY_ADDRESS"] = cluster.address
    (folder / "latin").write_bytes(b"caf\xe9\n" * 10)
    latin = "prepare", folder / "latin", "--tokenizer", "char", "--out", folder / "no", "--engine", "ray"
    seen: dict[str, object] = {"latin": txl(*latin), "left connected": ray.is_initialized()}

    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")

    def node_of(shared: object, item: int) -> tuple[int, str]:
        return item, ray.get_runtime_context().get_node_id()

    with dealing.ray_workers(node_of, None) as pool:
        where = list(dealing.ordered_map(pool, range(ITEMS)))
    seen["in order"] = [item for item, _ in where] == list(range(ITEMS))
    seen["nodes that worked"] = len({node for _, node in where})
    seen["listening"] = listening()

    pieces.PIECE_BYTES = PIECE_BYTES
    words = "prepare", text, "--tokenizer", "word", "--split", "1", "--out", folder / "words", "--engine", "ray"
    seen["words"] = txl(*words)
    with killed_on_the_way(cluster, nodes, seen):
        seen["bytes"] = txl("prepare", text, "--out", folder / "bytes", "--engine", "ray")
    seen["alive"] = sum(node["Alive"] for node in ray.nodes())

    same = dealing.tokens_depend_on()
    dealing.tokens_depend_on = lambda: {**same, "tokenizers": "0.1"}
    seen["other version"] = txl("prepare", text, "--out", folder / "no", "--engine", "ray")
    seen["nothing left"] = not (folder / "no").exists()
    return seen


@contextlib.contextmanager
def killed_on_the_way(cluster: Cluster, nodes: list, seen: dict[str, object]) -> Iterator[None]:
    """Once the store has some pieces: a node that holds one that is finished and not yet fetched, while others are being worked on."""
    submit, append, submitted, appended = dealing._RayWorkers.submit, store.SplitWriter.append, [], [0]

    def remembering(self, item):
        submitted.append(submit(self, item))
        return submitted[-1]

    def killing(self, encoded):
        appended[0] += 1
        if appended[0] == KILL_AT:
            under_way = [pending.reference for pending in submitted[KILL_AT:]]
            finished, _ = ray.wait(under_way, num_returns=len(under_way) - 1, fetch_local=False)
            held = [node for place in get_object_locations(finished).values() for node in place["node_ids"]]
            node = next(node for node in nodes if node.node_id in held)
            seen["finished pieces lost"] = held.count(node.node_id)
            cluster.remove_node(node, allow_graceful=False)
        append(self, encoded)

    dealing._RayWorkers.submit, store.SplitWriter.append = remembering, killing
    try:
        yield
    finally:
        dealing._RayWorkers.submit, store.SplitWriter.append = submit, append
        seen["pieces"] = {"before": KILL_AT, "all": appended[0]}


def run(text: Path, folder: Path) -> dict[str, object]:
    Path(tempfile.gettempdir(), "ray").mkdir(
        exist_ok=True
    )  # where ray writes an address, and expects somebody to have been
    scratch = tempfile.mkdtemp(prefix="ray")  # short: the names of its sockets have at most 107 characters
    small = {"num_cpus": 1, "object_store_memory": 80 << 20, "node_ip_address": LOOPBACK}
    cluster = Cluster(head_node_args={**small, "include_dashboard": False, "temp_dir": scratch})
    try:
        cluster.add_node(**small, include_dashboard=False, temp_dir=scratch)
        nodes = [cluster.add_node(**small) for _ in range(2)]
        return observe(text, folder, cluster, nodes)
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), Path(sys.argv[2]))))
