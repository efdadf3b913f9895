"""Run by torchrun: a model whose layers are gathered in bfloat16, its loss and its gradients beside those of the whole model, which rounds the same factors."""

import json
import sys
from pathlib import Path

import torch

from small_models import build, random_tokens
from transformer_xl.model import products
from transformer_xl.training.ranks import full, joined

SHAPE = {"n_layer": 2, "d_model": 16, "d_head": 8, "d_inner": 32}


def main() -> None:
    with joined(parallel="fsdp", device="cpu") as ranks:
        whole, shards = (build(train=True, init_std=0.1, **SHAPE).float() for _ in range(2))
        wrapped = ranks.wrap(shards, device=torch.device("cpu"), numbers=1, half=torch.bfloat16)
        types, gathered = set(), {}
        shards.layers[0].query.register_forward_pre_hook(lambda module, given: types.add(module.weight.dtype))
        shards.layers[0].register_forward_hook(lambda module, given, out: gathered.update(residual=out.dtype))
        tokens_BT = random_tokens(whole, lanes=2, length=6)
        losses = []
        for model in (whole, wrapped):
            with products.rounded(torch.bfloat16):
                loss = model(tokens_BT[:, :-1], targets_BT=tokens_BT[:, 1:]).loss_BT.sum()
                loss.backward()
            losses.append(float(loss))
        off, size = 0.0, 0.0
        for (name, one), (_, other) in zip(whole.named_parameters(), shards.named_parameters(), strict=True):
            found = full(other.grad)
            assert found.dtype == other.dtype == torch.float32, name
            off += float((found - one.grad).square().sum())
            size += float(one.grad.square().sum())
        told = {
            "losses": losses,
            "off": (off / size) ** 0.5,
            "types": [*map(str, types)],
            "residual": str(gathered["residual"]),
        }
        if ranks.first:
            Path(sys.argv[1]).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
