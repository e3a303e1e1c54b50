"""Leases go from one session to another, by way of the shelf."""

from hypothesis.stateful import precondition, rule

from kvd import errors as e
from kvd_daemon.core import Offer
from kvd_daemon.core.limits import MAX_SHELF_TTL_NS

from .driver import TTL, Chance, Driver, Refusal, any_lease, any_session, anything
from .world import WorldLease
from .world_parts import WorldShelved

KEYS = ("one", "two", "three")


class HandRules(Driver):
    """publish for anybody of the tenant or for one session, adopt by whom it is for and by others."""

    @precondition(any_lease)
    @rule(chance=anything)
    def publish(self, chance: Chance) -> None:
        lease = self.a_lease(chance, busy=False, scratch=False)
        session, key = self.owner(lease, chance), chance.choice(KEYS)
        ttl = chance.choice([0, MAX_SHELF_TTL_NS + 1]) if chance.random() < 0.05 else chance.randint(1, TTL)
        receiver = self.a_session(chance) if chance.random() < 0.3 else ""
        offer = Offer(key if chance.random() < 0.97 else "", ttl, receiver)
        error = self.publish_refusal(session, lease, offer)
        progress = self.progress(lease)
        answer = self.ask(error, lambda: self.device.publish(session, progress, offer, self.world.now))
        if answer is None:
            return
        place = lease.tenant, lease.pool, key
        if place in self.world.shelf():
            self.world.forget(self.world.shelf()[place])
        self.world.learn(lease)
        lease.session, lease.fate, lease.generation = "", "shelved", lease.generation + 1
        lease.shelved = WorldShelved(key, receiver, self.world.now + ttl)

    def publish_refusal(self, session: str, lease: WorldLease, offer: Offer) -> Refusal:
        error = self.world.session_error(session)
        if error is None and (not offer.key or not 0 < offer.ttl_ns <= MAX_SHELF_TTL_NS):
            error = e.InvalidArgumentError
        error = error or self.refusal(session, lease)
        if error is None and lease.scratch:
            error = e.InvalidArgumentError
        if error is None and offer.to_session:
            receiver = self.world.sessions.get(offer.to_session)
            wrong = receiver is None or receiver.tenant != lease.tenant
            if wrong or self.world.session_error(offer.to_session) is not None:
                error = e.ReceiverNotFoundError
        there = self.world.shelf().get((lease.tenant, lease.pool, offer.key))
        if error is None and there is not None and there.shelved.expires > self.world.now:
            error = e.ShelfKeyTakenError
        return error

    @precondition(lambda self: any_session(self) and (self.world.shelf() or self.looks % 9 == 0))
    @rule(chance=anything)
    def adopt(self, chance: Chance) -> None:
        places = list(self.world.shelf().items())
        place, lease = chance.choice(places) if places else (("red", "a", "one"), None)
        mates = [name for name, each in self.world.sessions.items() if each.tenant == place[0]]
        meant = [lease.shelved.to_session] if lease is not None and lease.shelved.to_session else mates
        session = chance.choice(meant) if meant and chance.random() < 0.8 else self.a_session(chance)
        key = place[2] if chance.random() < 0.9 else chance.choice(KEYS)
        error = self.adopt_refusal(session, place[1], key)
        answer = self.ask(error, lambda: self.device.adopt(session, place[1], key, self.world.now))
        if answer is None:
            return
        lease = self.world.leases[answer.lease_id]
        tenant = self.world.sessions[session].tenant
        assert (lease.tenant, lease.pool, lease.shelved.key) == (tenant, place[1], key)
        lease.session, lease.fate, lease.shelved = session, "active", None
        lease.generation += 1

    def adopt_refusal(self, session: str, pool: str, key: str) -> Refusal:
        error = self.world.session_error(session)
        if error is None and pool not in self.world.pools:
            error = e.PoolNotFoundError
        if error is not None:
            return error
        lease = self.world.shelf().get((self.world.sessions[session].tenant, pool, key))
        if lease is None or lease.shelved.expires <= self.world.now:
            return e.OfferNotFoundError
        return None if lease.shelved.to_session in ("", session) else e.OfferNotFoundError

    @precondition(lambda self: self.world.shelf())
    @rule(chance=anything)
    def nobody_adopts(self, chance: Chance) -> None:
        ended = self.device.expire_shelf(self.world.now)
        due = [x for x in self.world.shelf().values() if x.shelved.expires <= self.world.now]
        assert {lease.lease_id for lease in ended.leases} == {lease.lease_id for lease in due}
        assert ended.block_count == sum(len(lease.table) for lease in due)
        for lease in due:
            self.world.forget(lease)
