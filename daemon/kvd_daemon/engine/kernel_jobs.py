"""From the core's plans to the kernel worker's jobs."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvd.errors import InvalidArgumentError
from kvd.policy import H2O, ExpectedAttention, KeyDiff, Policy, SnapKV, Span, Streaming
from kvd_daemon.core import CompressPlan, Device, Lease, QueryShape
from kvd_daemon.kernel.messages import Compress, Observe, no_ids, no_runs

ROPE_STYLES = {"half_split": "half", "interleaved": "interleaved"}  # the wire's names, the kernels' names


@dataclass(frozen=True)
class GivenQueries:
    """Where the worker put its queries: see kvd.v1.Queries."""

    scratch_lease_id: int
    tokens: int
    query_heads: int
    dtype: str
    has_row_lse: bool

    @property
    def shape(self) -> QueryShape:
        return QueryShape(self.tokens, self.query_heads, self.scratch_lease_id)


@dataclass(frozen=True)
class GivenRope:
    """The worker's rotary embedding: inverse frequencies, and "half_split" or "interleaved"."""

    inv_freq: tuple[float, ...]
    style: str


@dataclass(frozen=True)
class Given:
    """What a worker passes along with a compression."""

    queries: GivenQueries | None = None
    rope: GivenRope | None = None
    park: bool = False


def compress_job(device: Device, plan: CompressPlan, given: Given) -> Compress:
    """Raises InvalidArgumentError if the policy needs a rope and there is none."""
    turned, queries = _rope_for(plan.policy, given.rope), given.queries
    return Compress(
        **_lease_at(device, plan.lease),
        **({} if queries is None else _queries_at(device, queries)),
        **_method(plan.policy),
        target_tokens=plan.target_tokens,
        sinks=plan.policy.sinks,
        window=plan.window,
        destination=no_ids() if plan.in_place or plan.by_block else plan.destination,
        scrub_runs=np.array(plan.scrub, np.int32) if plan.scrub else no_runs(),
        inv_freq=np.array(turned.inv_freq if turned else (), np.float64),
        rope_style=ROPE_STYLES[turned.style] if turned else "",
    )


def observe_job(device: Device, lease: Lease, queries: GivenQueries) -> Observe:
    return Observe(**_lease_at(device, lease), **_queries_at(device, queries))


def _lease_at(device: Device, lease: Lease) -> dict[str, Any]:
    return {
        "pool_id": device.pools[lease.pool].pool_id,
        "source": lease.table[: lease.used_blocks],
        "length": lease.length,
        "position": lease.position,
        "compressed_length": lease.compressed_length,
        "observed_length": lease.observed_length,
    }


def _queries_at(device: Device, queries: GivenQueries) -> dict[str, Any]:
    return {
        "scratch": device.leases[queries.scratch_lease_id].table,
        "query_count": queries.tokens,
        "query_heads": queries.query_heads,
        "query_dtype": queries.dtype,
        "has_row_lse": queries.has_row_lse,
    }


def _method(policy: Policy) -> dict[str, Any]:
    """The fields of kvd_cuda.plan.CompressPlan that say how to score."""
    match policy:
        case SnapKV():
            voting = {"kernel": policy.kernel, "pooling": policy.pooling}
            return {"method": "snapkv", "reduce": "mean", **voting}
        case Span():
            method = "span_block" if policy.granularity == "block" else "span"
            return {"method": method, "reduce": "max", "kernel": policy.kernel, "pooling": "max"}
        case H2O():
            return {"method": "h2o", **_UNSCORED}
        case KeyDiff():
            return {"method": "keydiff", **_UNSCORED}
        case ExpectedAttention():
            return {"method": "expected", **_UNSCORED}
        case Streaming():
            return {"method": "streaming", **_UNSCORED}
    raise AssertionError(f"{policy} keeps everything; there is nothing to compress")


_UNSCORED = {"reduce": "mean", "kernel": 1, "pooling": "avg"}


def _rope_for(policy: Policy, rope: GivenRope | None) -> GivenRope | None:
    """Only policies that renumber positions rotate keys."""
    if not isinstance(policy, Streaming) or policy.rope == "original":
        return None
    if rope is None or not rope.inv_freq:
        raise InvalidArgumentError(f"{policy} rotates keys: pass the model's inverse frequencies as rope")
    return rope
