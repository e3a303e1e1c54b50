"""Any order of events leaves the device as an independent model says, and its memory readable."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant

from .driver import Chance
from .fork_rules import ForkRules
from .hand_rules import HandRules
from .pin_rules import PinRules
from .quota_rules import QuotaRules
from .rest_rules import RestRules
from .restart_rules import RestartRules, twin
from .return_rules import ReturnRules
from .session_rules import SessionRules
from .snapshot import state_of
from .world import FREE, WorldLease

EXAMPLES = 200  # sequences of events, short ones: they shrink well
STEPS = 30  # events in each
IMAGE_EVERY = 3  # events between two images; they cost as much as all other comparisons

WALKS = 12  # long sequences
WALK_STEPS = 400  # events in each
PROMPT_WALKS = 4  # of those that are mostly about cached blocks
FULL_WALKS = 4  # of those in which compressions find no free blocks


class AnyOrderOfEvents(
    SessionRules, RestartRules, ReturnRules, RestRules, PinRules, HandRules, ForkRules, QuotaRules
):
    """All rules together; after each of them everything is compared."""

    looks = 0

    @invariant()
    def compare(self) -> None:
        self.the_books_add_up()
        self.an_image_makes_an_equal_device()
        self.the_device_is_as_the_model_says()
        self.every_block_is_in_one_state()
        self.every_token_is_where_it_should_be()
        self.positions_follow_from_length_and_position()
        self.no_lease_can_read_another_tenants_bytes()

    def the_books_add_up(self) -> None:
        self.device.check()

    def an_image_makes_an_equal_device(self) -> None:
        self.looks += 1
        if self.looks % IMAGE_EVERY == 0:
            assert state_of(twin(self.device)) == state_of(self.device)

    def the_device_is_as_the_model_says(self) -> None:
        assert set(self.device.pools) == set(self.world.pools)
        assert set(self.device.sessions) == set(self.world.sessions)
        assert set(self.device.leases) == set(self.world.leases)
        for name, session in self.world.sessions.items():
            assert self.device.sessions[name].state == session.state
        for lease in self.world.leases.values():
            self.check_lease(lease)
        for pin_id, pin in self.world.pins.items():
            found = self.device.pins[pin_id]
            assert (found.pool, found.blocks.tolist()) == (pin.pool, pin.blocks)
            assert (found.session_id, found.expires_ns) == (pin.session, pin.expires)
        assert set(self.device.pins) == set(self.world.pins)
        self.check_slots()
        shelf = {place: lease.lease_id for place, lease in self.device.shelf.items()}
        assert shelf == {place: lease.lease_id for place, lease in self.world.shelf().items()}

    def check_slots(self) -> None:
        """Nobody else took them: what is parked stays as it was until it is fetched."""
        used = [(tier, *each) for tier, arena in self.device.arenas.items() for each in arena.used()]
        assert {(tier, pool, slot) for tier, pool, slots in used for slot in slots} == set(self.world.slots)

    def check_lease(self, lease: WorldLease) -> None:
        found = self.device.leases[lease.lease_id]
        assert found.table.tolist() == lease.table
        assert found.state == lease.state
        assert found.session_id == lease.session
        assert (found.length, found.position) == lease.known
        assert found.generation == lease.generation
        assert found.sealed_blocks == lease.sealed
        assert (found.compressed_length, found.observed_length) == (lease.compressed, lease.observed)
        assert (found.floor, found.resting_floor) == (lease.floor, lease.resting_floor)
        assert found.gave_blocks == lease.gave
        shown = int(self.device.fences.words[found.fence_slot])
        if lease.state == "active":
            assert shown == lease.lease_id << 24 | lease.generation
        elif not lease.busy or lease.ending:
            assert shown == 0

    def every_block_is_in_one_state(self) -> None:
        for name, pool in self.world.pools.items():
            states = list(self.world.states(name).values())
            counts = self.device.pools[name].counts
            assert counts.null == 1
            assert sum(counts) == pool.blocks + 1
            for state in (FREE, "leased", "sealed", "cached", "quarantined"):
                assert getattr(counts, state) == states.count(state), state

    def every_token_is_where_it_should_be(self) -> None:
        for lease in self.world.leases.values():
            if lease.state not in ("active", "shelved", "resting"):
                continue
            pool = self.world.pool_of(lease)
            for slot, position in enumerate(lease.slots):
                token = pool.read(lease.table[slot // pool.block_size], slot % pool.block_size)
                assert token == (lease.tenant, lease.text_at(position), position)

    def positions_follow_from_length_and_position(self) -> None:
        for lease in self.world.leases.values():
            length, position = lease.known
            if lease.state in ("active", "shelved", "resting"):
                for slot in range(lease.compressed, length):
                    assert lease.slots[slot] == self.world.expected_position(lease, slot, length, position)

    def no_lease_can_read_another_tenants_bytes(self) -> None:
        for lease in self.world.leases.values():
            pool = self.world.pool_of(lease)
            if lease.state == "active":
                for block in lease.table:
                    assert {token[0] for token in pool.content.get(block, []) if token} <= {lease.tenant}


TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase
TestAnyOrderOfEvents.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


CALM = {
    "create_pool": 0.2,
    "drop_pool": 0.2,
    "another_daemon_takes_over": 0.2,
    "open": 0.4,
    "set_quotas": 0.1,
    "set_tiers": 0.1,
    "suspend": 2,
    "abort_suspend": 0.3,
    "resume": 3,
    "restore": 3,
    "drop_checkpoint": 0.5,
    "finish_move": 2,
    "spill": 6,
    "finish_spill": 3,
    "promote": 6,
    "finish_promotion": 2,
    "demote": 4,
    "recall": 4,
    "finish_copy_move": 3,
    "finish_fetch": 2,
    "abort_fetch": 0.5,
    "end_session": 0.2,
    "revoke": 0.2,
    "rehearse": 0.2,
    "time_passes": 0.4,
    "malformed": 0.4,
    "compress": 2,
    "press": 3,
    "crowd": 0.3,
}
"""How often a rule is taken compared to the others: sessions live long enough to fill the pool."""


PROMPTS = {
    "prefill": 3,
    "lease": 1,
    "seal": 8,
    "release": 8,
    "scrub": 4,
    "lease_with_prefix": 1,
    "spill": 8,
    "finish_spill": 8,
    "promote": 8,
    "finish_promotion": 8,
    "demote": 4,
    "recall": 8,
    "finish_copy_move": 8,
    "crowd": 1,
    "create_pool": 1,
    "open": 0.3,
}
"""Likewise, of others 0.1: prompts are computed, let go, evicted and found again."""


@pytest.mark.parametrize("seed", range(PROMPT_WALKS))
def test_a_long_walk_of_prompts_that_come_and_go(seed: int) -> None:
    walk(AnyOrderOfEvents(), Chance(seed), lambda name: PROMPTS.get(name, 0.1))


FULL = {
    "prefill": 3,
    "lease": 2,
    "compress": 6,
    "abort_job": 2,
    "finish_compress": 2,
    "open": 0.3,
    "create_pool": 0.3,
    "resume": 2,
    "finish_fetch": 2,
}
"""Likewise: bytes move in place, are lost there, and come back where they were parked before."""


@pytest.mark.parametrize("seed", range(FULL_WALKS))
def test_a_long_walk_of_compressions_in_a_full_pool(seed: int) -> None:
    walk(AnyOrderOfEvents(), Chance(seed), lambda name: FULL.get(name, 0.1))


@pytest.mark.parametrize("seed", range(WALKS))
def test_a_long_walk_leaves_the_books_right_and_the_memory_readable(seed: int) -> None:
    """Longer than what can be shrunk: pools run full, blocks change tenants, prefixes are evicted."""
    walk(AnyOrderOfEvents(), Chance(seed), lambda name: CALM.get(name, 1))


def walk(walker: AnyOrderOfEvents, chance: Chance, weight: Callable[[str], float]) -> None:
    walker.begin()
    rules = walker.rules
    for _ in range(WALK_STEPS):
        ready = [each for each in rules if all(holds(walker) for holds in each.preconditions)]
        chosen = chance.choices(ready, [weight(each.function.__name__) for each in ready])[0]
        chosen.function(walker, chance=Chance(chance.getrandbits(32)))
        walker.compare()
