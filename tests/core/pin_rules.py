"""Blocks are found and pinned, for a while or for good; leases take what was pinned for them."""

from hypothesis.stateful import precondition, rule

from kvd import errors as e
from kvd_daemon.core import LeaseWish
from kvd_daemon.core.limits import MAX_PIN_TTL_NS

from .driver import TTL, Chance, Refusal, any_session, anything
from .lease_rules import LeaseRules
from .quota_rules import Shortage
from .world import hashes
from .world_parts import WorldPin


def any_name(rules: LeaseRules) -> bool:
    return any(pool.names for pool in rules.world.pools.values())


def any_pin(rules: LeaseRules) -> bool:
    return bool(rules.world.pins)


class PinRules(LeaseRules):
    """match, pin, unpin, drop_pin; lease by a pin, one's own or another's."""

    @precondition(any_name)
    @rule(chance=anything)
    def match(self, chance: Chance) -> None:
        session, pool, text, count = self.something_known(chance)
        ttl = chance.choice([0, -5, MAX_PIN_TTL_NS + 1]) if chance.random() < 0.1 else chance.randint(1, TTL)
        found = self.found(session, pool, text, count)
        error = self.world.session_error(session)
        if error is None and not 0 < ttl <= MAX_PIN_TTL_NS:
            error = e.InvalidArgumentError
        error = error or self.pin_refusal(session, pool, found)
        asked = hashes(text, count)
        answer = self.ask(error, lambda: self.device.match(session, pool, asked, ttl, self.world.now))
        if answer is None:
            return
        assert answer.found == len(found)
        assert (answer.pin is None) == (not found)
        if answer.pin is not None:
            self.pinned(answer.pin.pin_id, session, pool, found)
            self.world.pins[answer.pin.pin_id].session = session
            self.world.pins[answer.pin.pin_id].expires = self.world.now + ttl

    def something_known(self, chance: Chance) -> tuple[str, str, int, int]:
        """A session, a pool, a text and a number of its blocks, of which some are sealed there, mostly."""
        pool = chance.choice([name for name, each in self.world.pools.items() if each.names])
        tenant, text, depth = chance.choice(list(self.world.pools[pool].names))
        mates = [name for name, each in self.world.sessions.items() if each.tenant == tenant]
        session = chance.choice(mates) if mates and chance.random() < 0.8 else self.a_session(chance)
        return session, pool, text, max(1, depth + chance.randint(-1, 2))

    def found(self, session: str, pool: str, text: int, count: int) -> list[int]:
        known = self.world.sessions.get(session)
        blocks: list[int] = []
        for depth in range(count if known is not None else 0):
            block = self.world.pools[pool].names.get((known.tenant, text, depth))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def pin_refusal(self, session: str, pool: str, blocks: list[int]) -> Refusal:
        holders = self.world.holders(pool)
        woken = sum(not holders[block] for block in blocks)
        return Shortage(self.world, self.world.sessions[session].tenant, pool, woken=woken).error

    def pinned(self, pin_id: int, session: str, pool: str, blocks: list[int]) -> None:
        assert pin_id not in self.world.pins
        tenant = self.world.sessions[session].tenant
        self.world.pins[pin_id] = WorldPin(tenant, pool, blocks)

    @precondition(any_name)
    @rule(chance=anything)
    def pin(self, chance: Chance) -> None:
        session, pool, text, count = self.something_known(chance)
        found = self.found(session, pool, text, count)
        error = self.world.session_error(session, by_time=False)
        if error is None and len(found) < count:
            error = e.PrefixNotFoundError
        error = error or self.budget_refusal(session, count) or self.pin_refusal(session, pool, found)
        answer = self.ask(error, lambda: self.device.pin(session, pool, hashes(text, count)))
        if answer is not None:
            self.pinned(answer.pin_id, session, pool, found)

    def budget_refusal(self, session: str, count: int) -> Refusal:
        tenant = self.world.sessions[session].tenant
        budget = self.world.quotas.get(tenant, self.world.default_quota).pin_blocks
        pins = [pin for pin in self.world.pins.values() if pin.tenant == tenant and not pin.session]
        return e.QuotaExceededError if sum(len(pin.blocks) for pin in pins) + count > budget else None

    @precondition(any_pin)
    @rule(chance=anything)
    def unpin(self, chance: Chance) -> None:
        pin_id, session = self.a_pin(chance)
        error = self.world.session_error(session, by_time=False)
        error = error or self.ownership_refusal(session, pin_id)
        if self.ask(error, lambda: self.device.unpin(session, pin_id)):
            del self.world.pins[pin_id]

    def a_pin(self, chance: Chance) -> tuple[int, str]:
        """And a session that may use it, mostly."""
        pin_id = chance.choice(list(self.world.pins)) if chance.random() < 0.95 else 10**6
        pin = self.world.pins.get(pin_id)
        owner = pin.session if pin is not None and chance.random() < 0.9 else ""
        return pin_id, owner or self.a_session(chance)

    def ownership_refusal(self, session: str, pin_id: int) -> Refusal:
        pin = self.world.pins.get(pin_id)
        if pin is None or pin.tenant != self.world.sessions[session].tenant:
            return e.PinNotFoundError
        return None if pin.session in ("", session) else e.PinNotFoundError

    @precondition(any_pin)
    @rule(chance=anything)
    def operator_drops_a_pin(self, chance: Chance) -> None:
        pin_id = self.a_pin(chance)[0]
        error = None if pin_id in self.world.pins else e.PinNotFoundError
        if self.ask(error, lambda: self.device.drop_pin(pin_id)):
            del self.world.pins[pin_id]

    @precondition(lambda self: any_pin(self) and any_session(self))
    @rule(chance=anything)
    def lease_by_a_pin(self, chance: Chance) -> None:
        pin_id, session = self.a_pin(chance)
        pin = self.world.pins.get(pin_id)
        pool = pin.pool if pin is not None else self.a_pool(chance)
        text = self.text_of(pin) if pin is not None else 0
        foul = chance.choice(["", "", "", "other pool", "other hashes", "twice"])
        if foul == "other pool":
            pool = self.a_pool(chance)
        named = chance.choice([0, len(pin.blocks) if pin is not None else 0])
        named += foul == "other hashes"
        wish = LeaseWish(chance.randint(0, 30), prefix_hashes=hashes(text, named), pin_id=pin_id)
        self.try_lease(session, pool, [(wish, text)] * (2 if foul == "twice" else 1), fill=True)

    def text_of(self, pin: WorldPin) -> int:
        names = self.world.pools[pin.pool].names
        return next(text for (_, text, _), block in names.items() if block == pin.blocks[0])
