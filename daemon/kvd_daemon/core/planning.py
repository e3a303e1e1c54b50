"""What a compression will do: checked and decided before anything changes."""

import numpy as np

from kvd.errors import (
    CompressionRefusedError,
    InvalidArgumentError,
    LimitExceededError,
    PoolExhaustedError,
)
from kvd.limits import MAX_TOKENS_PER_LEASE
from kvd.policy import H2O, ExpectedAttention, KeyDiff, Policy, SnapKV, Span, Streaming

from .forking import shares_scores
from .lease import Lease, LeaseState, Target
from .quotas import Need, require_room
from .registry import Registry, refuse_unless_active
from .results import Progress, QueryShape
from .session import Session


def check_queries(registry: Registry, session: Session, lease: Lease, queries: QueryShape) -> None:
    """Raises unless the queries fit the pool's heads and their scratch lease is there and idle."""
    spec = registry.pool_of(lease).spec
    if queries.tokens < 1:
        raise InvalidArgumentError(f"queries of {queries.tokens} tokens; at least one is needed")
    if queries.query_heads < 1 or queries.query_heads % spec.kv_heads:
        raise InvalidArgumentError(
            f"{queries.query_heads} query heads; a multiple of the pool's {spec.kv_heads} kv heads is needed"
        )
    if queries.scratch_lease_id is not None:
        scratch = registry.owned(session, queries.scratch_lease_id)
        if not scratch.scratch or scratch.pool != lease.pool:
            raise InvalidArgumentError(f"queries lie in a scratch lease of pool {lease.pool}; take one there")
        refuse_unless_active(scratch)


def refuse_second_votes(lease: Lease, progress: Progress, queries: QueryShape) -> None:
    """Raises InvalidArgumentError if a token's attention would be added to the running scores twice."""
    unobserved = progress.length - lease.observed_length
    if queries.tokens > unobserved:
        raise InvalidArgumentError(
            f"queries of {queries.tokens} tokens, but only the last {unobserved} were not observed yet; "
            "none may vote twice"
        )


def choose(
    registry: Registry, lease: Lease, policy: Policy, progress: Progress, queries: QueryShape | None
) -> Target | None:
    """What to keep and where to put it, None when the policy would keep everything.

    Raises when the policy lacks something, or the result would take more blocks than it frees.
    """
    spec = registry.pool_of(lease).spec
    tokens = policy.target_tokens(progress.length, spec.block_size)
    if tokens >= progress.length:
        return None
    _check_policy(lease, policy, progress, queries)
    if isinstance(policy, H2O) and queries is not None and shares_scores(registry.pool_of(lease), lease):
        raise InvalidArgumentError(
            f"lease {lease.lease_id} shares blocks with forks, whose running scores queries would change; "
            "compress without queries, or by another policy"
        )
    window = _window(policy, progress.length, queries)
    by_block = isinstance(policy, Span) and policy.granularity == "block"
    wanted = 0 if by_block else spec.blocks_for(tokens)
    return Target(
        policy=policy,
        tokens=tokens,
        window=window,
        destination_blocks=wanted,
        by_block=by_block,
        in_place=not by_block and _fits_only_in_place(registry, lease, wanted),
        adds_scores=isinstance(policy, H2O) and queries is not None,
    )


def _check_policy(lease: Lease, policy: Policy, progress: Progress, queries: QueryShape | None) -> None:
    if policy.needs_queries and queries is None:
        raise InvalidArgumentError(
            f"{policy} votes with the window's queries; pass them in a scratch lease (tokens, query_heads)"
        )
    if isinstance(policy, H2O):
        if queries is not None:  # an observation and a compression in one
            refuse_second_votes(lease, progress, queries)
        elif not lease.observed_length:
            raise InvalidArgumentError(f"{policy} needs running scores: call Observe before, or pass queries")
    if progress.position > MAX_TOKENS_PER_LEASE:
        raise LimitExceededError(
            f"position {progress.position}; explicit positions end at {MAX_TOKENS_PER_LEASE} (int32)"
        )


def _window(policy: Policy, length: int, queries: QueryShape | None) -> int:
    match policy:
        case SnapKV() | Span():
            assert queries is not None, "checked before"
            return min(policy.window, queries.tokens, length)
        case H2O() | KeyDiff() | ExpectedAttention():
            return min(policy.recent, length)
        case Streaming():
            return min(policy.window, length)
        case _:
            return length


def _fits_only_in_place(registry: Registry, lease: Lease, wanted: int) -> bool:
    """False: out of place. Shared blocks are never edited, so a sharer needs other blocks."""
    pool, tenant, need = registry.pool_of(lease), registry.tenants[lease.tenant], Need(ordinary=wanted)
    if lease.sealed_blocks:
        alone = int(np.count_nonzero(pool.blocks.holders[lease.sealed] == 1))
        freed = len(lease.blocks) - lease.sealed_blocks + alone
        if freed < wanted:
            raise CompressionRefusedError(
                f"lease {lease.lease_id} shares {lease.sealed_blocks} blocks: its compressed copy would take "
                f"{wanted} blocks and free {freed}; compress later, or use span by block",
                taken_blocks=wanted,
                freed_blocks=freed,
            )
        resting = lease.fate is LeaseState.RESTING  # no queries: the reserve is needed by nobody else for it
        require_room(pool, tenant, Need(scratch=wanted) if resting else need)
        return False
    try:
        require_room(pool, tenant, need)
    except PoolExhaustedError:
        return True
    return False
