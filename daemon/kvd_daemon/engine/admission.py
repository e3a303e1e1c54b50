"""Who gets blocks next: calls that may wait stand in one line, and nobody overtakes for ever.

The line is walked in order of arrival whenever blocks have come back. A call that a pool is too full for
holds back the later ones for that pool; one whose tenant is at its maximum holds back only that tenant's.
These may pass:

* a call that fits into what its own tenant is guaranteed, since nobody else can have those blocks;
* a scratch lease, since it serves a compression, which gives blocks back;
* a lease that grows, past leases that are to be: sequences under way end sooner if they may go on. But past
  the first waiting call go no more blocks than it wants itself, and no growing lease passes another one.

Waiting happens outside of everything that remembers requests: a caller that leaves the line leaves no trace.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvd.errors import (
    DeviceUnavailableError,
    LimitExceededError,
    PoolExhaustedError,
    QuotaExceededError,
)
from kvd_daemon.core import Device, LeaseState, Need, Pool, Quota, SessionState
from kvd_daemon.core.quotas import pool_exhausted, quota_exceeded
from kvd_daemon.tenant_quotas import OTHERS

from .exhaustion import Exhaustion, Short

MAX_WAITING_CALLS = 1024  # calls; the line is walked when blocks come back, in a few milliseconds at most
MAX_WAIT_NS = 3600 * 1_000_000_000  # an hour; whoever waits longer has been forgotten

Answer = TypeVar("Answer")
Taken = TypeVar("Taken")
Needs = Sequence[tuple[Pool, Need]]


@dataclass(eq=False)
class Asker:
    """A call for blocks: whose, for how long it would wait, which leases shall grow (none: new ones)."""

    session_id: str
    tenant: str
    wait_ns: int = 0
    growing: Sequence[int] = ()
    needs: Needs = ()
    wanted_blocks: int = 0
    added_blocks: int = 0
    is_scratch: bool = False

    def wants(self, needs: Needs) -> None:
        """What it would take now; nothing is said of that before it is refused, or others wait."""
        self.needs = needs
        self.wanted_blocks = sum([need.taken for _, need in needs])
        self.added_blocks = self.wanted_blocks - sum([need.returned for _, need in needs])
        self.is_scratch = all(need.taken == need.scratch for _, need in needs)


@dataclass(eq=False)
class Waiter:
    """A place in the line. `attempt` asks again; `answer` gets what that answers in the end."""

    asker: Asker
    attempt: Callable[[], Any]
    is_over_quota: bool
    answer: "asyncio.Future[Any]"
    passed_blocks: int = 0

    def lets_pass(self, asker: Asker) -> bool:
        """Whether leases that grow may take their blocks before this one."""
        if self.asker.growing or not asker.growing:
            return False
        return self.passed_blocks + asker.wanted_blocks <= self.asker.wanted_blocks


@dataclass(frozen=True)
class Shortage:
    """Blocks that a waiting call lacks: of a pool, or, without a pool, those its tenant has to give back."""

    blocks: int
    pool: str = ""


@dataclass(frozen=True)
class Heads:
    """The first waiting calls of some kind: for a pool, for scratch in it, within a tenant's maximum."""

    pools: dict[str, Waiter] = field(default_factory=dict)
    scratch: dict[str, Waiter] = field(default_factory=dict)
    tenants: dict[str, Waiter] = field(default_factory=dict)

    def add(self, waiter: Waiter) -> None:
        if waiter.is_over_quota:
            self.tenants.setdefault(waiter.asker.tenant, waiter)
            return
        for pool, need in waiter.asker.needs:
            if need.taken:
                self.pools.setdefault(pool.name, waiter)
                if waiter.asker.is_scratch:
                    self.scratch.setdefault(pool.name, waiter)

    def before(self, asker: Asker, tenant: int) -> list[tuple[Waiter, Needs]]:
        """Those in the way of `asker`, and what of its needs they are in the way of (none: its maximum)."""
        found: list[tuple[Waiter, Needs]] = []
        if asker.tenant in self.tenants and asker.added_blocks > 0 and not asker.is_scratch:
            found.append((self.tenants[asker.tenant], ()))
        heads = self.scratch if asker.is_scratch else self.pools
        for pool, need in asker.needs:
            if pool.name in heads and need.taken > pool.holdings.owed_to(tenant):
                found.append((heads[pool.name], [(pool, need)]))
        return found


@dataclass(frozen=True)
class Front:
    """The heads of all waiting calls, and those of leases that grow: what may pass the former stops there."""

    heads: Heads = field(default_factory=Heads)
    growing: Heads = field(default_factory=Heads)

    def add(self, waiter: Waiter) -> None:
        self.heads.add(waiter)
        if waiter.asker.growing:
            self.growing.add(waiter)

    def before(self, asker: Asker, tenant: int) -> list[tuple[Waiter, Needs]]:
        """As `Heads.before`."""
        found = self.heads.before(asker, tenant)
        return found + self.growing.before(asker, tenant) if asker.growing else found


