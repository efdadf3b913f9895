"""What `native/portable.cpp` computes, written down in NumPy, one token of one lane at a time: the arithmetic itself, without vectors, tiles, rings or
threads. Slow, and the same bits."""

from typing import Any

import numpy as np

from transformer_xl.inference.sines import sinusoid
from transformer_xl.model import TransformerXL
from transformer_xl.model.ngrams import rows_of

f32, f64 = np.float32, np.float64
Row = Any
MINUS_INFINITY = f32("-inf")


def once(a: Row, b: Row, c: Row) -> Row:
    """a * b + c rounded once: exact in double precision but for the sum, whose last bit is made odd where it is not exact."""
    product, added = f64(a) * f64(b), np.asarray(f64(c))
    product, added = np.broadcast_arrays(product, added)
    total = product + added
    part = total - product
    error = (product - (total - part)) + (added - part)
    bits = total.view(np.int64) if total.ndim else np.array(total).view(np.int64)
    away = np.where((error > 0) == (total > 0), 1, -1)
    odd = np.where((error != 0) & (bits % 2 == 0), bits + away, bits).astype(np.int64)
    return odd.view(f64).astype(f32)


def chains(x_I: Row, weight_OI: Row, start_O: Row) -> Row:
    total_O = np.broadcast_to(f32(start_O), weight_OI.shape[:1])
    for i, value in enumerate(x_I):
        total_O = once(value, weight_OI[:, i], total_O)
    return total_O


def sixteen(values: Row, add: Any) -> f32:
    """Number i is added to part i % 16; then the parts in halves."""
    parts = np.zeros(16, f32)
    for i, value in enumerate(values):
        parts[i % 16] = add(value, parts[i % 16])
    for half in (8, 4, 2, 1):
        parts = parts[:half] + parts[half:]
    return parts[0]


