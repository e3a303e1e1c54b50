"""Pools and sessions come and go, time passes."""

from hypothesis.stateful import initialize, precondition, rule

from kvd import errors as e
from kvd.spec import KVSpec
from kvd_daemon.core import SessionIdentity

from .driver import MEMORY_BYTES, TTL, Chance, Driver, any_session, anything
from .world import WorldPool, WorldSession

SPECS = [KVSpec(1, 2, 8, 8, block_size=4), KVSpec(2, 1, 4, 4, block_size=2)]


class SessionRules(Driver):
    """create, drop; open, renew, detach, close, gone, expire."""

    @initialize()
    def begin(self) -> None:
        self.make_pool("a", 0, 40)
        for tenant in ("red", "blue"):
            self.open_for(tenant)

    @rule(chance=anything)
    def create_pool(self, chance: Chance) -> None:
        self.make_pool(chance.choice("abbb"), chance.randint(0, 1), chance.choice([0, 8, 40, 64]))

    def make_pool(self, name: str, spec: int, blocks: int) -> None:
        known, kind = self.device.pools.get(name), SPECS[spec]
        used = sum(pool.spec.block_bytes * pool.blocks_total for pool in self.device.pools.values())
        error = None
        if known is not None:
            error = e.PoolMismatchError if known.spec != kind else None
        elif blocks == 0:
            error = e.PoolNotFoundError
        elif kind.block_bytes * (blocks + 1) > MEMORY_BYTES - used:
            error = e.DeviceFullError
        answer = self.ask(error, lambda: self.device.create_pool(name, kind, blocks, f"id-{name}"))
        if answer and answer[1]:
            self.world.pools[name] = WorldPool(blocks, kind.block_size, kind.kv_heads)

    @rule(chance=anything)
    def drop_pool(self, chance: Chance) -> None:
        name = chance.choice("abbc")
        error = e.PoolNotFoundError if name not in self.world.pools else None
        with_pins = chance.random() < 0.5
        if self.world.in_use(name) or (self.world.hard_pinned(name) and not with_pins):
            error = e.PoolInUseError
        if self.ask(error, lambda: self.device.drop_pool(name, with_pins)):
            self.world.drop_pool(name)

    @precondition(lambda self: len(self.world.sessions) < 4)
    @rule(chance=anything)
    def open(self, chance: Chance) -> None:
        self.open_for(chance.choice(["red", "blue"]))

    def open_for(self, tenant: str) -> None:
        self.opened += 1
        name = f"s{self.opened}"
        self.device.open_session(SessionIdentity(name, tenant, 1, 1), TTL, self.world.now)
        self.world.sessions[name] = WorldSession(tenant, TTL, self.world.now + TTL)

    @precondition(any_session)
    @rule(chance=anything)
    def stand_still(self, chance: Chance) -> None:
        stood = chance.randint(0, TTL)
        self.world.now += stood
        self.device.excuse(stood)
        for session in self.world.sessions.values():
            if session.state != "expired":
                session.expires += stood
        for pin in self.world.pins.values():
            if pin.session:
                pin.expires += stood
        for lease in self.world.shelf().values():
            lease.shelved.expires += stood

    @precondition(any_session)
    @rule(chance=anything)
    def renew_or_detach(self, chance: Chance) -> None:
        name = self.a_session(chance)
        error = self.world.session_error(name)
        if chance.random() < 0.2:
            if self.ask(error, lambda: self.device.detach(name, self.world.now)):
                self.world.sessions[name].state = "detached"
            return
        told = [lease for lease in self.world.leases_of(name) if chance.random() < 0.5]
        words = [self.progress(lease) for lease in told]
        if self.ask(error, lambda: self.device.renew(name, words, self.world.now)):
            session = self.world.sessions[name]
            session.expires, session.state = self.world.now + TTL, "active"
            for lease in told:
                if lease.state == "active":
                    self.world.learn(lease)

    @precondition(any_session)
    @rule(chance=anything)
    def end_session(self, chance: Chance) -> None:
        name = self.a_session(chance)
        error = None if name in self.world.sessions else e.SessionNotFoundError
        call = chance.choice([self.device.session_gone, self.device.close_session])
        answer = self.ask(error, lambda: call(name))
        if answer:
            ended, deferred = self.world.end_session(name)
            assert {lease.lease_id for lease in answer.leases} == ended
            assert {lease.lease_id for lease in answer.deferred} == deferred

    @rule(chance=anything)
    def time_passes(self, chance: Chance) -> None:
        self.world.now += chance.randint(0, TTL // 4)
        if chance.random() < 0.7:
            expired = self.device.expire(self.world.now)
            assert {lease.lease_id for lease in expired} == self.world.expire()
        if chance.random() < 0.7:
            ended = self.device.expire_pins(self.world.now)
            assert {pin.pin_id for pin in ended} == self.world.expire_pins()
