"""Every kernel at work on small models, for comparing libraries: in a process of its own, because a process has one library.

python kernel_calls.py RESULTS --march x86-64-v3    what is built on first use, for that set of instructions, computes
python kernel_calls.py RESULTS                      what this installation has, computes: a wheel's library, where it has one
python kernel_calls.py RESULTS --library FILE       what that library computes
... --record CALLS                                  and each call, with all that it was given and gave, for `replayed_calls.cpp`
... --portable                                      only the kernels whose bits are the same everywhere
"""

import argparse
import ctypes
import struct
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

sys.path.append(str(Path(__file__).parents[1]))

from small_models import build
from transformer_xl import native
from transformer_xl.decoding import Sampling
from transformer_xl.decoding.writing import start_lanes
from transformer_xl.inference import Engine, PortableReader
from transformer_xl.native import building, doors

SHAPES = (
    {"memory": 20, "d_model": 32, "d_head": 8, "d_inner": 48},
    {"memory": 9, "norm": "pre", "final_norm": True, "neighbours": 3, "ngrams": (2, 3), "ngram_rows": 17, "d_ngram": 4},
    {"memory": 70, "vocabulary": 300, "encoding": "shaw", "learned_positions": 30, "d_head": 5},
)
SAMPLINGS = [Sampling(seed=seed, top_k=k, top_p=p) for seed, k, p in ((1, 0, 1.0), (2, 5, 0.9), (3, 0, 0.5))]


PORTABLE = (
    {"memory": 40, "d_head": 17, "n_head": 3, "d_model": 36, "d_inner": 50, "vocabulary": 300, "tie_embeddings": False},
    SHAPES[1] | {"memory": 20},
)


