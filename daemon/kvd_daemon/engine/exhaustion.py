"""What happens when blocks run out: the caller is told what helps, the holders are asked for some."""

from collections.abc import Iterable
from dataclasses import replace

from kvd.errors import KvdError, PoolExhaustedError, QuotaExceededError
from kvd_daemon.core import Device, LeaseState, could_be_compressible

from .events import Compressible, Pressure
from .sessions import OpenSession

RETRY_AFTER_NS = 40_000_000  # ns; a few decode steps, in which sequences end and blocks come back
PRESSURE_INTERVAL_NS = 1_000_000_000  # ns between two pressure events of a pool; workers need time to react

Short = PoolExhaustedError | QuotaExceededError
"""Blocks are short: the pool's, or those the tenant may hold."""


class Exhaustion:
    """Of all pools of a device."""

    def __init__(self, device: Device, sessions: Iterable[OpenSession]) -> None:
        self._device = device
        self._sessions = sessions
        self._pressed_ns: dict[tuple[str, str], int] = {}

    def explained(self, error: Short, tenant: str, now_ns: int, waiting_blocks: int = 0) -> KvdError:
        """The same with what would help, and a time to retry unless no waiting helps.

        Who holds the blocks in question is asked for what is lacking, to this call and to those that wait for
        `waiting_blocks` of them.
        """
        if "pinned_blocks" in error.metadata:
            return error  # of pins, not of blocks: it says what helps, and nobody has to be asked
        explain = _quota_exceeded if isinstance(error, QuotaExceededError) else _pool_exhausted
        told, facts = explain(dict(error.metadata)), error.metadata
        if told.retry_after_ns is None:
            return told
        wanted = max(int(facts["wanted_blocks"]), waiting_blocks)
        if isinstance(error, QuotaExceededError):
            lacking = wanted + int(facts["held_blocks"]) - int(facts["max_blocks"])
            for pool in facts["pool"].split(","):
                self._press(Pressure(pool, max(1, lacking)), tenant, now_ns, of=tenant)
        else:
            lacking = wanted - int(facts["free_blocks"])
            self._press(Pressure(facts["pool"], max(1, lacking)), tenant, now_ns)
        return told

    def _press(self, pressure: Pressure, tenant: str, now_ns: int, of: str = "") -> None:
        """Tell it to who holds blocks of the pool that `tenant` lacks, of one tenant only if `of` names it.

        The largest holder hears it first. Once in a while is enough.
        """
        pool = pressure.pool
        last_ns = self._pressed_ns.get((pool, of), now_ns - PRESSURE_INTERVAL_NS)
        if now_ns - last_ns < PRESSURE_INTERVAL_NS:
            return
        self._pressed_ns[pool, of] = now_ns
        for opened in self.holders(pool, tenant, of):
            opened.outbox.put(replace(pressure, compressible=_compressible(opened, pool)))

    def holders(self, pool: str, tenant: str, of: str) -> list[OpenSession]:
        """Sessions that could give blocks of `pool` to `tenant`, those that hold most first.

        What a tenant gives back within its guarantee stays its own, so asking it for that is no use.
        """
        holdings, indices = self._device.pools[pool].holdings, self._device.tenants
        held: list[tuple[int, OpenSession]] = []
        for opened in self._sessions:
            owner = opened.session.tenant
            if of not in ("", owner) or (owner != tenant and holdings.is_within_guarantee(indices[owner])):
                continue
            blocks = sum(len(one.blocks) for one in opened.session.leases.values() if one.pool == pool)
            if blocks:
                held.append((blocks, opened))
        return [opened for _, opened in sorted(held, key=lambda one: -one[0])]


def _compressible(opened: OpenSession, pool: str) -> tuple[Compressible, ...]:
    """Its leases that may be pruned and do not rest: only their worker can, and it knows their length."""
    return tuple(
        Compressible(lease.lease_id, lease.floor)
        for lease in opened.session.leases.values()
        if lease.pool == pool and lease.fate is LeaseState.ACTIVE and could_be_compressible(lease)
    )


def _pool_exhausted(facts: dict[str, str]) -> PoolExhaustedError:
    pool, wanted = facts["pool"], int(facts["wanted_blocks"])
    kept = int(facts["kept_blocks"])
    beside = f" beside {kept} that are guaranteed to other tenants" if kept else ""
    if "own_blocks" in facts:
        beside += f" beside {facts['own_blocks']} of the lease itself"
    if wanted > int(facts["pool_blocks"]):
        return PoolExhaustedError(
            f"{wanted} blocks wanted in pool {pool}, which has {facts['pool_blocks']} when empty{beside}; "
            "lease fewer tokens, or create a larger pool",
            retry_after_ns=None,
            **facts,
        )
    if "waiting_calls" in facts:
        beside += f", and others come first (calls in line: {facts['waiting_calls']})"
    return PoolExhaustedError(
        f"{wanted} blocks wanted in pool {pool}, {facts['free_blocks']} free{beside}; release a lease, "
        f"compress one, wait in line, or retry after {RETRY_AFTER_NS // 1_000_000} ms",
        retry_after_ns=RETRY_AFTER_NS,
        **facts,
    )


def _quota_exceeded(facts: dict[str, str]) -> QuotaExceededError:
    wanted, held, limit = (int(facts[name]) for name in ("wanted_blocks", "held_blocks", "max_blocks"))
    where = f"{wanted} blocks wanted by tenant {facts['tenant']}, which may hold {limit} and holds {held}"
    if "own_blocks" in facts:
        where += f" beside {facts['own_blocks']} of the lease itself"
    if wanted > limit:
        return QuotaExceededError(
            f"{where}; lease fewer tokens, or have max_blocks of the tenant raised in kvd.toml",
            retry_after_ns=None,
            **facts,
        )
    queue = (
        f"others come first (its calls in line: {facts['waiting_calls']}); "
        if "waiting_calls" in facts
        else ""
    )
    return QuotaExceededError(
        f"{where}; {queue}release or compress {max(1, held + wanted - limit)} blocks of its leases, wait "
        f"in line, or retry after {RETRY_AFTER_NS // 1_000_000} ms",
        retry_after_ns=RETRY_AFTER_NS,
        **facts,
    )
