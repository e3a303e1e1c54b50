"""Cached blocks are copied to the host tier and come back from there. The kernel worker is played here."""

from types import SimpleNamespace

from hypothesis.stateful import precondition, rule

from kvd_daemon.core import Tier

from .driver import Chance, Refusal, anything
from .quota_rules import Shortage
from .tier_rules import TierRules
from .world import CACHED, hashes, prefix_hash
from .world_parts import WorldPromotion


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
        listed = {(pool, copy.slot): name for (_, *name), copy in self.device.copies.items()}
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

    @precondition(lambda self: self.world.copies)
    @rule(chance=anything)
    def promote(self, chance: Chance) -> None:
        pool, tenant, text, depth = chance.choice(sorted(self.world.copies))
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
            if (pool, tenant, text, depth) not in self.world.copies or (tenant, text, depth) in names:
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
