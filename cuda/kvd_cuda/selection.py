"""What each method keeps. One function a method, found by `CompressPlan.method` in SELECTORS."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kvd_cuda.backend import Backend, WindowScores
from kvd_cuda.dtypes import FloatArray, IntArray
from kvd_cuda.errors import KernelInputError
from kvd_cuda.plan import CompressPlan
from kvd_cuda.planes import HeadRange, KVPlanes
from kvd_cuda.queries import WindowQueries


@dataclass(frozen=True)
class TokenSelection:
    """Slots that stay, per layer and kv head.

    kept           int32 [layers, kv_heads, C], ascending (may be a read-only broadcast)
    mass_retained  float32 [layers]: share of the attention seen that the kept slots hold, mean over kv heads;
                   None if the method looked at none (streaming)
    """

    kept: IntArray
    mass_retained: FloatArray | None


@dataclass(frozen=True)
class BlockSelection:
    """Blocks that stay, the same for all layers and heads.

    kept_blocks    int32 [n], ascending indices into the source block table
    mass_retained  float32 [layers], as in TokenSelection
    """

    kept_blocks: IntArray
    mass_retained: FloatArray


Selection = TokenSelection | BlockSelection
Selector = Callable[[Backend, KVPlanes, CompressPlan, WindowQueries | None], Selection]


def select_by_votes(
    backend: Backend, planes: KVPlanes, plan: CompressPlan, queries: WindowQueries | None
) -> TokenSelection:
    """SnapKV, dual and Span by token: sinks, top of the pooled votes outside them, window."""
    asked = _window_queries(plan, queries)
    plan.check_budget(asked.count)
    kept = _with_ends_kept(planes, plan, asked.count)
    mass = np.zeros(planes.layers)
    for heads, scored, pooled in _pooled_votes(backend, planes, plan, asked):
        chosen = kept[heads.layer, heads.start : heads.stop]
        chosen[:, plan.sinks : plan.target_tokens - asked.count] = plan.sinks + backend.select(
            pooled[:, plan.sinks :], plan.target_tokens - plan.sinks - asked.count
        )
        for mass_row, slots in zip(scored.mass, chosen, strict=True):
            mass[heads.layer] += _summed(mass_row[slots])
    return TokenSelection(kept, (mass / planes.kv_heads).astype(np.float32))


def select_blocks(
    backend: Backend, planes: KVPlanes, plan: CompressPlan, queries: WindowQueries | None
) -> BlockSelection:
    """Span by block: a block ranks as its best token, a token by its votes' mean over layers and heads."""
    asked = _window_queries(plan, queries)
    always = _blocks_always_kept(planes, plan, asked.count)
    starts = np.arange(0, planes.length, planes.block_size)
    rank = np.zeros(planes.length)
    mass = np.zeros((planes.layers, starts.size))
    for heads, scored, pooled in _pooled_votes(backend, planes, plan, asked):
        for pooled_row, mass_row in zip(pooled, scored.mass, strict=True):
            rank[: pooled_row.size] += pooled_row
            mass[heads.layer] += np.add.reduceat(mass_row.astype(np.float64), starts)
    block_rank = (np.maximum.reduceat(rank, starts) / (planes.layers * planes.kv_heads)).astype(np.float32)
    block_rank[always] = np.inf
    count = -(-plan.target_tokens // planes.block_size)
    kept_blocks = backend.select(block_rank[None], count)[0]
    return BlockSelection(
        kept_blocks, (mass[:, kept_blocks].sum(axis=1) / planes.kv_heads).astype(np.float32)
    )


def select_heavy(
    backend: Backend, planes: KVPlanes, plan: CompressPlan, queries: WindowQueries | None
) -> TokenSelection:
    """H2O: sinks, the largest accumulated attention outside the last `window`, and those."""
    recent = min(plan.window, planes.length)
    plan.check_budget(recent)
    if planes.observed_length == 0:
        raise KernelInputError("no attention was accumulated for this lease; observe its queries first")
    kept = _with_ends_kept(planes, plan, recent)
    mass = np.zeros(planes.layers)
    candidates = slice(plan.sinks, planes.length - recent)
    for layer, head in np.ndindex(planes.layers, planes.kv_heads):
        scores = planes.slot_scores(layer, head)
        if not np.isfinite(scores).all():
            raise KernelInputError("accumulated scores are NaN or infinite; observe the lease again")
        chosen = kept[layer, head]
        count = plan.target_tokens - plan.sinks - recent
        top = backend.select(scores[None, candidates], count)[0]
        chosen[plan.sinks : plan.sinks + count] = plan.sinks + top
        mass[layer] += _summed(scores[chosen]) / max(_summed(scores), np.finfo(np.float64).tiny)
    return TokenSelection(kept, (mass / planes.kv_heads).astype(np.float32))


def select_streaming(
    backend: Backend, planes: KVPlanes, plan: CompressPlan, queries: WindowQueries | None
) -> TokenSelection:
    """StreamingLLM: the sinks and the newest tokens that fit; nothing is scored."""
    plan.check_budget(1)
    newest = plan.target_tokens - plan.sinks
    ends = [np.arange(plan.sinks), np.arange(planes.length - newest, planes.length)]
    kept = np.concatenate(ends).astype(np.int32)
    return TokenSelection(np.broadcast_to(kept, (planes.layers, planes.kv_heads, kept.size)), None)


SELECTORS: dict[str, Selector] = {
    "snapkv": select_by_votes,
    "span": select_by_votes,
    "span_block": select_blocks,
    "h2o": select_heavy,
    "streaming": select_streaming,
}


def _window_queries(plan: CompressPlan, queries: WindowQueries | None) -> WindowQueries:
    """The window's queries; fewer than the window if fewer came, the newest if more did."""
    if queries is None:
        raise KernelInputError(f"{plan.method} needs the window's queries; send those of the last tokens")
    if plan.window == 0:
        raise KernelInputError(f"{plan.method} needs a window of at least one token to vote")
    return queries.part(max(0, queries.count - plan.window), queries.count)


def _with_ends_kept(planes: KVPlanes, plan: CompressPlan, window: int) -> IntArray:
    """int32 [layers, kv_heads, C] with the sinks and the window in place, the middle to be filled."""
    kept = np.empty((planes.layers, planes.kv_heads, plan.target_tokens), np.int32)
    kept[:, :, : plan.sinks] = np.arange(plan.sinks)
    kept[:, :, plan.target_tokens - window :] = np.arange(planes.length - window, planes.length)
    return kept


def _pooled_votes(
    backend: Backend, planes: KVPlanes, plan: CompressPlan, queries: WindowQueries
) -> Iterator[tuple[HeadRange, WindowScores, FloatArray]]:
    """Scores and pooled votes before the window, one range of heads at a time."""
    before = planes.length - queries.count
    for heads in backend.head_ranges(planes):
        scored = backend.score_window(planes, queries, heads, plan.reduce)
        yield heads, scored, backend.pool(scored.votes[:, :before], plan.kernel, plan.pooling)


def _blocks_always_kept(planes: KVPlanes, plan: CompressPlan, window: int) -> IntArray:
    """Indices of the blocks with a sink or a window token; KernelInputError if they alone are too many."""
    block_count = -(-planes.length // planes.block_size)
    blocks = np.arange(block_count, dtype=np.int32)
    first_of_window = (planes.length - window) // planes.block_size
    always = blocks[(blocks * planes.block_size < plan.sinks) | (blocks >= first_of_window)]
    if always.size > -(-plan.target_tokens // planes.block_size):
        raise KernelInputError(
            f"sinks={plan.sinks} and window={window} lie in {always.size} blocks of {planes.block_size}, "
            f"more than target_tokens={plan.target_tokens}; keep more tokens or shorten the window"
        )
    return always


def _summed(values: FloatArray) -> float:
    return float(values.sum(dtype=np.float64))
