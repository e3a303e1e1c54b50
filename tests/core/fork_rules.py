"""Leases go on from one, share what it had, and part when they write."""

import copy

from hypothesis.stateful import precondition, rule

from kvd import errors as e

from .driver import Chance, any_lease, anything
from .lease_rules import LeaseRules
from .world import WorldLease


class ForkRules(LeaseRules):
    """fork, and write on; what else follows is of the rules that seal, compress and release."""

    forks = 0

    @precondition(any_lease)
    @rule(chance=anything)
    def fork(self, chance: Chance) -> None:
        lease = self.a_lease(chance, busy=False, scratch=False, streams=False)
        session = self.owner(lease, chance)
        count = chance.randint(1, 3) if chance.random() < 0.95 else 0
        error = self.world.session_error(session)
        if error is None and count == 0:
            error = e.InvalidArgumentError
        error = error or self.refusal(session, lease)
        if error is None and (lease.scratch or lease.streams):
            error = e.InvalidArgumentError
        progress = self.progress(lease)
        answer = self.ask(error, lambda: self.device.fork(session, progress, count, self.world.now))
        if answer is None:
            return
        self.world.learn(lease)
        lease.sealed = -(-len(lease.slots) // self.world.pool_of(lease).block_size)
        assert answer.parent.table.tolist() == lease.table
        assert len(answer.children) == count
        for child in answer.children:
            self.world.leases[child.lease_id] = self.child_of(lease, child.lease_id)

    def sharers(self) -> list[WorldLease]:
        """Leases whose last block is shared and not full."""
        leases = self.world.leases.values()
        return [lease for lease in leases if lease.state == "active" and self.world.shares_tail(lease)]

    @precondition(lambda self: self.sharers())
    @rule(chance=anything)
    def write_on(self, chance: Chance) -> None:
        """One, or several that share the same block."""
        first = chance.choice(self.sharers())
        mates = [x for x in self.sharers() if x.session == first.session and x.pool == first.pool]
        chosen = [first, *[x for x in mates if x is not first and chance.random() < 0.3]]
        self.try_extend(first.session, chosen, [chance.choice([1, 3, 17]) for _ in chosen])

    @precondition(lambda self: self.sharers())
    @rule(chance=anything)
    def committed_without_a_block(self, chance: Chance) -> None:
        lease = chance.choice(self.sharers())
        progress = self.progress(lease)
        progress.length, progress.position = progress.length + 1, progress.position + 1
        error = self.refusal(lease.session, lease) or e.InvalidArgumentError
        self.ask(error, lambda: self.device.extend(lease.session, [(progress, 1)], self.world.now))

    def child_of(self, parent: WorldLease, lease_id: int) -> WorldLease:
        """With a text of its own from here on, so that it shows where it parts."""
        self.forks += 1
        child = copy.deepcopy(parent)
        child.checkpoint, child.back = [], None
        child.gave = 0
        child.lease_id, child.generation, child.table = lease_id, 1, parent.table[: parent.sealed]
        child.branches.append((parent.position, 1000 + self.forks))
        return child
