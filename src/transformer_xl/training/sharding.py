"""A checkpoint that all ranks write together, each its own rows (`checkpoint.shards`), beside training. They meet in the folder that is being written:

rank 0    makes the hidden folder and tells its name . writes its rows and the facts . waits for all . index, checksums, and the folder has its name
others                                                 write their rows, then their checksums . go on
"""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from transformer_xl.checkpoint import Counters
from transformer_xl.checkpoint.folder import save_tensors, write_checksums, write_facts
from transformer_xl.checkpoint.shards import row_counts, shard_name, write_index
from transformer_xl.errors import CheckpointError
from transformer_xl.files import atomic_folder, digest, write_json
from transformer_xl.tensor_files import Kind
from transformer_xl.training.background import Background
from transformer_xl.training.session import Session

POLLING_SECONDS = 0.05


def begin_shards(
    folder: Path,
    tensors: Mapping[str, Mapping[str, Tensor]],
    session: Session,
    background: Background,
    *,
    counters: Counters,
    **facts: Any,
) -> Callable[[], None]:
    """Takes a snapshot of this rank's rows; what it returns writes them. `tensors`: as each rank has them, by part."""
    ranks, stack = session.ranks, ExitStack()
    kinds: dict[str, dict[str, tuple[Kind, bool]]] = {}
    own: dict[str, dict[str, Tensor]] = {}
    for part, named in tensors.items():
        in_rows = {name: hasattr(tensor, "to_local") for name, tensor in named.items()}
        kinds[part] = {name: (Kind(value.dtype, tuple(value.shape)), in_rows[name]) for name, value in named.items()}
        own[part] = {
            name: rows_of(value).detach().to("cpu", copy=True)
            for name, value in named.items()
            if (ranks.first or in_rows[name]) and rows_of(value).numel() + (not in_rows[name])
        }
        for name, value in own[part].items():
            whole, sharded = kinds[part][name]
            assert not sharded or len(value) == row_counts(whole.shape[0], ranks.count)[ranks.rank]

    def opened() -> str:
        return stack.enter_context(atomic_folder(folder)).name

    hidden = folder.parent / ranks.from_first(opened)

    def write_own() -> dict[str, str]:
        """By name the checksums of the files."""
        written = {shard_name(part, ranks.rank, ranks.count): named for part, named in own.items()}
        for name, named in written.items():
            save_tensors({key: value.contiguous() for key, value in named.items()}, hidden / name)
        return {name: digest(hidden / name) for name in written}

    def write_others() -> None:
        write_json(hidden / told_by(ranks.rank), write_own())

    def write_first() -> None:
        with stack:
            checksums = write_own()
            write_facts(hidden, counters=counters, **facts)
            write_index(hidden, kinds, count=ranks.count)
            for rank in range(1, ranks.count):
                path = hidden / told_by(rank)
                while not path.is_file():
                    if background.given_up.wait(POLLING_SECONDS):
                        raise CheckpointError(
                            f"{folder}: rank {rank} has not written its shard; the one before is whole"
                        )
                checksums |= json.loads(path.read_text(encoding="utf-8"))
                path.unlink()
            write_checksums(hidden, checksums)

    return write_first if ranks.first else write_others


def told_by(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def rows_of(tensor: Tensor) -> Tensor:
    """This rank's, of a tensor that is sharded; else all of it."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found
