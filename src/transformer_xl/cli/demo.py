"""Builds a small model and shows the heart of the paper: two segments with memory are one long pass."""

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults()


def run(arguments: argparse.Namespace) -> int:
    import torch

    from transformer_xl.config import ModelConfig
    from transformer_xl.model import TransformerXL

    torch.manual_seed(0)
    config = ModelConfig(vocabulary=256, n_layer=4, d_model=64, n_head=4, d_head=16, d_inner=128, memory=32)
    model = TransformerXL(config).double().eval()
    tokens_BT = torch.randint(256, (2, 65))
    with torch.no_grad():
        whole = model(tokens_BT[:, :64], targets_BT=tokens_BT[:, 1:])
        first = model(tokens_BT[:, :32], targets_BT=tokens_BT[:, 1:33])
        second = model(tokens_BT[:, 32:64], targets_BT=tokens_BT[:, 33:], memory=first.memory)
        forgetful = model(tokens_BT[:, 32:64], targets_BT=tokens_BT[:, 33:])
    remembered = (whole.loss_BT[:, 32:] - second.loss_BT).abs().max().item()
    forgotten = (whole.loss_BT[:, 32:] - forgetful.loss_BT).abs().max().item()
    print(
        f"A model of {sum(p.numel() for p in model.parameters()):,} parameters reads 64 tokens, at once and as two segments of 32."
    )
    print(f"Largest difference of a token's loss in the second segment, with memory:    {remembered:.1e} nats")
    print(f"Largest difference of a token's loss in the second segment, without memory: {forgotten:.1e} nats")
    return 0 if remembered < 1e-10 else 1
