"""Any order of calls, returns and quotas: nobody is overtaken for ever, woken too late or given half."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvd import errors as e
from kvd_daemon.core import Lease, Need
from kvd_daemon.core.quotas import require_room

from .room import LONG_S, Room, settled

EXAMPLES = 150  # sequences of calls, short ones: they shrink well
STEPS = 40  # calls in each
BLOCKS = {"pool": 40, "other": 20}
SESSIONS = ("ann", "ben", "cat", "dan")
SHORT = (e.PoolExhaustedError, e.QuotaExceededError)


@dataclass(eq=False)
class Call:
    """One that waits, or waited. `ahead` wanted so many blocks of its pool when it came."""

    number: int
    who: str
    pool: str
    blocks: int
    growing: list[Lease]
    scratch: bool
    ahead_blocks: int
    task: "asyncio.Task[object]"
    passed_blocks: int = 0

    @property
    def wanted(self) -> int:
        return self.blocks * max(1, len(self.growing))


anything = st.integers(0, 2**32 - 1).map(random.Random)


class AnyOrderOfCalls(RuleBasedStateMachine):
    """`calls` is the line as it should be: in order of arrival, without those that are done."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.room = Room(**{"blocks" if name == "pool" else name: count for name, count in BLOCKS.items()})
        self.calls: list[Call] = []
        self.leases: list[Lease] = []
        self.count = 0
        self.guarantees_hold = True

    def teardown(self) -> None:
        """When all blocks have come back again and again, nobody waits any longer."""
        try:
            while self.leases:
                self.return_leases(self.idle() or self.leases)
            assert self.calls == []
        finally:
            for call in self.calls:
                call.task.cancel()
            self.loop.run_until_complete(settled())
            self.loop.close()

    # -- calls --------------------------------------------------------------------------------

    @rule(chance=anything)
    def lease(self, chance: random.Random) -> None:
        scratch = chance.random() < 0.15
        self.call(chance, chance.randint(0, 3 if scratch else 25), [], scratch)

    @precondition(lambda self: self.leases)
    @rule(chance=anything)
    def extend(self, chance: random.Random) -> None:
        first = chance.choice(self.leases)
        mates = [
            lease for lease in self.idle() if (lease.session_id, lease.pool) == (first.session_id, first.pool)
        ]
        if mates:
            growing = chance.sample(mates, min(len(mates), 2))
            self.call(chance, chance.randint(0, 8), growing, all(lease.scratch for lease in growing))

    def call(self, chance: random.Random, blocks: int, growing: list[Lease], scratch: bool) -> None:
        who = growing[0].session_id if growing else chance.choice(SESSIONS)
        pool = growing[0].pool if growing else chance.choice(list(BLOCKS))
        wait_s = LONG_S if chance.random() < 0.7 else 0.0
        before = self.state()
        if growing:
            work = self.room.extend(growing, blocks, wait_s)
        else:
            work = self.room.lease(who, blocks, wait_s, pool, scratch=scratch)
        self.count += 1
        ahead = sum(call.wanted for call in self.calls if call.pool == pool)
        task = self.loop.create_task(work)
        call = Call(self.count, who, pool, blocks, growing, scratch, ahead, task)
        self.calls.append(call)
        refused = self.settle()
        if call in refused:
            assert self.state() == before, "a refused call changed something"

    @precondition(lambda self: self.leases)
    @rule(chance=anything)
    def release(self, chance: random.Random) -> None:
        idle = self.idle()
        self.return_leases(chance.sample(idle, min(len(idle), chance.randint(1, 3))))

    def idle(self) -> list[Lease]:
        """Leases that no waiting call lets grow."""
        growing = {lease for call in self.calls for lease in call.growing}
        return [lease for lease in self.leases if lease not in growing]

    def return_leases(self, leases: list[Lease]) -> None:
        self.leases = [lease for lease in self.leases if lease not in leases]
        self.settle(lambda: self.room.release(*leases))

    @precondition(lambda self: self.calls)
    @rule(chance=anything)
    def caller_leaves(self, chance: random.Random) -> None:
        call = chance.choice(self.calls)
        self.calls.remove(call)
        held = self.blocks_held()
        granted = sum(one.wanted for one in self.settle(lambda: call.task.cancel(), granted=True))
        assert self.blocks_held() == held + granted, "a caller that left took or gave blocks"

    @rule(chance=anything)
    def reload(self, chance: random.Random) -> None:
        """Guarantees that cannot be met at once are met as blocks come back."""
        quotas: dict[str, dict[str, int]] = {}
        for tenant in ("red", "blue", "*"):
            most = chance.choice([None, 10, 30, 60])
            quotas[tenant] = {} if most is None else {"max_blocks": most}
            if tenant != "*" and chance.random() < 0.3:
                quotas[tenant]["guaranteed_blocks"] = chance.randint(0, min(most or 15, 15))
        self.settle(lambda: self.set_quotas(quotas))

    def set_quotas(self, quotas: dict[str, dict[str, int]]) -> None:
        self.room.admission.set_quotas(quotas)
        self.guarantees_hold = all(self.owed(name) <= self.usable(name) for name in BLOCKS)

    @rule()
    def tick(self) -> None:
        granted = self.settle(self.room.admission.tick, granted=True)
        assert granted == [], "somebody was not woken in time"

    # -- what came of it ----------------------------------------------------------------------

    def settle(self, act: Callable[[], object] = lambda: None, granted: bool = False) -> list[Call]:
        """Act and let everything run; answers the calls that were refused, or granted."""

        async def run() -> None:
            act()
            await settled()

        self.loop.run_until_complete(run())
        done = [call for call in self.calls if call.task.done()]
        self.calls = [call for call in self.calls if not call.task.done()]
        refused = [call for call in done if call.task.exception() is not None]
        for call in refused:
            over = any(lease not in self.leases for lease in call.growing)
            assert isinstance(call.task.exception(), e.LeaseNotFoundError if over else SHORT)
        for call in done:
            if call not in refused:
                self.was_granted(call)
        return [call for call in done if (call in refused) is not granted]

    def was_granted(self, call: Call) -> None:
        if not call.growing:
            lease = call.task.result()
            assert isinstance(lease, Lease)
            assert len(lease.blocks) == call.blocks, "all or nothing"
            self.leases.append(lease)
        if call.scratch or self.was_guaranteed(call):
            return
        for other in self.calls:
            if other.number < call.number and other.pool == call.pool and not self.waits_for_quota(other):
                assert call.wanted == 0 or (call.growing and not other.growing), "overtaken"
                other.passed_blocks += call.wanted

    def was_guaranteed(self, call: Call) -> bool:
        """Whether the tenant holds no more than it is guaranteed, now that it got the blocks."""
        return self.room.device.pools[call.pool].holdings.is_within_guarantee(self.tenant(call))

    def waits_for_quota(self, call: Call) -> bool:
        try:
            self.require(call)
        except SHORT as error:
            return isinstance(error, e.QuotaExceededError)
        return any(
            other.number < call.number and self.tenant(other) == self.tenant(call) for other in self.calls
        )

    def require(self, call: Call) -> None:
        """Raises if what the call wants does not fit."""
        need = Need(scratch=call.wanted) if call.scratch else Need(ordinary=call.wanted)
        pool, tenant, quotas = self.room.device.pools[call.pool], self.tenant(call), self.room.device.quotas
        most = quotas.of(tenant).max_blocks + (pool.reserve if call.scratch else 0)
        if call.wanted and quotas.held.get(tenant, 0) + call.wanted > most:
            raise e.QuotaExceededError("beyond the maximum")
        require_room(pool, tenant, need)

    def tenant(self, call: Call) -> int:
        return self.room.device.tenants[self.room.holders[call.who].session.tenant]

    def state(self) -> object:
        return {
            lease_id: (lease.table.tolist(), lease.length)
            for lease_id, lease in self.room.device.leases.items()
        }

    def blocks_held(self) -> int:
        return sum(self.room.device.quotas.held.values())

    def usable(self, pool: str) -> int:
        return self.room.device.pools[pool].usable

    def owed(self, pool: str) -> int:
        return self.room.device.pools[pool].holdings.owed_blocks

    # -- what always holds --------------------------------------------------------------------

    @invariant()
    def the_books_add_up(self) -> None:
        self.room.device.check()
        assert sorted(self.room.device.leases) == sorted(lease.lease_id for lease in self.leases)
        assert self.room.waiting() == len(self.calls)
        for pool in BLOCKS:
            calls, blocks = self.room.admission.waiting_in(pool)
            mine = [call for call in self.calls if call.pool == pool]
            assert (calls, blocks) == (len(mine), sum(call.wanted for call in mine))

    @invariant()
    def nobody_waits_who_is_first_and_fits(self) -> None:
        """First in its pool and of its tenant: nothing but a lack of blocks can be in its way."""
        pools: set[str] = set()
        tenants: set[int] = set()
        for call in self.calls:
            first = call.pool not in pools and self.tenant(call) not in tenants
            pools.add(call.pool)
            tenants.add(self.tenant(call))
            if first:
                try:
                    self.require(call)
                except SHORT:
                    continue
                raise AssertionError(f"{call} is first and fits, but waits")

    @invariant()
    def nobody_is_overtaken_by_more_than_is_wanted_ahead(self) -> None:
        for call in self.calls:
            assert call.passed_blocks <= call.ahead_blocks + call.wanted

    @invariant()
    def what_is_guaranteed_is_there(self) -> None:
        if self.guarantees_hold:
            assert all(self.owed(name) <= self.usable(name) for name in BLOCKS)


AnyOrderOfCalls.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


class TestAnyOrderOfCalls(AnyOrderOfCalls.TestCase):
    """Run by pytest."""
