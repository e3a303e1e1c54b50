"""Blocks come back or change hands: seal, release, revoke; and calls that must change nothing."""

from dataclasses import replace

from hypothesis.stateful import precondition, rule

from kvd import errors as e
from kvd_daemon.core import LeaseWish, Progress

from .driver import TTL, Chance, Driver, Refusal, any_lease, any_session, anything
from .snapshot import state_of
from .world import WorldLease, hashes, prefix_hash


class ReturnRules(Driver):
    """seal, release, release_blocks, revoke, rehearse; stale, foreign, doubled and impossible requests."""

    @precondition(any_lease)
    @rule(chance=anything)
    def seal(self, chance: Chance) -> None:
        lease = self.a_lease(chance, busy=False, streams=False, scratch=False, compressed=0, observed=0)
        session = self.owner(lease, chance)
        full = len(lease.slots) // self.world.pool_of(lease).block_size
        count = chance.randint(0, full) + (chance.random() < 0.1)
        names = lease.names(count, self.world.pool_of(lease).block_size)
        asked = [prefix_hash(text, depth) for _, text, depth in names]
        error = self.refusal(session, lease, by_time=False) or self.seal_refusal(lease, len(asked), full)
        change = self.ask(error, lambda: self.device.seal(session, self.progress(lease), asked))
        if change:
            self.world.learn(lease)
            swapped = self.swap_twins(lease, len(asked))
            assert lease.table == change.lease.table.tolist()
            assert change.kept_blocks == (swapped[0] if swapped else len(lease.table))

    def seal_refusal(self, lease: WorldLease, count: int, full: int) -> Refusal:
        private = lease.scratch or lease.streams or lease.compressed or lease.observed
        pool = self.world.pool_of(lease)
        named = {block: name for name, block in pool.names.items()}
        sealed = lease.table[: min(lease.sealed, count)]
        nameless = count > len(sealed) or any(block not in named for block in sealed)
        if count > full or (nameless and private):
            return e.InvalidArgumentError
        names = lease.names(len(sealed), pool.block_size)
        other = [block for block, name in zip(sealed, names, strict=True) if named.get(block, name) != name]
        return e.InvalidArgumentError if other else None

    def swap_twins(self, lease: WorldLease, count: int) -> list[int]:
        pool, swapped = self.world.pool_of(lease), []
        names = pool.names
        for depth, name in enumerate(lease.names(count, pool.block_size)):
            if names.get(name) == lease.table[depth]:
                continue
            if name in names:
                lease.table[depth] = names[name]
                swapped.append(depth)
            else:
                names[name] = lease.table[depth]
        lease.sealed = max(lease.sealed, count)
        lease.generation += bool(swapped)
        return swapped

    @precondition(any_lease)
    @rule(chance=anything)
    def release(self, chance: Chance) -> None:
        first = self.a_lease(chance)
        mates = [x for x in self.world.leases_of(first.session) if x is not first]
        chosen = [first, *mates[: chance.randint(0, 2)]]
        session = self.owner(first, chance)
        error = None if session in self.world.sessions else e.SessionNotFoundError
        if error is None and session != first.session:
            error = e.NotOwnerError
        if error is None and any(lease.busy for lease in chosen):
            error = e.LeaseBusyError
        ids = [lease.lease_id for lease in chosen]
        answer = self.ask(error, lambda: self.device.release(session, ids))
        if answer:
            assert answer.block_count == sum(len(lease.table) for lease in chosen)
            for lease in chosen:
                self.world.forget(lease)

    @precondition(any_lease)
    @rule(chance=anything)
    def release_blocks(self, chance: Chance) -> None:
        foul = chance.choice(["", "", "null", "twice", "foreign", "used", "nowhere"])
        lease = self.a_lease(chance, busy=False, streams=False)
        session = self.owner(lease, chance)
        pool = self.world.pool_of(lease)
        used = -(-len(lease.slots) // pool.block_size)
        unused = lease.table[used:]
        given = chance.sample(unused, chance.randint(min(1, len(unused)), len(unused)))
        error = self.refusal(session, lease, by_time=False)
        if error is None and lease.streams:
            error = e.InvalidArgumentError
        fouls = {
            "null": [0],
            "twice": given[:1],
            "foreign": [block for block in range(1, pool.blocks) if block not in lease.table][:1],
            "used": lease.table[:used][:1],
            "nowhere": [10**6],
        }
        bad = fouls.get(foul, [])
        if bad:
            error = error or (e.BlockInUseError if foul == "used" else e.BlockNotHeldError)
        asked = given + bad
        change = self.ask(error, lambda: self.device.release_blocks(session, self.progress(lease), asked))
        if change:
            self.world.learn(lease)
            lease.table = [block for block in lease.table if block not in given]
            assert change.lease.table.tolist() == lease.table

    @precondition(any_lease)
    @rule(chance=anything)
    def revoke(self, chance: Chance) -> None:
        lease = self.a_lease(chance, busy=chance.random() < 0.5)
        answer = self.ask(self.revoke_refusal(lease), lambda: self.device.revoke(lease.lease_id))
        if answer:
            assert answer.deferred == lease.busy
            if lease.shelved is not None:
                assert answer.quarantined_count == 0
                self.world.forget(lease)
            elif lease.busy:
                assert answer.quarantined_count == 0
                lease.ending = "revoke"
            else:
                assert answer.quarantined_count == len(lease.table) - lease.sealed
                self.world.fence(lease, "revoked")

    def revoke_refusal(self, lease: WorldLease) -> Refusal:
        if lease.busy and lease.ending is None:
            return None
        if lease.state in ("resting", "suspended"):
            return None
        pending = {"revoke": e.LeaseRevokedError, "expire": e.LeaseExpiredError}
        return pending.get(lease.ending or "", self.world.fate_error(lease))

    @rule(chance=anything)
    def rehearse(self, chance: Chance) -> None:
        before = state_of(self.device)
        self.device.rehearse(self.world.now + chance.randint(0, TTL))
        assert state_of(self.device) == before

    @precondition(any_lease)
    @rule(chance=anything)
    def impossible_progress(self, chance: Chance) -> None:
        how = chance.choice(["stale", "shorter", "longer", "earlier", "jump", "negative"])
        call = chance.choice(["extend", "compress", "seal", "release_blocks"])
        lease = self.a_lease(chance, busy=False)
        right, capacity = self.progress(lease), len(lease.table) * self.world.pool_of(lease).block_size
        wrong = {
            "stale": replace(right, generation=lease.generation - 1),
            "shorter": replace(right, length=lease.known[0] - 1, position=lease.known[1]),
            "longer": replace(right, length=capacity + 1, position=right.position + capacity + 1),
            "earlier": replace(right, position=lease.known[1] - 1),
            "jump": replace(right, position=right.position + 1),
            "negative": replace(right, length=-1, position=-1),
        }[how]
        explicit = lease.policy.sinks + 10 if lease.streams else lease.compressed
        if how == "jump" and lease.known[0] <= explicit:
            return
        error = self.refusal(lease.session, lease, by_time=call in ("extend", "compress"))
        if error is None:
            error = e.StaleGenerationError if how == "stale" else e.InvalidArgumentError
        self.ask(error, lambda: self.call(call, lease.session, wrong))

    def call(self, name: str, session: str, progress: Progress) -> object:
        if name == "extend":
            return self.device.extend(session, [(progress, 1)], self.world.now)
        if name == "compress":
            return self.device.begin_compress(session, progress, None, None, self.world.now)
        if name == "seal":
            return self.device.seal(session, progress, [])
        return self.device.release_blocks(session, progress, [])

    @precondition(any_session)
    @rule(chance=anything)
    def malformed(self, chance: Chance) -> None:
        call = chance.choice(["release", "extend", "lease", "hash", "scratch", "unknown"])
        session, now = chance.choice(list(self.world.sessions)), self.world.now
        mine = [lease for lease in self.world.leases_of(session) if not lease.busy]
        error = self.world.session_error(session, by_time=call not in ("release", "unknown"))
        if call in ("release", "unknown"):
            error = None  # an expired session may release
        wishes = {
            "lease": LeaseWish(-1),
            "hash": LeaseWish(9, prefix_hashes=[b"short"]),
            "scratch": LeaseWish(9, prefix_hashes=hashes(0, 1), scratch=True),
        }
        if call == "unknown":
            self.ask(e.LeaseNotFoundError, lambda: self.device.release(session, [10**9]))
        elif call in wishes:
            where = next(iter(self.world.pools), "a")
            error = error or (e.InvalidArgumentError if where in self.world.pools else e.PoolNotFoundError)
            self.ask(error, lambda: self.device.lease(session, where, [wishes[call]], now))
        elif mine:
            lease, progress = mine[0], self.progress(mine[0])
            twice = [lease.lease_id] * 2
            if call == "release":
                self.ask(e.InvalidArgumentError, lambda: self.device.release(session, twice))
            else:
                items = [(progress, 1), (progress, 1)]
                self.ask(error or e.InvalidArgumentError, lambda: self.device.extend(session, items, now))