class Admission:
    """Of one device. Everything happens in the event loop's thread."""

    def __init__(self, device: Device, exhaustion: Exhaustion) -> None:
        self._device = device
        self._exhaustion = exhaustion
        self._line: dict[Waiter, None] = {}
        self._front = Front()
        self._is_due = False
        self._is_closed = False
        self._on_waiting: Callable[[], None] = lambda: None
        device.quotas.on_return(self.wake)

    def on_waiting(self, relieve: Callable[[], None]) -> None:
        """`relieve` is called when a call begins to wait, and now and then as long as some do."""
        self._on_waiting = relieve

    async def admitted(self, asker: Asker, attempt: Callable[[], Answer]) -> Answer:
        """What `attempt` answers, at once or when it is the asker's turn.

        `attempt` comes back to `take`. Raises what it raises; PoolExhaustedError or QuotaExceededError only
        after `asker.wait_ns`, or if no waiting helps; DeviceUnavailableError if waiting ends for all.
        """
        if self._is_due:
            self._walk()
        try:
            return attempt()
        except (PoolExhaustedError, QuotaExceededError) as refusal:
            if not asker.wait_ns or refusal.retry_after_ns is None or self._is_closed:
                raise
            if len(self._line) >= MAX_WAITING_CALLS:
                raise LimitExceededError(f"{MAX_WAITING_CALLS} calls wait already; retry later") from refusal
            over_quota = isinstance(refusal, QuotaExceededError)
            waiter = Waiter(asker, attempt, over_quota, asyncio.get_running_loop().create_future())
        answer: Answer = await self._wait(waiter)
        return answer

    async def _wait(self, waiter: Waiter) -> Any:
        self._line[waiter] = None
        self._front.add(waiter)
        try:
            self._on_waiting()
            await asyncio.wait([waiter.answer], timeout=min(waiter.asker.wait_ns, MAX_WAIT_NS) / 1e9)
        finally:
            if waiter in self._line:
                del self._line[waiter]
                self._walk()
            elif not waiter.answer.cancelled():
                waiter.answer.exception()  # so that asyncio does not miss who asks for it: the caller left
        return waiter.answer.result() if waiter.answer.done() else waiter.attempt()

    def take(self, asker: Asker, needs: Callable[[], Needs], take: Callable[[], Taken]) -> Taken:
        """What `take` answers, unless others come first.

        `needs` tells what it would take. Raises PoolExhaustedError or QuotaExceededError, explained.
        """
        try:
            passed = self.require_turn(asker, needs)
            taken = take()
        except (PoolExhaustedError, QuotaExceededError) as error:
            asker.wants(needs())
            waiting = self._waiting_for(error, asker.tenant)
            raise self._exhaustion.explained(error, asker.tenant, time.monotonic_ns(), waiting) from error
        for waiter in passed:
            waiter.passed_blocks += asker.wanted_blocks
        return taken

    def is_held_back(self, asker: Asker, needs: Callable[[], Needs]) -> bool:
        """Whether others come first."""
        try:
            self.require_turn(asker, needs)
        except (PoolExhaustedError, QuotaExceededError):
            return True
        return False

    def require_turn(self, asker: Asker, needs: Callable[[], Needs]) -> list[Waiter]:
        """The waiting calls that `asker` passes, if there are any. Raises if others come first."""
        if not self._line:
            return []
        asker.wants(needs())
        return self._passed(asker)

    def _waiting_for(self, error: Short, tenant: str) -> int:
        """Blocks that waiting calls want of what `error` says there is too little of."""
        if isinstance(error, PoolExhaustedError):
            return self.waiting_in(error.metadata["pool"])[1]
        return sum(waiter.asker.added_blocks for waiter in self._line if waiter.asker.tenant == tenant)

    def _passed(self, asker: Asker) -> list[Waiter]:
        """The waiting calls that `asker` may pass. Raises if it may not pass one of those in its way."""
        passed = []
        for head, contested in self._front.before(asker, self._device.tenants[asker.tenant]):
            if not head.lets_pass(asker):
                raise self._behind(asker, contested)
            passed.append(head)
        return passed

    def _behind(self, asker: Asker, contested: Needs) -> Short:
        """That others come first."""
        tenants = self._device.tenants
        if contested:
            pool, need = contested[0]
            waiting_calls = self.waiting_in(pool.name)[0]
            refusal: Short = pool_exhausted(pool, tenants[asker.tenant], need)
        else:
            waiting_calls = self.waiting_calls_of(asker.tenant)
            refusal = quota_exceeded(self._device.quotas, tenants, asker.tenant, asker.needs)
        refusal.metadata["waiting_calls"] = str(waiting_calls)
        return refusal

    def wake(self) -> None:
        """Something changed: walk the line soon, but not in the midst of it."""
        if self._line and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._walk_if_due)

    def _walk_if_due(self) -> None:
        if self._is_due:
            self._walk()

    def _walk(self) -> None:
        """Ask again for everyone whose turn it may be."""
        self._is_due, self._front = False, Front()
        for waiter in list(self._line):
            if self._stays(waiter):
                self._front.add(waiter)
            else:
                del self._line[waiter]

    def _stays(self, waiter: Waiter) -> bool:
        """Whether it still has to wait; else it has its answer."""
        if not self._is_hopeless(waiter.asker) and self._is_held_back(waiter):
            return True
        try:
            waiter.answer.set_result(waiter.attempt())
        except (PoolExhaustedError, QuotaExceededError) as refusal:
            waiter.is_over_quota = isinstance(refusal, QuotaExceededError)
            if refusal.retry_after_ns is not None:
                return True
            waiter.answer.set_exception(refusal)
        except Exception as failure:  # noqa: BLE001 - the caller's own call raises it
            waiter.answer.set_exception(failure)
        return False

    def _is_held_back(self, waiter: Waiter) -> bool:
        for head, contested in self._front.before(waiter.asker, self._device.tenants[waiter.asker.tenant]):
            if not head.lets_pass(waiter.asker):
                waiter.is_over_quota = not contested
                return True
        return False

    def _is_hopeless(self, asker: Asker) -> bool:
        """Its session, one of its leases or a pool is over: asking again will say so."""
        session = self._device.sessions.get(asker.session_id)
        if session is None or session.state is SessionState.EXPIRED:
            return True
        if any(self._device.pools.get(pool.name) is not pool for pool, _ in asker.needs):
            return True
        for lease_id in asker.growing:
            lease = self._device.leases.get(lease_id)
            if lease is None or lease.fate is not LeaseState.ACTIVE:
                return True
        return False

    def set_quotas(self, tenants: Mapping[str, Mapping[str, int]]) -> None:
        """Those of kvd.toml's [tenants.NAME] tables from now on; "*" is for all others."""
        quotas = {tenant: Quota(**quota) for tenant, quota in tenants.items()}
        default = quotas.pop(OTHERS, Quota())
        if self._device.quotas.are(self._device.tenants, quotas, default):
            return
        self._device.set_quotas(quotas, default)
        self.wake()

    def tick(self) -> None:
        """Now and then: what ends without a block coming back is noticed, and holders are asked again."""
        if self._line:
            self._walk()
            self._on_waiting()

    def shortages(self) -> list[tuple[str, list[Shortage]]]:
        """What the calls that are first in line lack, each with its tenant; less than all helps none."""
        self._walk_if_due()
        heads = self._front.heads
        waiters = [*heads.pools.values(), *heads.scratch.values(), *heads.tenants.values()]
        first = [waiter.asker for waiter in dict.fromkeys(waiters) if not self._is_hopeless(waiter.asker)]
        return [(asker.tenant, self._lacking(asker)) for asker in first]

    def _lacking(self, asker: Asker) -> list[Shortage]:
        index, quotas = self._device.tenants[asker.tenant], self._device.quotas
        lacking: list[Shortage] = []
        beyond = quotas.held.get(index, 0) + asker.added_blocks - quotas.of(index).max_blocks
        if beyond > 0 and not asker.is_scratch:
            lacking.append(Shortage(beyond))
        for pool, need in asker.needs:
            facts = pool_exhausted(pool, index, need).metadata
            blocks = int(facts["wanted_blocks"]) - int(facts["free_blocks"])
            if blocks > 0:
                lacking.append(Shortage(blocks, pool.name))
        return lacking

    def close(self) -> None:
        """Nobody waits any longer, until `open`."""
        self._is_closed = True
        for waiter in self._line:
            waiter.answer.set_exception(
                DeviceUnavailableError("the daemon drains, so waiting for blocks ends; lease elsewhere")
            )
        self._line.clear()
        self._front = Front()

    def open(self) -> None:
        self._is_closed = False

    def waiting_in(self, pool: str) -> tuple[int, int]:
        """Calls that wait for blocks of that pool, and how many blocks they want there."""
        wanted = [
            need.taken
            for waiter in self._line
            for other, need in waiter.asker.needs
            if other.name == pool and need.taken
        ]
        return len(wanted), sum(wanted)

    def waiting_calls_of(self, tenant: str) -> int:
        return sum(waiter.asker.tenant == tenant for waiter in self._line)