def power_of_e(x: Row) -> Row:
    magic, clipped = f32(12582912), np.maximum(x, f32(-87))
    shifted = once(clipped, f32(1.44269504088896341), magic)
    n = shifted - magic
    r = once(n, f32(2.12194440e-4), once(n, f32(-0.693359375), clipped))
    p = f32(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = once(p, r, f32(c))
    p = once(p, r * r, r) + f32(1)
    return np.where(x < f32(-87), f32(0), p * np.ldexp(f32(1), n.astype(np.int32))).astype(f32)


def normalise(x_D: Row, weight_D: Row, bias_D: Row, eps: f32) -> Row:
    size = f32(len(x_D))
    mean = sixteen(x_D, lambda value, part: part + value) / size
    spread = sixteen(x_D - mean, lambda value, part: once(value, value, part))
    scale = f32(1) / np.sqrt(spread / size + eps)
    return once((x_D - mean) * scale, weight_D, bias_D)


def soften(scores: Row, first: int) -> tuple[Row, f32]:
    """The sum's parts go by positions, of which `first` is that of the first score."""
    powers = power_of_e(scores - scores.max())
    return powers, sixteen(np.concatenate([np.zeros(first % 16, f32), powers]), lambda value, part: part + value)


def frequencies(logits_V: Row) -> Row:
    fine_V = (soften(logits_V, 0)[0] * f32(2**30)).astype(np.int64)
    free = 2**24 - len(fine_V)
    share = (free << 38) // int(fine_V.sum())
    found_V = [1 + ((int(fine) * share) >> 38) for fine in fine_V]
    found_V[int(fine_V.argmax())] += 2**24 - sum(found_V)
    return np.array(found_V, np.uint32)


class Oracle:
    """One lane."""

    def __init__(self, model: TransformerXL) -> None:
        self.config, self.read_tokens = model.config, list[int]()
        self.weights = {name: value.float().numpy() for name, value in model.state_dict().items()}
        self.kept: list[list[tuple[Row, Row]]] = [[] for _ in model.layers]
        config = self.config
        visible = config.visible_distance
        self.reach = config.memory if visible is None else visible
        distance_R = np.minimum(np.arange(self.reach + 1), config.clamp_len or self.reach)
        position_RD = sinusoid(distance_R, width=config.d_model, rounded=config.frequencies)
        self.relative = [
            np.stack(
                [chains(row_D, self.weights[f"encoding.relative_key.{n}.weight"], f32(0)) for row_D in position_RD]
            )
            for n in range(config.n_layer)
        ]

    def read(self, token: int) -> Row:
        config, w = self.config, self.weights
        self.read_tokens.append(token)
        scale, eps = f32(config.d_model**0.5), f32(config.norm_eps)
        x_D = w["vocabulary.tables.0"][token] * scale
        if config.ngrams:
            rows = rows_of(_tensor(self.read_tokens), None, orders=config.ngrams, rows=config.ngram_rows)
            found = np.concatenate(
                [table[int(row[0, -1])] for table, row in zip(w["ngrams.tables_GRE"], rows, strict=True)]
            )
            x_D = once(chains(found, w["ngrams.projection.weight"], f32(0)), scale, x_D)
        for n in range(config.n_layer):
            of = {
                name.removeprefix(f"layers.{n}."): value for name, value in w.items() if name.startswith(f"layers.{n}.")
            }
            norms = [(of[f"{name}.weight"], of[f"{name}.bias"]) for name in ("attention_norm", "feed_forward_norm")]
            pre = config.norm == "pre"
            x_D = x_D + self.attention(n, of, normalise(x_D, *norms[0], eps) if pre else x_D)
            x_D = x_D if pre else normalise(x_D, *norms[0], eps)
            inner_F = chains(normalise(x_D, *norms[1], eps) if pre else x_D, of["inner.weight"], of["inner.bias"])
            x_D = x_D + chains(np.where(inner_F > 0, inner_F, f32(0)), of["outer.weight"], of["outer.bias"])
            x_D = x_D if pre else normalise(x_D, *norms[1], eps)
        if config.final_norm:
            x_D = normalise(x_D, w["final_norm.weight"], w["final_norm.bias"], eps)
        head = w["vocabulary.tables.0" if config.tie_embeddings else "vocabulary.output_tables.0"]
        return frequencies(chains(x_D, head, w["vocabulary.bias_V"]))

    def attention(self, n: int, of: dict[str, Row], x_D: Row) -> Row:
        config, w = self.config, self.weights
        H, K, now = config.n_head, config.d_head, len(self.read_tokens) - 1
        scale, pair = f32(1) / np.sqrt(f32(K)), 0 if config.share_biases else n
        query_HK = chains(x_D, of["query.weight"], f32(0)).reshape(H, K)
        self.kept[n].append(tuple(chains(x_D, of["key_value.weight"], f32(0)).reshape(2, H, K)))
        first = max(0, now - self.reach)
        mixed_HK = np.zeros((H, K), f32)
        for h in range(H):
            by_content = (query_HK[h] + w["encoding.content_bias_PHK"][pair, h]) * scale
            by_position = (query_HK[h] + w["encoding.position_bias_PHK"][pair, h]) * scale
            relative_RK = self.relative[n][: now - first + 1, h * K : (h + 1) * K][::-1]
            key_JK, value_JK = (np.stack([kept[i][h] for kept in self.kept[n][first:]]) for i in range(2))
            scores = chains(by_content, key_JK, chains(by_position, relative_RK, f32(0)))
            powers, total = soften(scores, first)
            mixed_HK[h] = chains(powers, value_JK.T, f32(0)) * (f32(1) / total)
            for back in range(min(config.neighbours, now - first + 1)):
                weight_K = of["neighbours_WX"][back, h * K : (h + 1) * K]
                mixed_HK[h] = once(weight_K, value_JK[-1 - back], mixed_HK[h])
        return chains(mixed_HK.reshape(-1), of["attention_output.weight"], f32(0))


def _tensor(tokens: list[int]) -> Any:
    import torch

    return torch.tensor([tokens])
