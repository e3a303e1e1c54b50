"""Runs `kvd_cuda.reference` over a whole lease: what each method must keep, and how clear the cut is."""

from dataclasses import dataclass

import numpy as np

from kvd_cuda import reference
from kvd_cuda.compress import CompressPlan
from kvd_cuda.queries import WindowQueries

from .leases import Lease, query_values

CLEAR_GAP = 1e-6  # relative; below it float32 may order two scores either way


@dataclass(frozen=True)
class KeptRow:
    """One head's kept slots, the relative gap at the cut, and the attention they hold."""

    slots: list[int]
    gap: float
    mass: float

    @property
    def is_clear(self) -> bool:
        return self.gap > CLEAR_GAP


def expected_rows(lease: Lease, plan: CompressPlan, queries: WindowQueries) -> dict[tuple[int, int], KeptRow]:
    """By (layer, kv head). For h2o, `queries` are all that were observed."""
    rows = {}
    for layer in range(lease.planes.layers):
        keys, asked = lease.keys[layer], query_values(queries, layer)
        weights = reference.attention_weights(asked, keys)
        for head in range(lease.planes.kv_heads):
            if plan.method == "keydiff":
                rows[layer, head] = _distinct(plan, keys, head)
            elif plan.method == "expected":
                attention = reference.expected_attention(asked, keys, plan.sinks)[head]
                rows[layer, head] = _expected(plan, attention, lease.values[layer][:, head])
            else:
                rows[layer, head] = _row(plan, weights, keys.shape[1], head)
    return rows


def _expected(plan: CompressPlan, attention: np.ndarray, values: np.ndarray) -> KeptRow:
    """`attention` is that to all slots but the sinks."""
    length, sinks = len(values), plan.sinks
    scores = reference.expected_scores(attention, values[sinks:])[: -plan.window]
    padded = np.concatenate((np.zeros(sinks), scores))
    slots = reference.keep_top(padded, length, plan.target_tokens, sinks)
    gap = reference.gap_at_cut(scores, plan.target_tokens - sinks - plan.window)
    return KeptRow(slots, gap, float(attention[np.array(slots[sinks:]) - sinks].sum()))


def _distinct(plan: CompressPlan, keys: np.ndarray, head: int) -> KeptRow:
    """Cosines are about 1 in size, so the gap at the cut is taken as it is."""
    length = len(keys)
    scores = reference.distinctness(keys)[head][: length - plan.window]
    slots = reference.keep_top(scores, length, plan.target_tokens, plan.sinks)
    ranked = np.sort(scores[plan.sinks :])[::-1]
    count = plan.target_tokens - plan.sinks - plan.window
    return KeptRow(slots, float(ranked[count - 1] - ranked[count]), float("nan"))


def pooled_votes(lease: Lease, plan: CompressPlan, queries: WindowQueries) -> list[np.ndarray]:
    """Per layer [kv_heads, length - window]."""
    pooled = []
    for layer in range(lease.planes.layers):
        weights = reference.attention_weights(query_values(queries, layer), lease.keys[layer])
        votes = reference.votes(weights, lease.planes.kv_heads, plan.reduce)[:, : -queries.count]
        pooled.append(reference.pool(votes, plan.kernel, plan.pooling))
    return pooled


def _row(plan: CompressPlan, weights: np.ndarray, kv_heads: int, head: int) -> KeptRow:
    _, window, length = weights.shape
    mass = reference.mass(weights, kv_heads)[head]
    if plan.method == "streaming":
        slots = reference.keep_streaming(length, plan.target_tokens, plan.sinks)
        return KeptRow(slots, float("inf"), float(mass[slots].sum()))
    if plan.method == "h2o":
        scores = mass[: length - plan.window]
    else:
        votes = reference.votes(weights, kv_heads, plan.reduce)[:, : length - window]
        scores = reference.pool(votes, plan.kernel, plan.pooling)[head]
    slots = reference.keep_top(scores, length, plan.target_tokens, plan.sinks)
    count = plan.target_tokens - plan.sinks - (length - len(scores))
    gap = reference.gap_at_cut(scores[plan.sinks :], count)
    return KeptRow(slots, gap, float(mass[slots].sum()))
