"""One Billion Word at full size: 99 shards, all cores, under 2 GB in all. Shards repeat the real held-out sentences, with rare
words of their own added so that the vocabulary grows as large as the real one."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

SHARDS = int(os.environ.get("TXL_LM1B_SHARDS", "99"))
REPEATS = 10
KEPT_WORDS_PER_SHARD = 8_000
RARE_WORDS_PER_SHARD = 16_000


def make_shards(folder: Path, text: str) -> None:
    folder.mkdir()
    for shard in range(1, SHARDS + 1):
        kept = "".join(f"k{shard}x{n} k{shard}x{n} k{shard}x{n}\n" for n in range(KEPT_WORDS_PER_SHARD))
        rare = "".join(f"r{shard}x{n}\n" for n in range(RARE_WORDS_PER_SHARD))
        (folder / f"news.en-{shard:05}-of-00100").write_text(text * REPEATS + kept + rare, encoding="utf-8")


def memory_of_tree(pid: int) -> int:
    """Bytes held by a process and all below it, shared pages counted once per process."""
    total = 0
    waiting = [pid]
    while waiting:
        here = waiting.pop()
        try:
            pages = int(Path(f"/proc/{here}/statm").read_text().split()[1])
            for task in Path(f"/proc/{here}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += pages * os.sysconf("SC_PAGE_SIZE")
    return total


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_one_billion_words_fit_in_two_gigabytes(corpora, tmp_path):
    heldout = corpora / "lm1b"
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(heldout.iterdir()))
    make_shards(tmp_path / "shards", text)
    (tmp_path / "shards" / "news.en.heldout-00000-of-00050").symlink_to(heldout / "news.en.heldout-00000-of-00050")

    command = [sys.executable, "-m", "transformer_xl", "prepare", "lm1b", "--source", tmp_path / "shards"]
    started_at = time.monotonic()
    prepare = subprocess.Popen([*command, "--out", tmp_path / "store", "--json"], stdout=subprocess.PIPE, text=True)
    most = [0]

    def watch() -> None:
        while prepare.poll() is None:
            most[0] = max(most[0], memory_of_tree(prepare.pid))
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    printed, _ = prepare.communicate()
    watcher.join()
    manifest = json.loads(printed)
    print(f"{SHARDS} shards: {time.monotonic() - started_at:.0f} s, {most[0] / 1e9:.2f} GB at most in all processes")
    assert prepare.returncode == 0
    assert most[0] < 2e9
    train = manifest["splits"][0]
    words = len(text.split()) * REPEATS + 3 * KEPT_WORDS_PER_SHARD + RARE_WORDS_PER_SHARD
    sentences = text.count("\n") * REPEATS + KEPT_WORDS_PER_SHARD + RARE_WORDS_PER_SHARD
    assert train["words"] == SHARDS * words
    assert train["tokens"] == SHARDS * (words + 2 * sentences)
    assert manifest["vocabulary_size"] > SHARDS * KEPT_WORDS_PER_SHARD
