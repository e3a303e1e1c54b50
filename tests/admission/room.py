"""A device with its line of waiting calls, without a daemon around it: calls are tasks of one event loop."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvd.policy import Dense, Policy
from kvd.spec import KVSpec
from kvd_daemon.core import Lease, LeaseWish, Progress, Session, SessionIdentity
from kvd_daemon.engine.admission import Admission, Asker
from kvd_daemon.engine.events import Event
from kvd_daemon.engine.exhaustion import Exhaustion
from kvd_daemon.journal import RecordingDevice

SPEC = KVSpec(layers=1, kv_heads=1, head_dim_k=8, head_dim_v=8, block_size=16)
TTL = 1 << 62  # ns: no session ends by itself
LONG_S = 3600.0  # longer than any test
TURNS = 4  # of the event loop, after which everything that was woken has run


@dataclass
class Holder:
    """A session as the line knows it: what it is told, it notes, and so does the `room`."""

    session: Session
    room: list[str]
    told: list[Event] = field(default_factory=list)

    @property
    def session_id(self) -> str:
        return self.session.session_id

    @property
    def outbox(self) -> "Holder":
        return self

    def put(self, event: Event) -> None:
        self.told.append(event)
        self.room.append(self.session.session_id)


class Room:
    """Sessions `ann` and `ben` of tenant red, `cat` of blue, `dan` of green; a pool of `blocks`."""

    def __init__(self, blocks: int = 31, **pools: int) -> None:
        self.device = RecordingDevice(1 << 40)
        self.holders: dict[str, Holder] = {}
        self.told: list[str] = []  # who was told something, in order
        for name, count in {"pool": blocks, **pools}.items():
            self.device.create_pool(name, SPEC, count, name)
        for name, tenant in (("ann", "red"), ("ben", "red"), ("cat", "blue"), ("dan", "green")):
            session = self.device.open_session(SessionIdentity(name, tenant, 1, 1, name), TTL, 0)
            self.holders[name] = Holder(session, self.told)
        self.admission = Admission(self.device, Exhaustion(self.device, self.holders.values()))
        self.now = 0

    async def lease(
        self,
        who: str,
        blocks: int,
        wait_s: float = 0.0,
        pool: str = "pool",
        policy: Policy | None = None,
        **wish: Any,
    ) -> Lease:
        """A lease of so many blocks."""
        wishes = [LeaseWish(blocks * SPEC.block_size, policy or Dense(), **wish)]
        asker = self.asker(who, wait_s)

        def attempt() -> Lease:
            asked = (who, pool, wishes, self.now)
            granted = self.admission.take(
                asker, lambda: [self.device.need_of_lease(*asked)], lambda: self.device.lease(*asked)
            )
            self._scrub(granted.scrub, granted.leases)
            return granted.leases[0]

        return await self.admission.admitted(asker, attempt)

    async def extend(self, leases: Sequence[Lease], blocks: int, wait_s: float = 0.0) -> None:
        """So many blocks more for each, behind what it has."""
        who = leases[0].session_id
        asker = self.asker(who, wait_s, [lease.lease_id for lease in leases])

        def attempt() -> None:
            items = [
                (Progress(lease.lease_id, lease.generation, lease.capacity, lease.capacity), blocks * 16)
                for lease in leases
            ]
            asked = (who, items, self.now)
            extended = self.admission.take(
                asker, lambda: self.device.needs_of_extend(*asked), lambda: self.device.extend(*asked)
            )
            self._scrub(extended.scrub, leases)

        await self.admission.admitted(asker, attempt)

    def asker(self, who: str, wait_s: float, growing: Sequence[int] = ()) -> Asker:
        return Asker(who, self.holders[who].session.tenant, int(wait_s * 1e9), growing)

    def _scrub(self, runs: Sequence[object], leases: Sequence[Lease]) -> None:
        if runs:
            self.device.scrubbed([lease.lease_id for lease in leases])

    def release(self, *leases: Lease) -> None:
        for lease in leases:
            self.device.release(lease.session_id, [lease.lease_id])

    def waiting(self) -> int:
        return sum(map(self.admission.waiting_calls_of, ("red", "blue", "green")))


def play(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


async def settled() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def started(call: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
    """The call as a task that has got as far as it gets by itself."""
    task = asyncio.create_task(call)
    await settled()
    return task
