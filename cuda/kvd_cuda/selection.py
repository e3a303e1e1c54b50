"""What each method keeps. One function a method, found by `CompressPlan.method` in SELECTORS.

Checks what needs no look at the bytes; what does is the backend's work.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvd_cuda.backend import Backend, TokenSelection
from kvd_cuda.dtypes import FloatArray, IntArray
from kvd_cuda.errors import KernelInputError
from kvd_cuda.plan import CompressPlan
from kvd_cuda.planes import KVPlanes
from kvd_cuda.queries import WindowQueries


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
    return backend.top_tokens(planes, plan, asked)


def select_blocks(
    backend: Backend, planes: KVPlanes, plan: CompressPlan, queries: WindowQueries | None
) -> BlockSelection:
    """Span by block: a block ranks as its best token, a token by its votes' mean over layers and heads."""
    asked = _window_queries(plan, queries)
    always = _blocks_always_kept(planes, plan, asked.count)
    found = backend.rank_blocks(planes, plan, asked)
    ranks = found.ranks.copy()
    ranks[always] = np.inf
    best_first = np.argsort(-ranks, kind="stable")  # ties to the lower block
    kept = np.sort(best_first[: -(-plan.target_tokens // planes.block_size)]).astype(np.int32)
    return BlockSelection(kept, found.masses[:, kept].sum(axis=1).astype(np.float32))


def select_heavy(
    backend: Backend, planes: KVPlanes, plan: CompressPlan, queries: WindowQueries | None
) -> TokenSelection:
    """H2O: sinks, the largest accumulated attention outside the last `window`, and those."""
    recent = min(plan.window, planes.length)
    plan.check_budget(recent)
    if planes.observed_length == 0:
        raise KernelInputError("no attention was accumulated for this lease; observe its queries first")
    return backend.heavy_tokens(planes, plan, recent)


def select_distinct(
    backend: Backend, planes: KVPlanes, plan: CompressPlan, queries: WindowQueries | None
) -> TokenSelection:
    """KeyDiff: sinks, the keys that differ most from all others, and the last `window`; nothing is asked."""
    recent = min(plan.window, planes.length)
    plan.check_budget(recent)
    return backend.distinct_tokens(planes, plan, recent)


def select_expected(
    backend: Backend, planes: KVPlanes, plan: CompressPlan, queries: WindowQueries | None
) -> TokenSelection:
    """Expected Attention: sinks, what queries like those given would attend to most, the last `window`."""
    if queries is None:
        raise KernelInputError("expected needs queries; send some like those to come")
    plan.check_budget(min(plan.window, planes.length))
    return backend.expected_tokens(planes, plan, queries)


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
    "keydiff": select_distinct,
    "expected": select_expected,
    "streaming": select_streaming,
}


def _window_queries(plan: CompressPlan, queries: WindowQueries | None) -> WindowQueries:
    """The window's queries; fewer than the window if fewer came, the newest if more did."""
    if queries is None:
        raise KernelInputError(f"{plan.method} needs the window's queries; send those of the last tokens")
    if plan.window == 0:
        raise KernelInputError(f"{plan.method} needs a window of at least one token to vote")
    return queries.part(max(0, queries.count - plan.window), queries.count)


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
