"""What the voting methods and H2O keep, on CPU memory."""

from collections.abc import Iterator

import numpy as np

from kvd_cuda.backend import NOT_FINITE, BlockRanks, TokenSelection
from kvd_cuda.dtypes import FloatArray, IntArray
from kvd_cuda.errors import KernelInputError
from kvd_cuda.host_expected import ATTENTION_FLOOR, expected_attention, value_lengths
from kvd_cuda.host_keydiff import distinctness
from kvd_cuda.host_scoring import HostScoring, WindowScores, top_of
from kvd_cuda.plan import CompressPlan
from kvd_cuda.planes import HeadRange, KVPlanes
from kvd_cuda.queries import WindowQueries


def top_tokens(
    scoring: HostScoring, planes: KVPlanes, plan: CompressPlan, queries: WindowQueries
) -> TokenSelection:
    """See Backend."""
    kept = _with_ends_kept(planes, plan, queries.count)
    mass = np.zeros(planes.layers)
    for heads, scored, pooled in _pooled_votes(scoring, planes, plan, queries):
        chosen = kept[heads.layer, heads.start : heads.stop]
        chosen[:, plan.sinks : plan.target_tokens - queries.count] = plan.sinks + scoring.select(
            pooled[:, plan.sinks :], plan.target_tokens - plan.sinks - queries.count
        )
        for mass_row, slots in zip(scored.mass, chosen, strict=True):
            mass[heads.layer] += _summed(mass_row[slots])
    return TokenSelection(kept, (mass / planes.kv_heads).astype(np.float32))


def rank_blocks(
    scoring: HostScoring, planes: KVPlanes, plan: CompressPlan, queries: WindowQueries
) -> BlockRanks:
    """See Backend. Votes are summed over layers and heads in float64."""
    starts = np.arange(0, planes.length, planes.block_size)
    rank = np.zeros(planes.length)
    mass = np.zeros((planes.layers, starts.size))
    for heads, scored, pooled in _pooled_votes(scoring, planes, plan, queries):
        for pooled_row, mass_row in zip(pooled, scored.mass, strict=True):
            rank[: pooled_row.size] += pooled_row
            mass[heads.layer] += np.add.reduceat(mass_row.astype(np.float64), starts)
    block_rank = np.maximum.reduceat(rank, starts) / (planes.layers * planes.kv_heads)
    return BlockRanks(block_rank.astype(np.float32), mass / planes.kv_heads)


def heavy_tokens(planes: KVPlanes, plan: CompressPlan, recent: int) -> TokenSelection:
    """See Backend."""
    kept = _with_ends_kept(planes, plan, recent)
    mass = np.zeros(planes.layers)
    count = plan.target_tokens - plan.sinks - recent
    for layer, head in np.ndindex(planes.layers, planes.kv_heads):
        scores = planes.slot_scores(layer, head)
        if not np.isfinite(scores).all():
            raise KernelInputError(NOT_FINITE)
        chosen = kept[layer, head]
        top = top_of(scores[plan.sinks : planes.length - recent], count)
        chosen[plan.sinks : plan.sinks + count] = plan.sinks + top
        mass[layer] += _summed(scores[chosen]) / max(_summed(scores), np.finfo(np.float64).tiny)
    return TokenSelection(kept, (mass / planes.kv_heads).astype(np.float32))


def distinct_tokens(
    scoring: HostScoring, planes: KVPlanes, plan: CompressPlan, recent: int
) -> TokenSelection:
    """See Backend. No attention is looked at, so nothing is known of its mass."""
    kept = _with_ends_kept(planes, plan, recent)
    count = plan.target_tokens - plan.sinks - recent
    for layer, head in np.ndindex(planes.layers, planes.kv_heads):
        scores = distinctness(planes, layer, head)
        top = top_of(scores[plan.sinks : planes.length - recent], count)
        kept[layer, head, plan.sinks : plan.sinks + count] = plan.sinks + top
        scoring.step()
    return TokenSelection(kept, None)


def expected_tokens(
    scoring: HostScoring, planes: KVPlanes, plan: CompressPlan, queries: WindowQueries
) -> TokenSelection:
    """See Backend. The mass is that of the attention expected outside the sinks."""
    recent = min(plan.window, planes.length)
    kept = _with_ends_kept(planes, plan, recent)
    mass = np.zeros(planes.layers)
    count = plan.target_tokens - plan.sinks - recent
    for layer, head in np.ndindex(planes.layers, planes.kv_heads):
        attention = expected_attention(planes, queries, (layer, head), plan.sinks)
        lengths = value_lengths(planes, layer, head)[plan.sinks :]
        scores = (attention + ATTENTION_FLOOR) * lengths
        top = top_of(scores[: scores.size - recent], count)
        kept[layer, head, plan.sinks : plan.sinks + count] = plan.sinks + top
        mass[layer] += attention[kept[layer, head, plan.sinks :] - plan.sinks].sum()
        scoring.step()
    return TokenSelection(kept, (mass / planes.kv_heads).astype(np.float32))


def _with_ends_kept(planes: KVPlanes, plan: CompressPlan, window: int) -> IntArray:
    """int32 [layers, kv_heads, C] with the sinks and the window in place, the middle to be filled."""
    kept = np.empty((planes.layers, planes.kv_heads, plan.target_tokens), np.int32)
    kept[:, :, : plan.sinks] = np.arange(plan.sinks)
    kept[:, :, plan.target_tokens - window :] = np.arange(planes.length - window, planes.length)
    return kept


def _pooled_votes(
    scoring: HostScoring, planes: KVPlanes, plan: CompressPlan, queries: WindowQueries
) -> Iterator[tuple[HeadRange, WindowScores, FloatArray]]:
    """Scores and pooled votes before the window, one range of heads at a time."""
    before = planes.length - queries.count
    for heads in scoring.head_ranges(planes):
        scored = scoring.score_window(planes, queries, heads, plan.reduce)
        yield heads, scored, scoring.pool(scored.votes[:, :before], plan.kernel, plan.pooling)


def _summed(values: FloatArray) -> float:
    return float(values.sum(dtype=np.float64))
