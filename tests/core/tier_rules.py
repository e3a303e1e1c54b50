"""Leases are suspended and resumed. The kernel worker is played here; slots are memory of the model's own."""

import zlib

from hypothesis.stateful import precondition, rule

from kvd import errors as e
from kvd_daemon.core import FetchPlan, StowPlan, Tier

from .driver import Chance, Driver, Refusal, any_lease, anything
from .quota_rules import Shortage
from .world import WorldLease
from .world_parts import Slot

BUDGETS = (0, 20 * 4096, 60 * 4096)  # bytes; a slot of these small blocks is a page
SLOT = 4096


class TierRules(Driver):
    """set_tiers; suspend, resume and restore begun, finished, aborted, lost; checkpoints dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.stows: dict[int, StowPlan] = {}
        self.fetches: dict[int, FetchPlan] = {}
        self.world.tier_bytes = BUDGETS[-1]
        self.world.disk_bytes = BUDGETS[-1]
        self.device.set_tiers(BUDGETS[-1], BUDGETS[-1])

    @rule(chance=anything)
    def set_tiers(self, chance: Chance) -> None:
        self.world.tier_bytes = chance.choice([*BUDGETS, BUDGETS[-1]])
        self.world.disk_bytes = chance.choice([*BUDGETS, BUDGETS[-1]])
        self.device.set_tiers(self.world.tier_bytes, self.world.disk_bytes)

    @precondition(any_lease)
    @rule(chance=anything)
    def suspend(self, chance: Chance) -> None:
        lease = self.a_lease(chance, busy=False, scratch=False)
        session, pool = self.owner(lease, chance), self.world.pool_of(lease)
        source = lease.table if lease.streams else lease.table[: -(-len(lease.slots) // pool.block_size)]
        error = self.refusal(session, lease) or self.stow_refusal(lease, len(source))
        progress = self.progress(lease)
        plan = self.ask(error, lambda: self.device.begin_suspend(session, progress, self.world.now))
        if plan is None:
            return
        assert plan.source.tolist() == source
        self.take_slots(lease, plan.slots.tolist())
        self.world.learn(lease)
        lease.busy, self.stows[lease.lease_id] = True, plan

    def stow_refusal(self, lease: WorldLease, count: int) -> Refusal:
        if lease.scratch:
            return e.InvalidArgumentError
        return self.park_refusal(lease, count)

    def park_refusal(self, lease: WorldLease, count: int) -> Refusal:
        quota = self.world.quotas.get(lease.tenant, self.world.default_quota)
        mates = [other for other in self.world.leases.values() if other.tenant == lease.tenant]
        parked = sum(len(mate.parked) + len(mate.checkpoint) + len(mate.stowed) for mate in mates)
        over = parked + count > quota.max_parked_blocks
        return e.QuotaExceededError if over else self.full(Tier.HOST, count)

    def full(self, tier: Tier, count: int) -> Refusal:
        budget = self.world.tier_bytes if tier is Tier.HOST else self.world.disk_bytes
        copied = set(self.world.copies.values())  # those make room
        free = budget - SLOT * sum(place[0] is tier and place not in copied for place in self.world.slots)
        return e.TierFullError if count * SLOT > max(0, free) else None

    def take_slots(self, lease: WorldLease, slots: list[int]) -> None:
        lease.stowed = self.taken(lease.pool, Tier.HOST, slots)

    def taken(self, pool: str, tier: Tier, slots: list[int]) -> list[Slot]:
        self.sync_copies()
        places = [(tier, pool, slot) for slot in slots]
        assert not set(places) & set(self.world.slots), "a slot is taken twice"
        assert len(set(places)) == len(places)
        self.world.slots |= dict.fromkeys(places)
        return places

    @precondition(lambda self: self.stows)
    @rule(chance=anything)
    def finish_suspend(self, chance: Chance) -> None:
        lease_id = chance.choice(sorted(self.stows))
        plan, lease = self.stows.pop(lease_id), self.world.leases[lease_id]
        self.fill_slots(lease, plan.source.tolist())
        sums = [self.sum_of(slot) for slot in lease.stowed]
        self.ask(e.InvalidArgumentError, lambda: self.device.finish_suspend(lease_id, [*sums, 1]))
        self.device.finish_suspend(lease_id, sums)
        lease.parked, lease.stowed = lease.stowed, []
        lease.table, lease.sealed, lease.fate = [], 0, "suspended"
        lease.generation += 1
        self.world.job_ended(lease)

    def fill_slots(self, lease: WorldLease, source: list[int]) -> None:
        pool = self.world.pool_of(lease)
        for block, slot in zip(source, lease.stowed, strict=True):
            self.world.slots[slot] = list(pool.content.get(block, [None] * pool.block_size))

    def checkpointed(self, lease: WorldLease, source: list[int]) -> list[int]:
        """What a lease was before the compression that begins, if that parks it; the checksums."""
        if not lease.stowed:
            return []
        self.fill_slots(lease, source)
        lease.back = self.world.saved(lease)
        lease.checkpoint, lease.stowed = lease.stowed, []
        return [self.sum_of(slot) for slot in lease.checkpoint]

    def sum_of(self, slot: Slot) -> int:
        """Of what is there: it goes along when that moves."""
        return zlib.crc32(repr(self.world.slots[slot]).encode())

    @precondition(lambda self: self.stows)
    @rule(chance=anything)
    def abort_suspend(self, chance: Chance) -> None:
        lease_id = chance.choice(sorted(self.stows))
        self.device.abort_suspend(lease_id)
        self.suspend_undone(lease_id)

    def suspend_undone(self, lease_id: int) -> None:
        del self.stows[lease_id]
        self.world.drop_slots(self.world.leases[lease_id], "stowed")
        self.world.job_ended(self.world.leases[lease_id])

    @precondition(lambda self: any(lease.parked for lease in self.world.leases.values()))
    @rule(chance=anything)
    def resume(self, chance: Chance) -> None:
        parked = [lease for lease in self.world.leases.values() if lease.parked]
        lease = chance.choice(parked if chance.random() < 0.95 else list(self.world.leases.values()))
        session, generation = self.owner(lease, chance), lease.generation - (chance.random() < 0.05)
        error = self.resume_refusal(session, lease, generation)
        asked = session, lease.lease_id, generation, self.world.now
        plan = self.ask(error, lambda: self.device.begin_resume(*asked))
        if plan is None:
            return
        self.begin_fetch(lease, plan, lease.parked)

    def begin_fetch(self, lease: WorldLease, plan: FetchPlan, slots: list[Slot]) -> None:
        blocks = plan.destination.tolist()
        assert plan.parked.slots.tolist() == [slot for _, _, slot in slots]
        assert plan.parked.checksums.tolist() == [self.sum_of(slot) for slot in slots]
        self.world.take(lease, blocks)
        for block in blocks[:1]:  # what an aborted job leaves behind
            self.world.pool_of(lease).write(block, 0, (lease.tenant, "half fetched", 0))
        lease.destination, lease.busy, self.fetches[lease.lease_id] = blocks, True, plan

    @precondition(lambda self: any(lease.checkpoint for lease in self.world.leases.values()))
    @rule(chance=anything)
    def restore(self, chance: Chance) -> None:
        able = [lease for lease in self.world.leases.values() if lease.checkpoint]
        lease = chance.choice(able if chance.random() < 0.95 else list(self.world.leases.values()))
        session, progress = self.owner(lease, chance), self.progress(lease)
        error = self.refusal(session, lease)
        if error is None and not lease.checkpoint:
            error = e.InvalidArgumentError
        if error is None and lease.checkpoint[0][0] is Tier.DISK:
            error = e.LeaseBusyError
        error = error or self.restore_refusal(lease)
        plan = self.ask(error, lambda: self.device.begin_restore(session, progress, self.world.now))
        if plan is not None:
            self.world.learn(lease)
            self.begin_fetch(lease, plan, lease.checkpoint)

    def restore_refusal(self, lease: WorldLease) -> Refusal:
        """What it has alone comes back to its tenant."""
        holders = self.world.holders(lease.pool)
        alone = sum(len(holders.get(block, ())) <= 1 for block in lease.table)
        wanted = len(lease.checkpoint)
        return Shortage(self.world, lease.tenant, lease.pool, wanted, returned=alone).error

    @precondition(lambda self: any(lease.checkpoint for lease in self.world.leases.values()))
    @rule(chance=anything)
    def drop_checkpoint(self, chance: Chance) -> None:
        lease = chance.choice(list(self.world.leases.values()))
        session = self.owner(lease, chance)
        error = self.refusal(session, lease)
        if error is e.LeaseSuspendedError:
            error = None
        asked = session, lease.lease_id, self.world.now
        if self.ask(error, lambda: self.device.drop_checkpoint(*asked)):
            self.world.drop_slots(lease, "checkpoint")

    def resume_refusal(self, session: str, lease: WorldLease, generation: int) -> Refusal:
        error = self.refusal(session, lease)
        if error is not e.LeaseSuspendedError:
            return error or e.InvalidArgumentError
        if generation != lease.generation:
            return e.StaleGenerationError
        if lease.parked and lease.parked[0][0] is Tier.DISK:
            return e.LeaseBusyError
        return Shortage(self.world, lease.tenant, lease.pool, len(lease.parked)).error

    @precondition(lambda self: self.fetches)
    @rule(chance=anything)
    def finish_fetch(self, chance: Chance) -> None:
        lease_id = chance.choice(sorted(self.fetches))
        plan, lease = self.fetches.pop(lease_id), self.world.leases[lease_id]
        pool = self.world.pool_of(lease)
        which = "checkpoint" if lease.checkpoint and lease.fate == "active" else "parked"
        for block, slot in zip(plan.destination.tolist(), getattr(lease, which), strict=True):
            pool.content[block] = list(self.world.slots[slot])
        done = self.device.finish_fetch(lease_id)
        self.world.drop_slots(lease, which)
        if which == "checkpoint":
            assert done.dropped_tokens == lease.position - lease.back.position
            lease.slots, lease.position = lease.back.slots, lease.back.position
            lease.compressed, lease.observed, lease.sealed = lease.back.compressed, lease.back.observed, 0
            self.world.learn(lease)
        lease.table, lease.destination, lease.fate = lease.destination, [], "active"
        lease.generation += 1
        self.world.job_ended(lease)

    @precondition(lambda self: self.fetches)
    @rule(chance=anything)
    def abort_fetch(self, chance: Chance) -> None:
        lease_id, lost = chance.choice(sorted(self.fetches)), chance.random() < 0.3
        self.device.abort_fetch(lease_id, lost)
        lease = self.world.leases[lease_id]
        if lost and lease.fate == "active":
            self.world.drop_slots(lease, "checkpoint")
        elif lost:
            self.world.lose_parked(lease)
        self.fetch_undone(lease_id)

    @precondition(lambda self: any(each.parked or each.checkpoint for each in self.world.leases.values()))
    @rule(chance=anything)
    def move(self, chance: Chance) -> None:
        able = [
            (lease, which)
            for lease in self.world.leases.values()
            for which in ("parked", "checkpoint")
            if getattr(lease, which) and lease.lease_id not in self.fetches
        ]
        if not able:
            return
        lease, which = chance.choice(able)
        source = getattr(lease, which)
        tier = Tier.DISK if source[0][0] is Tier.HOST else Tier.HOST
        asked = lease.lease_id, which == "checkpoint", tier
        move = self.ask(self.full(tier, len(source)), lambda: self.device.begin_move(*asked))
        if move is not None:
            target = self.taken(lease.pool, tier, move.slots.tolist())
            sums = [self.sum_of(slot) for slot in source]
            assert move.parked.checksums.tolist() == sums
            self.world.moves[move.move_id] = (lease, which, list(source), target, sums)

    @precondition(lambda self: self.world.moves)
    @rule(chance=anything)
    def finish_move(self, chance: Chance) -> None:
        """What was copied while its slots changed hands has other checksums, and is said to be damaged."""
        move_id = chance.choice(sorted(self.world.moves))
        lease, which, source, target, sums = self.world.moves.pop(move_id)
        copied = [self.world.slots.get(slot) for slot in source]
        intact = all(slot in self.world.slots for slot in source)
        intact = intact and [self.sum_of(slot) for slot in source] == sums
        current = self.moves_still(lease, which, source, sums)
        if chance.random() < 0.2:
            self.device.abort_move(move_id)
            return self.world.drop_target(target)
        damaged = [] if intact and chance.random() < 0.9 else [chance.randrange(len(source))]
        lost = bool(damaged) and current and source[0][0] is Tier.DISK
        assert self.device.finish_move(move_id, damaged) == (not lost)
        if damaged or not current:
            self.world.drop_target(target)
            if lost and which == "checkpoint":
                self.world.drop_slots(lease, "checkpoint")
            elif lost:
                self.world.lose_parked(lease)
            return
        self.world.slots |= dict(zip(target, copied, strict=True))
        self.world.drop_slots(lease, which)
        setattr(lease, which, target)

    def moves_still(self, lease: WorldLease, which: str, source: list[Slot], sums: list[int]) -> bool:
        alive = self.world.leases.get(lease.lease_id) is lease and lease.lease_id not in self.fetches
        return alive and getattr(lease, which) == source and [self.sum_of(slot) for slot in source] == sums

    def fetch_undone(self, lease_id: int) -> None:
        del self.fetches[lease_id]
        self.world.leases[lease_id].destination = []
        self.world.job_ended(self.world.leases[lease_id])
