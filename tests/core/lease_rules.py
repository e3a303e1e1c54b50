"""Blocks go out: lease, extend, scrub; workers write."""

from hypothesis.stateful import precondition, rule

from kvd import errors as e
from kvd.policy import Policy, Streaming
from kvd_daemon.core import Change, LeaseWish

from .driver import POLICIES, Chance, Driver, Refusal, any_lease, any_session, anything
from .quota_rules import Shortage
from .world import CACHED, FREE, WorldLease, hashes

Wishes = list[tuple[LeaseWish, int]]
"""Each with the number of the text it is for."""


class LeaseRules(Driver):
    """lease with and without prefix, scratch, extend dense and streaming, scrub ok and failed."""

    @precondition(any_session)
    @rule(chance=anything)
    def lease(self, chance: Chance) -> None:
        asked = [
            (
                LeaseWish(chance.randint(0, 30), chance.choice(POLICIES), floor=chance.choice([0, 0, 1, 5])),
                chance.randint(0, 1),
            )
            for _ in range(chance.randint(1, 3))
        ]
        self.try_lease(self.a_session(chance), self.a_pool(chance), asked, fill=False)

    @precondition(any_session)
    @rule(chance=anything)
    def prefill(self, chance: Chance) -> None:
        wish = LeaseWish(chance.randint(8, 60), chance.choice(POLICIES))
        self.try_lease(self.a_session(chance), "a", [(wish, chance.randint(0, 1))], fill=True)

    @precondition(any_session)
    @rule(chance=anything)
    def crowd(self, chance: Chance) -> None:
        """All that is left: what is cached is evicted for it."""
        name = self.a_pool(chance)
        if name in self.world.pools:
            pool, states = self.world.pools[name], list(self.world.states(name).values())
            left = sum(state in (FREE, CACHED) for state in states) - pool.reserve
            wish = LeaseWish(max(1, left) * pool.block_size)
            self.try_lease(self.a_session(chance), name, [(wish, 9)], fill=False)

    @precondition(any_session)
    @rule(chance=anything)
    def lease_scratch(self, chance: Chance) -> None:
        wish = LeaseWish(chance.randint(1, 12), scratch=True)
        self.try_lease(self.a_session(chance), self.a_pool(chance), [(wish, 9)], fill=True)

    @precondition(lambda self: any(pool.names for pool in self.world.pools.values()))
    @rule(chance=anything)
    def lease_with_prefix(self, chance: Chance) -> None:
        count, tokens, more = chance.randint(1, 3), chance.randint(0, 30), chance.randint(0, 3)
        pool = chance.choice([name for name, each in self.world.pools.items() if each.names])
        tenant, text, depth = chance.choice(list(self.world.pools[pool].names))
        asked = hashes(text, depth + more // 3 + 1)
        mates = [name for name, session in self.world.sessions.items() if session.tenant == tenant]
        session = chance.choice(mates) if mates and chance.random() < 0.8 else self.a_session(chance)
        self.try_lease(session, pool, [(LeaseWish(tokens, prefix_hashes=asked), text)] * count, fill=True)

    def try_lease(self, session: str, pool: str, wishes: Wishes, fill: bool) -> None:
        asked = [wish for wish, _ in wishes]
        error = self.world.session_error(session) or self.lease_refusal(session, pool, wishes)
        answer = self.ask(error, lambda: self.device.lease(session, pool, asked, self.world.now))
        if answer is None:
            return
        own: list[int] = []
        for (wish, text), lease in zip(wishes, answer.leases, strict=True):
            shared = self.prefix(session, pool, wish, text)
            table = lease.table.tolist()
            assert table[: len(shared)] == shared
            self.admit(session, pool, lease.lease_id, wish, text)
            own += table[len(shared) :]
        for wish in asked:
            self.world.pins.pop(wish.pin_id, None)
        self.world.take(self.world.leases[answer.leases[0].lease_id], own)
        for wish, lease in zip(asked, answer.leases, strict=True):
            mine = self.world.leases[lease.lease_id]
            mine.table = lease.table.tolist()
            end = min(wish.tokens, len(mine.table) * self.world.pools[pool].block_size)
            mine.pending = list(range(len(mine.slots), end)) if fill else []
        self.begin_scrub([lease.lease_id for lease in answer.leases], answer.scrub, {})

    def admit(self, session: str, pool: str, lease_id: int, wish: LeaseWish, text: int) -> None:
        shared = self.prefix(session, pool, wish, text)
        length = len(shared) * self.world.pools[pool].block_size
        self.world.leases[lease_id] = WorldLease(
            lease_id=lease_id,
            session=session,
            pool=pool,
            tenant=self.world.sessions[session].tenant,
            text=text,
            policy=wish.policy,
            scratch=wish.scratch,
            table=shared,
            slots=list(range(length)),
            position=length,
            sealed=len(shared),
            known=(length, length),
            floor=raised(wish.floor, wish.policy),
        )

    def prefix(self, session: str, pool: str, wish: LeaseWish, text: int) -> list[int]:
        if wish.pin_id:
            return list(self.world.pins[wish.pin_id].blocks)
        tenant, names = self.world.sessions[session].tenant, self.world.pools[pool].names
        found = [names.get((tenant, text, depth)) for depth in range(len(wish.prefix_hashes))]
        return [block for block in found if block is not None]

    def own_blocks(self, pool: str, wish: LeaseWish) -> int:
        if wish.pin_id:
            pinned = len(self.world.pins[wish.pin_id].blocks)
            return max(0, -(-wish.tokens // self.world.pools[pool].block_size) - pinned)
        block_size = self.world.pools[pool].block_size
        if isinstance(wish.policy, Streaming):
            return wish.policy.capacity_blocks(block_size)
        return max(0, -(-wish.tokens // block_size) - len(wish.prefix_hashes))

    def lease_refusal(self, session: str, pool: str, wishes: Wishes) -> Refusal:
        if pool not in self.world.pools:
            return e.PoolNotFoundError
        shared: set[int] = set()
        for wish, text in wishes:
            error = self.taking_refusal(session, pool, wish, text) if wish.pin_id else None
            if error is not None:
                return error
            blocks = self.prefix(session, pool, wish, text)
            if len(blocks) < len(wish.prefix_hashes):
                return e.PrefixNotFoundError
            shared |= set(blocks)
        taken = [wish.pin_id for wish, _ in wishes if wish.pin_id]
        if len(set(taken)) < len(taken):
            return e.InvalidArgumentError
        woken = sum(not self.world.holders(pool)[block] for block in shared)
        ordinary = sum(self.own_blocks(pool, wish) for wish, _ in wishes if not wish.scratch)
        scratch = sum(self.own_blocks(pool, wish) for wish, _ in wishes if wish.scratch)
        tenant = self.world.sessions[session].tenant
        return Shortage(self.world, tenant, pool, ordinary, scratch, woken).error

    def taking_refusal(self, session: str, pool: str, wish: LeaseWish, text: int) -> Refusal:
        """Why a session may not take over a pin."""
        pin = self.world.pins.get(wish.pin_id)
        if pin is None or pin.tenant != self.world.sessions[session].tenant:
            return e.PinNotFoundError
        if pin.session != session:
            return e.PinNotFoundError if pin.session else e.InvalidArgumentError
        names = [self.world.pools[pin.pool].names.get((pin.tenant, text, depth)) for depth in range(99)]
        wrong = wish.prefix_hashes and names[: len(wish.prefix_hashes)] != pin.blocks
        return e.InvalidArgumentError if wrong or pin.pool != pool else None

    def begin_scrub(self, lease_ids: list[int], scrub: list, saved: dict[int, WorldLease]) -> None:
        """Blocks with another tenant's bytes, and no others, are to be scrubbed."""
        leases = [self.world.leases[lease_id] for lease_id in lease_ids]
        listed = {b for start, count in scrub for b in range(start, start + count)}
        old = {block for lease in saved.values() for block in lease.table}
        for lease in leases:
            pool = self.world.pool_of(lease)
            for block in set(lease.table[lease.sealed :]) - old:
                written = {token[0] for token in pool.content.get(block, []) if token}
                assert written <= {lease.tenant} or block in listed
        if scrub or any(lease.copying for lease in leases):
            for lease in leases:
                lease.busy = True
            self.scrubs.append((lease_ids, scrub, saved))
        else:
            self.worker_writes(leases)

    def worker_writes(self, leases: list[WorldLease]) -> None:
        for lease in leases:
            self.world.write(lease, lease.pending)
            lease.pending = []

    @precondition(lambda self: self.scrubs)
    @rule(chance=anything)
    def scrub(self, chance: Chance) -> None:
        lease_ids, runs, saved = self.scrubs.pop(0)
        leases = [self.world.leases[lease_id] for lease_id in lease_ids]
        if chance.random() < 0.6:
            self.device.scrubbed(lease_ids)
            self.world.pool_of(leases[0]).zero(runs)
            for lease in leases:
                if lease.copying is not None:
                    self.world.pool_of(lease).copy(*lease.copying)
                self.world.job_ended(lease)
            self.worker_writes([lease for lease in leases if lease.fate == "active"])
            return
        self.device.scrub_failed(lease_ids)
        self.scrub_undone(leases, saved)

    def scrub_undone(self, leases: list[WorldLease], saved: dict[int, WorldLease]) -> None:
        for lease in leases:
            if lease.lease_id in saved:
                self.world.restore(saved[lease.lease_id])
                self.world.job_ended(self.world.leases[lease.lease_id])
            else:
                self.world.forget(lease)

    @precondition(any_lease)
    @rule(chance=anything)
    def extend(self, chance: Chance) -> None:
        amounts = [chance.choice([0, 1, 4, 17, 50]) for _ in range(chance.randint(1, 3))]
        first = self.a_lease(chance, busy=False)
        mates = [x for x in self.world.leases.values() if x.pool == first.pool and x.session == first.session]
        chosen = [first, *[x for x in mates if x is not first and x.state == "active"]][: len(amounts)]
        self.try_extend(self.owner(first, chance), chosen, amounts)

    def try_extend(self, session: str, chosen: list[WorldLease], amounts: list[int]) -> None:
        first = chosen[0]
        items = [(self.progress(lease), n) for lease, n in zip(chosen, amounts, strict=False)]
        error = next(filter(None, (self.refusal(session, lease) for lease in chosen)), None)
        error = error or self.extend_refusal(first.pool, chosen, amounts)
        answer = self.ask(error, lambda: self.device.extend(session, items, self.world.now))
        if answer is None:
            return
        copies = [] if not answer.copies else list(answer.copies)
        saved = {}
        for lease, change, amount in zip(chosen, answer.leases, amounts, strict=False):
            before = self.world.saved(lease)
            before.slots, before.position = before.slots[: before.known[0]], before.known[1]
            saved[lease.lease_id] = before
            self.world.learn(lease)
            self.grow(lease, change, amount)
        assert copies == [lease.copying for lease in chosen if lease.copying is not None]
        self.begin_scrub([lease.lease_id for lease in chosen], answer.scrub, saved)

    def extend_refusal(self, pool: str, chosen: list[WorldLease], amounts: list[int]) -> Refusal:
        ordinary = scratch = 0
        for lease, amount in zip(chosen, amounts, strict=False):
            wanted = -(-(len(lease.slots) + amount) // self.world.pools[pool].block_size)
            more = 0 if lease.streams else max(0, wanted - len(lease.table))
            more += bool(amount and self.world.needs_copy(lease))
            ordinary, scratch = ordinary + more * (not lease.scratch), scratch + more * lease.scratch
        return Shortage(self.world, chosen[0].tenant, pool, ordinary, scratch).error

    def grow(self, lease: WorldLease, change: Change, amount: int) -> None:
        table = change.lease.table.tolist()
        assert table[: change.kept_blocks] == lease.table[: change.kept_blocks]
        if lease.streams:
            self.recycle(lease, change, amount)
        else:
            leaves = amount > 0 and self.world.shares_tail(lease)
            copied = leaves and self.world.needs_copy(lease)
            tail = [table[lease.sealed - 1]] if copied else []
            self.world.take(lease, table[len(lease.table) :] + tail)
            if leaves:
                self.leave_tail(lease, tail)
            lease.pending = list(range(lease.position, lease.position + amount))
        lease.table = table
        lease.generation = change.lease.generation

    def leave_tail(self, lease: WorldLease, tail: list[int]) -> None:
        """Its last block is its own again, or `tail` is to be a copy of it."""
        lease.sealed -= 1
        if tail:
            lease.copying = lease.table[lease.sealed], tail[0]

    def recycle(self, lease: WorldLease, change: Change, amount: int) -> None:
        """No block more or less; oldest ones moved behind; only as much forgotten as had to be."""
        table, block_size = change.lease.table.tolist(), self.world.pool_of(lease).block_size
        sinks = lease.policy.sink_blocks(block_size)
        ring, moved = lease.table[sinks:], lease.table[sinks:].index(table[sinks])
        assert table == lease.table[:sinks] + ring[moved:] + ring[:moved]
        assert (change.lease.generation > lease.generation) or moved == 0
        cut = sinks * block_size
        skipped = change.lease.position - lease.position
        whole = len(lease.slots) > change.lease.length and moved == 0  # the whole ring was recycled
        kept = [] if whole else lease.slots[cut + moved * block_size :]
        lease.slots = lease.slots[:cut] + kept
        assert len(lease.slots) == change.lease.length
        new = list(range(change.lease.position - skipped, change.lease.position - skipped + amount))
        stored = new[: change.skip_after] + new[change.skip_after + skipped :]
        room = len(table) * block_size - len(lease.slots)
        assert len(stored) <= room
        assert len(stored) > room - block_size or (moved == 0 and not whole)
        lease.position, lease.pending = change.lease.position, stored
        self.world.learn(lease)

    @precondition(any_lease)
    @rule(chance=anything)
    def worker_writes_on(self, chance: Chance) -> None:
        """Into room it has; nobody is told."""
        lease = self.a_lease(chance, busy=False, fate="active")
        room = len(lease.table) * self.world.pool_of(lease).block_size - len(lease.slots)
        if lease.state == "active" and not self.world.shares_tail(lease):
            self.world.write(
                lease, list(range(lease.position, lease.position + min(chance.randint(1, 12), room)))
            )


def raised(floor: int, policy: Policy) -> int:
    """To what the policy's sinks take; 0 is no floor."""
    return floor if floor == 0 else max(floor, policy.sinks)
