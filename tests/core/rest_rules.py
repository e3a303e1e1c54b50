"""Leases rest, give blocks to others meanwhile, and are woken."""

from hypothesis.stateful import precondition, rule

from kvd import errors as e
from kvd.policy import Streaming
from kvd_daemon.core import CompressPlan, Unchanged, can_give

from .driver import POLICIES, Chance, Refusal, any_lease, anything
from .job_rules import JobRules
from .lease_rules import raised
from .world import WorldLease

SHORT = Streaming(sinks=1, window=3)  # needs no queries, and finds something to prune in most leases


class RestRules(JobRules):
    """rest and wake by the worker, begin_press by the daemon; a press ends as every compression does."""

    @precondition(any_lease)
    @rule(chance=anything)
    def rest(self, chance: Chance) -> None:
        lease = self.a_lease(chance, busy=False, scratch=False)
        session, floor = self.owner(lease, chance), chance.choice([None, 0, 1, 4, 6, -1])
        error: Refusal = e.InvalidArgumentError if floor == -1 else None
        if self.world.session_error(session, by_time=False):
            error = self.world.session_error(session, by_time=False)
        error = error or self.refusal(session, lease, by_time=False)
        if error is None and lease.scratch:
            error = e.InvalidArgumentError
        if self.ask(error, lambda: self.device.rest(session, self.progress(lease), floor)):
            self.world.learn(lease)
            lease.fate = "resting"
            lease.resting_floor = lease.floor if floor is None else raised(floor, lease.policy)

    @precondition(any_lease)
    @rule(chance=anything)
    def wake(self, chance: Chance) -> None:
        resting = [lease for lease in self.world.leases.values() if lease.fate == "resting"]
        lease = chance.choice(resting) if resting and chance.random() < 0.9 else self.a_lease(chance)
        session = self.owner(lease, chance)
        error = self.refusal(session, lease, by_time=False)
        error = None if error is e.LeaseRestingError else error
        if self.ask(error, lambda: self.device.wake(session, lease.lease_id)):
            lease.fate, lease.resting_floor = "active", 0

    @precondition(lambda self: self.givers())
    @rule(chance=anything)
    def press(self, chance: Chance) -> None:
        lease = chance.choice(self.givers())
        policy = SHORT if chance.random() < 0.8 else chance.choice(POLICIES)
        assert can_give(self.device.leases[lease.lease_id])
        error = self.compress_refusal(lease.session, lease, policy, None)
        if policy.needs_queries:
            error = e.InvalidArgumentError
        plan = self.ask(error, lambda: self.device.begin_press(lease.lease_id, policy))
        if plan is not None:
            assert isinstance(plan, Unchanged) == (self.target(lease, policy) >= len(lease.slots))
        if isinstance(plan, CompressPlan):
            self.begin_compress(lease, plan, None)

    def givers(self) -> list[WorldLease]:
        return [
            lease
            for lease in self.world.leases.values()
            if lease.state == "resting" and not lease.streams and 0 < lease.resting_floor < len(lease.slots)
        ]