def portable_results() -> dict[str, torch.Tensor]:
    """Frequencies of many lanes and of one, read in pieces that make tiles of every size, past the end of their rings."""
    found = {}
    for number, shape in enumerate(PORTABLE):
        model = build(**shape)
        for lanes in (1, 7, 70):
            reader = PortableReader(model, lanes=lanes, threads=2)
            tokens_BT = np.random.default_rng(0).integers(13, size=(lanes, 140 // lanes + 4))
            parts = [reader.read_many(part) for part in np.split(tokens_BT, [1, 2, 4], axis=1)]
            found[f"portable {number} {lanes}"] = torch.from_numpy(np.concatenate(parts, axis=1).view(np.int32))
    return found


def results() -> dict[str, torch.Tensor]:
    found = portable_results()
    for number, shape in enumerate(SHAPES):
        for dtype in (torch.float32, torch.float64):
            for name, result in of_model(shape, dtype).items():
                found[f"{number} {dtype} {name}"] = result.clone()
    for dtype in (torch.float32, torch.float64):
        x_PI, weight_OI = torch.randn(40, 33, dtype=dtype), torch.randn(50, 33, dtype=dtype)
        found[f"{dtype} linear"] = native.linear(x_PI, weight_OI, None, None)
        gradient_PO, gradient_OI = torch.randn(40, 50, dtype=dtype), torch.empty_like(weight_OI)
        found[f"{dtype} few_backward"] = native.few_backward(gradient_PO, x_PI, weight_OI, gradient_OI)
        found[f"{dtype} few_backward's matrix"] = gradient_OI
        moved_OI, beside = weight_OI.clone(), {"inverse": [weight_OI.abs()], "back": [weight_OI.sigmoid()]}
        native.MovingWeights([moved_OI], [weight_OI], **beside).move([gradient_OI], rate=0.1, decay=0.0)
        found[f"{dtype} moved weights"] = moved_OI
        next_S, target_T = torch.arange(50) % 7, torch.arange(40) % 7
        found[f"{dtype} recalled"] = native.recall(gradient_PO, next_S, target_T, past=9, size=30, theta=0.5)
        for logits in (torch.float32, torch.bfloat16) if dtype is torch.float32 else (dtype,):
            logits_PO, bias_O = (gradient_PO * 3).to(logits), x_PI.new_zeros(50)
            found[f"{dtype} losses of {logits}"] = native.softmax_loss(
                logits_PO, weight_OI[:, 0].contiguous(), target_T, of_bias_V=bias_O
            )
            found |= {f"{dtype} gradients of {logits}": logits_PO, f"{dtype} bias beside {logits}": bias_O}
    return found


def of_model(shape: dict[str, object], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    found = {}
    model = build(**shape).to(dtype)
    tokens_BT = torch.randint(13, (3, 70), generator=torch.Generator().manual_seed(0))
    for weights in ("exact", "int8") if dtype is torch.float32 else ("exact",):
        reading, stepping = (Engine(model, lanes=3, weights=weights) for _ in range(2))
        found[f"{weights} reading"] = reading.score(tokens_BT)
        found[f"{weights} stepping"] = torch.cat([stepping.score(tokens_BT[:, t : t + 1]) for t in range(12)], 1)
        lanes = start_lanes(model, tokens_BT[:, :4].tolist(), samplings=SAMPLINGS, weights=weights)
        drawn = [[picked.token for picked in drawn] for _ in range(4) for drawn in lanes.next_few(5)]
        found[f"{weights} writing"] = torch.tensor(drawn)
    model = build(**shape, dropout=0.2, attention_dropout=0.1, train=True).to(dtype)
    first = model(tokens_BT[:, :40], targets_BT=tokens_BT[:, 1:41])
    second = model(tokens_BT[:, 40:-1], targets_BT=tokens_BT[:, 41:], memory=first.memory)
    (first.loss_BT.sum() + second.loss_BT.sum()).backward()
    found["loss"] = second.loss_BT.detach()
    gradients = ((name, each.grad) for name, each in model.named_parameters())
    return found | {f"gradient of {name}": each for name, each in gradients if each is not None}


class Recorder:
    """Notes each call of a kernel: its structures and tensors as bytes, and where in them addresses of others stand."""

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        """By address. They stay alive, so that no address is used twice."""
        self.calls: list[bytes] = []
        self.expected: list[tuple[str, torch.Tensor]] = []
        self.names: set[str] = set()
        really_where, self.really_call = torch.Tensor.data_ptr, doors._call

        def where(tensor: torch.Tensor) -> int:
            address = really_where(tensor)
            if tensor.numel():
                self.tensors[address] = tensor
            return address

        torch.Tensor.data_ptr = where
        doors._call = self.call

    def call(self, name: str, dtype: torch.dtype, *arguments: object, threads: int | None = None) -> None:
        buffers: list[bytes] = []
        used: dict[int, int] = {}
        links: list[tuple[int, int, int]] = []
        words, doubles = list[tuple[int, int]](), list[float]()  # of a word, the second: the buffer that it points at

        def buffer_of(address: int) -> int:
            if address not in used:
                used[address] = len(buffers)
                buffers.append(self.tensors[address].detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            return used[address]

        for kind, argument in zip(doors.SIGNATURES[name], arguments, strict=True):
            given = getattr(argument, "_obj", argument)  # of a reference
            if isinstance(given, ctypes.Structure | ctypes.Array):
                mine, data = len(buffers), bytes(given)
                buffers.append(data)
                addresses = enumerate(struct.unpack(f"<{len(data) // 8}Q", data))
                links += [(mine, at * 8, buffer_of(each)) for at, each in addresses if each in self.tensors]
                words.append((0, mine))
            elif kind is ctypes.c_double:
                doubles.append(float(argument))
            else:
                value = int(argument or 0)
                words.append(
                    (0, buffer_of(value)) if kind is ctypes.c_void_p and value in self.tensors else (value, -1)
                )
        words.append((1, -1))  # one thread
        self.really_call(name, dtype, *arguments, threads=1)
        self.names.add(name)
        self.expected += [(name, self.tensors[address].detach().clone()) for address in used]
        parts = [f"{name}_{doors.DTYPES[dtype]}".encode().ljust(64, b"\0"), struct.pack("<q", len(buffers))]
        kept = set(used.values())
        for number, data in enumerate(buffers):
            parts += [struct.pack("<qq", len(data), number in kept), data]
        parts.append(struct.pack("<q", len(links)) + b"".join(struct.pack("<qqq", *link) for link in links))
        parts.append(
            struct.pack("<q", len(words)) + b"".join(struct.pack("<Qq", value % 2**64, to) for value, to in words)
        )
        parts.append(struct.pack("<q", len(doubles)) + struct.pack(f"<{len(doubles)}d", *doubles))
        self.calls.append(b"".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    for name in ("march", "library", "record"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--portable", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.march:
        wanted = f"-march={asked.march}"
        building.FLAGS = tuple(wanted if flag == "-march=native" else flag for flag in building.FLAGS)
    if asked.library:
        building.library = lambda: ctypes.CDLL(asked.library)
    found = building.library()
    assert found is not None
    recorder = Recorder() if asked.record else None
    torch.manual_seed(0)
    computed = portable_results() if asked.portable else results()
    save_file({name: result.contiguous() for name, result in computed.items()}, asked.results)
    if recorder is not None:
        portable = {name for name in doors.SIGNATURES if name.startswith("portable")}
        assert recorder.names == (portable if asked.portable else set(doors.SIGNATURES)), "every kernel is called"
        Path(asked.record).write_bytes(struct.pack("<q", len(recorder.calls)) + b"".join(recorder.calls))
        numbered = {f"{i:06} {name}": tensor.contiguous() for i, (name, tensor) in enumerate(recorder.expected)}
        save_file(numbered, f"{asked.record}.safetensors")
    print(found._name)


if __name__ == "__main__":
    main()
