"""How much memory sessions need: a formula, no daemon, no I/O.

One token costs `layers * kv_heads * (head_dim_k + head_dim_v) * element bytes`; a session costs its
blocks, always whole ones; a policy changes how many tokens a session keeps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from kvd.errors import InvalidArgumentError
from kvd.limits import NULL_BLOCKS, scratch_reserve
from kvd.policy import H2O, Dense, Dual, ExpectedAttention, Keep, KeyDiff, Policy, SnapKV, Span, Streaming
from kvd.spec import KVSpec

MAX_SESSIONS = 1 << 30  # far beyond any node; a typing mistake


POLICY_KINDS: dict[str, type[Policy]] = {
    "dense": Dense,
    "streaming": Streaming,
    "snapkv": SnapKV,
    "keydiff": KeyDiff,
    "expected": ExpectedAttention,
    "h2o": H2O,
    "dual": Dual,
    "span": Span,
}


@dataclass(frozen=True)
class Demand:
    """`sessions` sequences of `context_tokens` each, in the geometry of the whole model."""

    spec: KVSpec
    query_heads: int
    context_tokens: int
    sessions: int

    def __post_init__(self) -> None:
        if not 1 <= self.sessions <= MAX_SESSIONS:
            raise InvalidArgumentError(f"sessions={self.sessions}; 1 to {MAX_SESSIONS} are needed")

    @property
    def session_blocks(self) -> int:
        """Blocks of one session that keeps everything."""
        return self.spec.blocks_for(self.context_tokens)

    @property
    def session_bytes(self) -> int:
        return self.session_blocks * self.spec.block_bytes

    @property
    def query_head_factor(self) -> float:
        """How many times too much one counts with a K and a V per query head."""
        return self.query_heads / self.spec.kv_heads


@dataclass(frozen=True)
class Memory:
    """`devices` of `device_bytes` each for KV (weights and activations taken off already)."""

    devices: int
    device_bytes: int

    def device_spec(self, spec: KVSpec) -> KVSpec:
        """What one device holds: its share of the KV heads, at least one (then heads are repeated)."""
        return replace(spec, kv_heads=-(-spec.kv_heads // self.devices))

    def leasable_blocks(self, spec: KVSpec) -> int:
        """Blocks of one pool that fills a device, less the null block and the scratch reserve."""
        blocks = self.device_bytes // self.device_spec(spec).block_bytes - NULL_BLOCKS
        return max(0, blocks - scratch_reserve(blocks))


@dataclass(frozen=True)
class PolicyPlan:
    """What a policy makes of a demand. `refused` says why it cannot; the counts are then those of dense."""

    kind: str
    policy: Policy
    tokens_kept: int
    session_blocks: int
    session_bytes: int
    total_bytes: int
    dense_percent: float
    sessions_fit: int | None
    refused: str = ""


def make_policy(kind: str, keep: Keep | None, window: int | None, sinks: int | None) -> Policy:
    """A policy of that kind with whatever of the three it has, else its defaults.

    Raises InvalidArgumentError on an unknown kind and on values the policy refuses.
    """
    if kind not in POLICY_KINDS:
        raise InvalidArgumentError(f"policy {kind!r}; one of {', '.join(POLICY_KINDS)} is needed")
    chosen = POLICY_KINDS[kind]
    wanted: dict[str, Any] = {"keep": keep, "window": window, "recent": window, "sinks": sinks}
    names = {field.name for field in fields(chosen)}
    return chosen(**{name: value for name, value in wanted.items() if value is not None and name in names})


def plan_policy(kind: str, policy: Policy, demand: Demand, memory: Memory | None) -> PolicyPlan:
    """Steady state of every session at its full context, compressed by `policy`."""
    refused, kept = "", demand.context_tokens
    try:
        kept = policy.target_tokens(demand.context_tokens, demand.spec.block_size)
    except InvalidArgumentError as error:
        refused = str(error)
    blocks = _session_blocks(policy, kept, demand)
    return PolicyPlan(
        kind=kind,
        policy=policy,
        tokens_kept=kept,
        session_blocks=blocks,
        session_bytes=blocks * demand.spec.block_bytes,
        total_bytes=blocks * demand.spec.block_bytes * demand.sessions,
        dense_percent=100 * blocks / demand.session_blocks,
        sessions_fit=None if memory is None else _sessions_fit(policy, blocks, demand, memory),
        refused=refused,
    )


def _session_blocks(policy: Policy, kept_tokens: int, demand: Demand) -> int:
    if isinstance(policy, Streaming):
        return policy.capacity_blocks(demand.spec.block_size)
    return demand.spec.blocks_for(kept_tokens)


def _sessions_fit(policy: Policy, blocks: int, demand: Demand, memory: Memory) -> int:
    """Sessions that fit while the newest one is still prefilled: dense, unless it streams."""
    leasable = memory.leasable_blocks(demand.spec)
    newest = blocks if isinstance(policy, Streaming) else max(blocks, demand.session_blocks)
    return 0 if leasable < newest else 1 + (leasable - newest) // blocks


def plan(policies: Sequence[tuple[str, Policy]], demand: Demand, memory: Memory | None) -> list[PolicyPlan]:
    """One plan per policy, in order."""
    return [plan_policy(kind, policy, demand, memory) for kind, policy in policies]
