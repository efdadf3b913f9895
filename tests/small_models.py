"""Small float64 models with weights large enough that every mistake shows."""

import torch

from transformer_xl.config import ModelConfig
from transformer_xl.model import Memory, TransformerXL

LEARNED = ("shaw", "shaw_biased", "per_layer")


def build(*, seed: int = 0, train: bool = False, **changes: object) -> TransformerXL:
    fields: dict[str, object] = {
        "vocabulary": 13,
        "n_layer": 2,
        "d_model": 8,
        "n_head": 2,
        "d_head": 3,
        "d_inner": 10,
        "memory": 6,
        "init_std": 0.5,
        "projection_init_std": 0.5,
    }
    fields |= changes
    if fields.get("encoding") in LEARNED:
        fields.setdefault("learned_positions", 5)
    torch.manual_seed(seed)
    model = TransformerXL(ModelConfig(**fields)).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for (
            parameter
        ) in model.parameters():  # biases and norms start at 0 and 1: move them, or a mistake in them stays unseen
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train(train)


def random_memory(
    model: TransformerXL, *, lanes: int, length: int, valid: list[int] | None = None, seed: int = 1
) -> Memory:
    generator = torch.Generator().manual_seed(seed)
    shape = (lanes, length, model.config.d_model)
    layers = tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(model.config.n_layer))
    recent = torch.randint(-1, model.config.vocabulary, (lanes, model.config.recent), generator=generator)
    valid_B = torch.tensor([length] * lanes if valid is None else valid)
    return Memory(layers=layers, valid_B=valid_B, recent_BP=recent if model.config.recent else None)


def random_tokens(model: TransformerXL, *, lanes: int, length: int, seed: int = 2) -> torch.Tensor:
    return torch.randint(model.config.vocabulary, (lanes, length), generator=torch.Generator().manual_seed(seed))
