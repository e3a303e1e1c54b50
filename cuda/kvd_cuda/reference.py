"""What is right, in plain float64: the oracle every backend is tested against. Slow, and meant to be read.

Works on gathered arrays: keys [N, kv_heads, head_dim], queries [W, q_heads, head_dim] of the last W tokens,
votes [kv_heads, N]. Sources: SnapKV (Li 2024, listing 1), StreamingLLM (Xiao 2023), H2O (Zhang 2023).
"""

from itertools import pairwise

import numpy as np

from kvd_cuda.dtypes import Array, DoubleArray


def causal_scores(queries: Array, keys: Array) -> DoubleArray:
    """Scaled scores of the last W tokens' queries: [q_heads, W, N], -inf where a token cannot see yet."""
    window, q_heads, head_dim = queries.shape
    length, kv_heads, _ = keys.shape
    group = q_heads // kv_heads
    scores = np.full((q_heads, window, length), -np.inf)
    for head in range(q_heads):
        shared = keys[:, head // group].astype(np.float64)
        for i in range(window):
            visible = length - window + i + 1
            scores[head, i, :visible] = shared[:visible] @ queries[i, head].astype(np.float64)
    scaled: DoubleArray = scores / np.sqrt(head_dim)
    return scaled


def softmax(scores: DoubleArray) -> DoubleArray:
    """Along the last axis."""
    exponents = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights: DoubleArray = exponents / exponents.sum(axis=-1, keepdims=True)
    return weights


def attention_weights(queries: Array, keys: Array) -> DoubleArray:
    """Softmax over all visible keys, window included: [q_heads, W, N], rows sum to 1."""
    return softmax(causal_scores(queries, keys))


def row_lse(queries: Array, keys: Array) -> DoubleArray:
    """Natural log-sum-exp of each query's causal scores: [W, q_heads], as flash attention returns it."""
    scores = causal_scores(queries, keys)
    highest = scores.max(axis=-1)
    lse: DoubleArray = (highest + np.log(np.exp(scores - highest[..., None]).sum(axis=-1))).T
    return lse


def votes(weights: DoubleArray, kv_heads: int, reduce: str) -> DoubleArray:
    """[kv_heads, N]: "mean" over a group's heads of the sum over queries (SnapKV), "max" over both (Span)."""
    q_heads, window, length = weights.shape
    grouped = weights.reshape(kv_heads, q_heads // kv_heads, window, length)
    voted: DoubleArray = grouped.max(axis=(1, 2)) if reduce == "max" else grouped.sum(axis=2).mean(axis=1)
    return voted


def mass(weights: DoubleArray, kv_heads: int) -> DoubleArray:
    """[kv_heads, N]: mean attention over a group's heads and queries; each row sums to 1."""
    mean: DoubleArray = votes(weights, kv_heads, "mean") / weights.shape[1]
    return mean


def pool(row_votes: DoubleArray, kernel: int, kind: str) -> DoubleArray:
    """[heads, N], stride 1: "avg" divides by `kernel` also at the ends, "max" sees -inf outside."""
    half = kernel // 2
    outside = 0.0 if kind == "avg" else -np.inf
    padded = np.pad(row_votes, ((0, 0), (half, half)), constant_values=outside)
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=1)
    pooled: DoubleArray = windows.sum(axis=2) / kernel if kind == "avg" else windows.max(axis=2)
    return pooled


def top(scores: DoubleArray, count: int) -> list[int]:
    """Ascending indices of the `count` largest, ties to the lower index."""
    return sorted(sorted(range(len(scores)), key=lambda j: (-scores[j], j))[:count])


def gap_at_cut(scores: DoubleArray, count: int) -> float:
    """Relative distance of the last kept score from the next that could change the set; inf if none could.

    Equal scores at the cut (max pooling makes plateaus) are settled by their index, in any precision; then
    the distance to the nearest different score counts.
    """
    if not 0 < count < len(scores):
        return float("inf")
    ordered = np.sort(scores)[::-1]
    last = ordered[count - 1]
    rivals = ordered[count:] if last != ordered[count] else ordered[ordered != last]
    if rivals.size == 0:
        return float("inf")
    return float(np.abs(rivals - last).min() / max(abs(last), np.finfo(np.float64).tiny))


def keep_top(scores: DoubleArray, length: int, budget: int, sinks: int) -> list[int]:
    """One head's kept slots: sinks, top of `scores` outside them, and all slots that have no score.

    scores [length - window]; pooled votes (SnapKV, dual, Span) or accumulated attention (H2O).
    """
    window = length - len(scores)
    chosen = [sinks + j for j in top(scores[sinks:], budget - sinks - window)]
    return [*range(sinks), *chosen, *range(length - window, length)]


def keep_streaming(length: int, budget: int, sinks: int) -> list[int]:
    """StreamingLLM: the first `sinks` slots and the last ones that fit."""
    return [*range(sinks), *range(length - (budget - sinks), length)]


def distinctness(keys: Array) -> DoubleArray:
    """KeyDiff's scores of keys [length, kv_heads, head_dim]: [kv_heads, length]. Section 3 of its paper."""
    lengths = np.linalg.norm(keys.astype(np.float64), axis=2, keepdims=True)
    unit = keys / np.where(lengths == 0, 1, lengths)
    anchor = unit.mean(axis=0)
    cosines: DoubleArray = np.einsum("nhd,hd->hn", unit, anchor) / np.linalg.norm(anchor, axis=1)[:, None]
    return -cosines


def expected_attention(queries: Array, keys: Array, sinks: int) -> DoubleArray:
    """[kv_heads, length - sinks]: attention to all but the sinks of queries distributed as these.

    queries [n, q_heads, head_dim]; per head they are taken as normally distributed:
    E exp(q.k / sqrt(D)) = exp(mean.k / sqrt(D) + k.covariance.k / 2 D), normalised, mean over a group.
    """
    keys = keys[sinks:]
    length, kv_heads, head_dim = keys.shape
    group = queries.shape[1] // kv_heads
    expected = np.empty((queries.shape[1], length))
    for head in range(queries.shape[1]):
        asked, shared = queries[:, head].astype(np.float64), keys[:, head // group].astype(np.float64)
        centred = asked - asked.mean(axis=0)
        covariance = centred.T @ centred / len(asked)
        spread = np.einsum("nd,de,ne->n", shared, covariance, shared) / (2 * head_dim)
        expected[head] = softmax(shared @ asked.mean(axis=0) / np.sqrt(head_dim) + spread)
    mean: DoubleArray = expected.reshape(kv_heads, group, length).mean(axis=1)
    return mean


def expected_scores(attention: DoubleArray, values: Array) -> DoubleArray:
    """What a token is worth by Expected Attention: [length] of one head; values [length, head_dim]."""
    scores: DoubleArray = (attention + 0.01) * np.linalg.norm(values.astype(np.float64), axis=1)
    return scores


def block_ranks(pooled: list[DoubleArray], length: int, block_size: int) -> DoubleArray:
    """Span by block: per block the largest, over its tokens, of the mean over layers and heads.

    pooled  per layer [kv_heads, length - window]; a block without any such token ranks 0
    """
    mean = np.concatenate(pooled).mean(axis=0)
    starts = range(0, length, block_size)
    return np.array([mean[s : s + block_size].max(initial=0.0) for s in starts])


def keep_blocks(ranks: DoubleArray, budget_blocks: int, always: set[int]) -> list[int]:
    """Blocks in `always` and the best others, ties to the lower index, `budget_blocks` in all."""
    others = np.array([-np.inf if b in always else rank for b, rank in enumerate(ranks)])
    return sorted(always | set(top(others, budget_blocks - len(always))))


def accumulate(queries: Array, keys: Array) -> DoubleArray:
    """H2O: [kv_heads, N] attention of the last n tokens, summed over them and over each group's heads."""
    weights = attention_weights(queries, keys)
    kv_heads = keys.shape[1]
    summed: DoubleArray = votes(weights, kv_heads, "mean") * (weights.shape[0] // kv_heads)
    return summed


def compacted(slots: Array, kept: Array) -> Array:
    """slots [N, heads, ...], kept [heads, C] -> [C, heads, ...]: slot kept[h, c] of head h moves to c."""
    assert all(a < b for row in kept.tolist() for a, b in pairwise(row))
    moved: Array = np.stack([slots[kept[head], head] for head in range(kept.shape[0])], axis=1)
    return moved


def attend(queries: Array, keys: Array, values: Array) -> DoubleArray:
    """Attention output over all of keys and values, unmasked: [W, q_heads, head_dim_v]."""
    window, q_heads, head_dim = queries.shape
    group = q_heads // keys.shape[1]
    outputs = np.empty((window, q_heads, values.shape[2]))
    for head in range(q_heads):
        shared = keys[:, head // group].astype(np.float64)
        weights = softmax(queries[:, head].astype(np.float64) @ shared.T / np.sqrt(head_dim))
        outputs[:, head] = weights @ values[:, head // group].astype(np.float64)
    return outputs


def rotate(keys: Array, delta: int, inv_freq: DoubleArray, style: str) -> DoubleArray:
    """RoPE by `delta` positions, pair by pair as complex numbers; elements past the rotary ones stay."""
    half = len(inv_freq)
    rotated = keys.astype(np.float64)
    for pair in range(half):
        x, y = (pair, pair + half) if style == "half" else (2 * pair, 2 * pair + 1)
        turned = (keys[..., x] + 1j * keys[..., y].astype(np.float64)) * np.exp(1j * delta * inv_freq[pair])
        rotated[..., x], rotated[..., y] = turned.real, turned.imag
    return rotated
