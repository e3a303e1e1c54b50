"""Cached blocks are copied to the host tier, on to disk, and come back. The workers are played here."""

from types import SimpleNamespace

from hypothesis.stateful import precondition, rule

from kvd_daemon.core import Tier
from kvd_daemon.core.parked import CopyMove

from .driver import Chance, Refusal, anything
from .quota_rules import Shortage
from .tier_rules import SLOT, TierRules
from .world import CACHED, hashes, prefix_hash
from .world_parts import CopyName, WorldCopyMove, WorldPromotion


class CopyRules(TierRules):
    """spill and promotion begun, finished, aborted; damaged slots."""

    def sync_copies(self) -> None:
        """The device may drop copies where slots are short: which ones it says."""
        tenants = {index: name for name, index in self.device.tenants.items()}
        there = {(pool, tenants[tenant], name) for pool, tenant, name in self.device.copies}
        for name in list(self.world.copies):
            pool, tenant, text, depth = name
            if (pool, tenant, prefix_hash(text, depth)) not in there:
                del self.world.slots[self.world.copies.pop(name)]

    def a_copy(self, chance: Chance, tier: Tier) -> CopyName:
        """Mostly one in that tier, the block of which was evicted, with all that comes before it."""
        found = [name for name, slot in self.world.copies.items() if slot[0] is tier and self.is_next(name)]
        return chance.choice(sorted(found if found and chance.random() < 0.9 else self.world.copies))

    def is_next(self, name: CopyName) -> bool:
        pool, tenant, text, depth = name
        here = [(tenant, text, each) in self.world.pools[pool].names for each in range(depth + 1)]
        copied = [(pool, tenant, text, each) in self.world.copies for each in range(depth + 1)]
        return not here[depth] and all(a or b for a, b in zip(here, copied, strict=True))

    def name_of(self, pool: str, block: int) -> tuple[str, int, int]:
        return next(name for name, each in self.world.pools[pool].names.items() if each == block)

    @precondition(lambda self: any(pool.names for pool in self.world.pools.values()))
    @rule(chance=anything)
    def spill(self, chance: Chance) -> None:
        pool = chance.choice([name for name, each in self.world.pools.items() if each.names])
        spill = self.device.begin_spill(pool, chance.randint(1, 5))
        self.sync_copies()
        if spill is None:
            return
        blocks, states = spill.blocks.tolist(), self.world.states(pool)
        assert all(states[block] == CACHED for block in blocks)
        assert not {(pool, *self.name_of(pool, block)) for block in blocks} & set(self.world.copies)
        slots = self.taken(pool, Tier.HOST, spill.slots.tolist())
        self.world.spills[spill.spill_id] = (pool, blocks, slots)

    @precondition(lambda self: self.world.spills)
    @rule(chance=anything)
    def finish_spill(self, chance: Chance) -> None:
        spill_id = chance.choice(sorted(self.world.spills))
        pool, blocks, slots = self.world.spills.pop(spill_id)
        if chance.random() < 0.2:
            self.device.abort_spill(spill_id)
            return self.world.drop_target(slots)
        for block, slot in zip(blocks, slots, strict=True):
            content = self.world.pools[pool].content
            self.world.slots[slot] = list(content.get(block, [None] * self.world.pools[pool].block_size))
        kept = self.device.finish_spill(spill_id, [self.sum_of(slot) for slot in slots])
        there = self.device.copies.items()
        listed = {(each, copy.slot): name for (each, *name), copy in there if copy.tier is Tier.HOST}
        used = 0
        for block, slot in zip(blocks, slots, strict=True):
            if (slot[1], slot[2]) not in listed:
                del self.world.slots[slot]
                continue
            tenant, text, depth = self.name_of(pool, block)
            assert listed[slot[1], slot[2]] == [self.device.tenants[tenant], prefix_hash(text, depth)]
            size = self.world.pools[pool].block_size
            tokens = [(tenant, text, depth * size + i) for i in range(size)]
            assert self.world.slots[slot] == tokens, "a copy of something else"
            self.world.copies[pool, tenant, text, depth] = slot
            used += 1
        assert kept == used

    @precondition(lambda self: any(slot[0] is Tier.HOST for slot in self.world.copies.values()))
    @rule(chance=anything)
    def promote(self, chance: Chance) -> None:
        pool, tenant, text, depth = self.a_copy(chance, Tier.HOST)
        mates = [name for name, each in self.world.sessions.items() if each.tenant == tenant]
        session = chance.choice(mates) if mates and chance.random() < 0.9 else self.a_session(chance)
        count = depth + chance.randint(1, 2)
        error = self.world.session_error(session, by_time=False)
        here, wanted = self.found_and_missing(session, pool, text, count) if error is None else (0, [])
        error = error or self.promotion_refusal(session, pool, text, here, wanted)
        asked = session, pool, hashes(text, count)
        promotion = self.ask(error, lambda: self.device.begin_promotion(*asked))
        if promotion is None:
            assert error is not None or not wanted
            return
        tenant, blocks = self.world.sessions[session].tenant, promotion.blocks.tolist()
        self.world.take(SimpleNamespace(pool=pool, lease_id=0), blocks)
        slots = [self.world.copies[pool, tenant, text, depth] for depth in wanted]
        assert promotion.slots.tolist() == [slot for _, _, slot in slots]
        sums = [self.sum_of(slot) for slot in slots]
        assert promotion.checksums.tolist() == sums
        made = WorldPromotion(pool, tenant, text, wanted, blocks, slots, sums)
        self.world.promotions[promotion.promotion_id] = made

    def found_and_missing(self, session: str, pool: str, text: int, count: int) -> tuple[int, list[int]]:
        tenant, names = self.world.sessions[session].tenant, self.world.pools[pool].names
        here = next((depth for depth in range(count) if (tenant, text, depth) not in names), count)
        wanted = []
        for depth in range(here, count):
            slot = self.world.copies.get((pool, tenant, text, depth))
            if slot is None or slot[0] is not Tier.HOST or (tenant, text, depth) in names:
                break
            wanted.append(depth)
        return here, wanted

    def promotion_refusal(self, session: str, pool: str, text: int, here: int, wanted: list[int]) -> Refusal:
        if not wanted:
            return None
        tenant, holders = self.world.sessions[session].tenant, self.world.holders(pool)
        names = self.world.pools[pool].names
        woken = sum(not holders[names[tenant, text, depth]] for depth in range(here))
        return Shortage(self.world, tenant, pool, len(wanted), 0, woken).error

    @precondition(lambda self: self.world.promotions)
    @rule(chance=anything)
    def finish_promotion(self, chance: Chance) -> None:
        number = chance.choice(sorted(self.world.promotions))
        promotion = self.world.promotions.pop(number)
        if chance.random() < 0.2:
            return self.device.abort_promotion(number)
        damaged = [
            i
            for i, (slot, told) in enumerate(zip(promotion.slots, promotion.sums, strict=True))
            if slot not in self.world.slots or self.sum_of(slot) != told or chance.random() < 0.1
        ]
        good, cached = min(damaged, default=len(promotion.depths)), 0
        for i in range(good):
            names = self.world.pools[promotion.pool].names
            name, block = (promotion.tenant, promotion.text, promotion.depths[i]), promotion.blocks[i]
            self.world.pools[promotion.pool].content[block] = list(self.world.slots[promotion.slots[i]])
            cached += name not in names
            names.setdefault(name, block)
        assert self.device.finish_promotion(number, damaged) == cached
        for i in damaged:
            name = promotion.pool, promotion.tenant, promotion.text, promotion.depths[i]
            if (
                self.world.copies.get(name) == promotion.slots[i]
                and self.sum_of(promotion.slots[i]) == promotion.sums[i]
            ):
                del self.world.slots[self.world.copies.pop(name)]

    @precondition(lambda self: any(slot[0] is Tier.HOST for slot in self.world.copies.values()))
    @rule(chance=anything)
    def demote(self, chance: Chance) -> None:
        most_bytes = chance.choice([1, 3 * SLOT, 100 * SLOT])
        able = self.device.demotable()
        move = self.device.begin_demotion(most_bytes)
        self.sync_copies()
        if move is None:
            assert not able or self.device.arenas[Tier.DISK].free_bytes < SLOT
        else:
            assert able
            assert len(move.copies) <= max(1, most_bytes // SLOT)
            self.begin_copy_move(move, Tier.DISK)

    @precondition(lambda self: any(slot[0] is Tier.DISK for slot in self.world.copies.values()))
    @rule(chance=anything)
    def recall(self, chance: Chance) -> None:
        """What comes first on disk comes; what lies before that in host memory is no reason to wait."""
        pool, tenant, text, depth = self.a_copy(chance, Tier.DISK)
        mates = [name for name, each in self.world.sessions.items() if each.tenant == tenant]
        session = chance.choice(mates) if mates and chance.random() < 0.9 else self.a_session(chance)
        asked = session, pool, hashes(text, depth + 1)
        error = self.world.session_error(session, by_time=False)
        expected = self.coming(session, pool, text, depth + 1) if error is None else []
        if error is None:
            recallable = [self.world_name(name) for name in self.device.recallable(*asked)]
            assert recallable == expected
        move = self.ask(error, lambda: self.device.begin_recall(*asked, chance.choice([1, 100 * SLOT])))
        self.sync_copies()
        if move is not None:
            self.begin_copy_move(move, Tier.HOST)
            moved = self.world.copy_moves[move.move_id].names
            assert moved == [name for name in expected if name in moved]
        elif expected and error is None:
            moves = [name for each in self.world.copy_moves.values() for name in each.names]
            full = self.device.arenas[Tier.HOST].free_bytes < SLOT
            assert full or expected[0] in moves

    def coming(self, session: str, pool: str, text: int, count: int) -> list[CopyName]:
        tenant, names = self.world.sessions[session].tenant, self.world.pools[pool].names
        here = next((depth for depth in range(count) if (tenant, text, depth) not in names), count)
        found = []
        for depth in range(here, count):
            slot = self.world.copies.get((pool, tenant, text, depth))
            if slot is None or (tenant, text, depth) in names:
                break
            if slot[0] is Tier.DISK:
                found.append((pool, tenant, text, depth))
        return found

    def world_name(self, name: tuple[str, int, bytes]) -> CopyName:
        known = {
            (pool, self.device.tenants[tenant], prefix_hash(text, depth)): (pool, tenant, text, depth)
            for pool, tenant, text, depth in self.world.copies
        }
        return known[name]

    def begin_copy_move(self, move: CopyMove, tier: Tier) -> None:
        assert move.tier is tier
        names = [self.world_name(name) for name in move.names]
        busy = [name for each in self.world.copy_moves.values() for name in each.names]
        assert not set(names) & set(busy)
        source = [self.world.copies[name] for name in names]
        assert [slot for _, _, slot in source] == move.origin.slots.tolist()
        assert {place for place, _, _ in source} == {move.origin.tier} != {tier}
        sums = [self.sum_of(slot) for slot in source]
        assert move.origin.checksums.tolist() == sums
        target = self.taken(move.pool, tier, move.slots.tolist())
        self.world.copy_moves[move.move_id] = WorldCopyMove(move.pool, names, source, target, sums)

    @precondition(lambda self: self.world.copy_moves)
    @rule(chance=anything)
    def finish_copy_move(self, chance: Chance) -> None:
        """What was copied while its slot changed hands has another checksum, and is said to be damaged."""
        number = chance.choice(sorted(self.world.copy_moves))
        move = self.world.copy_moves.pop(number)
        if chance.random() < 0.2:
            self.device.abort_move(number)
            return self.world.drop_target(move.target)
        fetched = {
            (each.pool, each.tenant, each.text, depth)
            for each in self.world.promotions.values()
            for depth in each.depths
        }
        damaged, lost = [], False
        rows = zip(move.names, move.source, move.target, move.sums, strict=True)
        for index, (name, source, target, told) in enumerate(rows):
            intact = source in self.world.slots and self.sum_of(source) == told
            current = self.world.copies.get(name) == source and intact and name not in fetched
            if not intact or chance.random() < 0.1:
                damaged.append(index)
                lost |= current
                del self.world.slots[target]
                if current:
                    del self.world.slots[self.world.copies.pop(name)]
            elif current:
                self.world.slots[target] = self.world.slots.pop(source)
                self.world.copies[name] = target
            else:
                del self.world.slots[target]
        assert self.device.finish_move(number, damaged) == (not lost)
