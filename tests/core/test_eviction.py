"""Which cached block goes next: each order against a model in plain lists; what an operator may choose."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd_daemon import settings as operator
from kvd_daemon.core import Limits, ages
from kvd_daemon.core.eviction import DEFAULT_EVICTION, ORDERS, restored
from kvd_daemon.core.names import Names, Node
from kvd_daemon.core.prefix import ROOT, PrefixIndex

from .desk import Desk
from .restart_rules import twin
from .snapshot import state_of

TOTAL, DEPTH, TEXTS = 24, 5, 6  # blocks; blocks of a text; texts


def name(text: int, depth: int) -> bytes:
    return bytes([text + 1, depth + 1]) * 16


class ModelledIndex:
    """An index as a pool uses it, and beside it what it should do, in lists that anybody can check."""

    def __init__(self, order: str) -> None:
        self.index = PrefixIndex(ORDERS[order](TOTAL))
        self.order = order
        self.free = list(range(1, TOTAL))
        self.cached: list[tuple[int, int]] = []  # (text, depth), the longest unused first
        self.again: set[tuple[int, int]] = set()

    def block(self, place: tuple[int, int]) -> int | None:
        return self.index.find(1, name(*place))

    def read(self, text: int, blocks: int) -> None:
        """Lease what is here of the text, seal the rest, release."""
        places = [(text, depth) for depth in range(blocks)]
        here = [block for place in places if (block := self.block(place)) is not None]
        self.index.uncache(here)
        self.index.used(np.array(here, np.int32))
        self.cached = [place for place in self.cached if place not in places]
        self.again |= set(places[: len(here)])
        missing = len(places) - len(here) - len(self.free)
        if missing > 0:
            self.evict(missing)
        table = here + [self.free.pop(0) for _ in places[len(here) :]]
        for depth in range(len(here), blocks):
            parent = name(text, depth - 1) if depth else ROOT
            self.index.add(table[depth], Node(1, name(text, depth), parent))
            if self.order == "2q" and self.is_remembered((text, depth)):
                self.again.add((text, depth))
        for depth in range(blocks - 1, 0, -1):  # what comes before a block used more than once was, too
            if (text, depth) in self.again:
                self.again.add((text, depth - 1))
        self.index.cache(table)
        self.cached += [(text, depth) for depth in reversed(range(blocks))]

    def is_remembered(self, place: tuple[int, int]) -> bool:
        """Asked of the order itself: which names share a slot of its table is no part of the model."""
        return bool(self.index.order.image().again.tolist().count(self.block(place)))

    def evict(self, count: int) -> None:
        expected = []
        for _ in range(count):
            once = [place for place in self.cached if place not in self.again]
            many_once = self.order == "2q" and len(once) > len(self.cached) - len(once)
            due = once[0] if many_once else self.cached[0]
            self.cached.remove(due)
            self.again.discard(due)
            expected.append(self.block(due))
        assert self.index.cached()[:count] == expected
        assert self.index.evict(count) == expected
        self.free += expected


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, TEXTS - 1), st.integers(1, DEPTH)), max_size=40))
def test_an_order_evicts_what_its_model_evicts(order: str, steps: list[tuple[int, int]]) -> None:
    modelled = ModelledIndex(order)
    for text, blocks in steps:
        longest = max([depth + 1 for place, depth in modelled.cached if place == text], default=0)
        modelled.read(text, max(blocks, longest))
    modelled.evict(len(modelled.cached))
    assert modelled.index.cached() == []


@pytest.mark.parametrize("order", ORDERS)
def test_an_image_of_an_order_goes_on_as_the_order_does(order: str) -> None:
    first, second = ModelledIndex(order), ModelledIndex(order)
    for text in (0, 1, 0, 2, 3, 4, 5, 1):
        first.read(text, DEPTH)
        second.read(text, DEPTH)
    image = second.index.order.image().plain()
    nodes = dict(second.index.nodes())
    second.index = PrefixIndex(restored(order, TOTAL, image), Names.of(TOTAL, nodes))
    for text in (3, 3, 2, 0, 5, 4, 1, 0, 2):
        first.read(text, DEPTH)
        second.read(text, DEPTH)
        assert second.index.cached() == first.index.cached()


def long_prompt(desk: Desk, text: int, blocks: int) -> None:
    lease = desk.prefill(16 * blocks)
    desk.seal(lease, desk.names(blocks, text))
    desk.device.release("ann", [lease.lease_id])


@pytest.mark.parametrize(("order", "kept"), [("2q", 4), ("lru", 0)])
def test_a_long_prompt_read_once_drives_out_a_conversation_only_under_lru(order: str, kept: int) -> None:
    desk = Desk(blocks=16, limits=Limits(eviction=order))
    long_prompt(desk, 0, 4)
    desk.device.release("ann", [desk.lease(64, prefix_hashes=desk.names(4, 0)).lease_id])
    for text in range(1, 5):
        long_prompt(desk, text, 8)
    assert desk.device.leading("ann", "pool", desk.names(4, 0)) == kept
    desk.device.check()


def test_what_was_evicted_and_comes_back_counts_as_used_before() -> None:
    desk = Desk(blocks=16)
    for text in (0, 1, 0, 2):
        long_prompt(desk, text, 14)
    assert desk.device.leading("ann", "pool", desk.names(14, 0)) > desk.device.leading(
        "ann", "pool", desk.names(14, 1)
    )
    desk.device.check()


def test_another_order_takes_over_what_is_cached_and_its_device_is_restored_alike() -> None:
    desk = Desk(blocks=16)
    for text in (0, 1):
        long_prompt(desk, text, 6)
    desk.device.configure(1 << 40, replace(desk.device.limits, eviction="lru"))
    assert desk.pool.prefixes.order.name == "lru"
    assert desk.device.leading("ann", "pool", desk.names(6, 0)) == 6
    assert state_of(twin(desk.device)) == state_of(desk.device)
    desk.lease(16 * 6)
    assert desk.device.leading("ann", "pool", desk.names(6, 0)) == 4
    desk.device.check()


def test_ages_go_on_when_their_count_is_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ages, "MAX_STAMP", 20)
    desk = Desk(blocks=8)
    for text in range(12):
        long_prompt(desk, text, 3)
        desk.device.check()
    assert desk.device.leading("ann", "pool", desk.names(3, 11)) == 3


def test_an_operator_may_choose_every_order_there_is() -> None:
    assert set(operator.EVICTIONS) == set(ORDERS)
    assert operator.EVICTIONS[0] == DEFAULT_EVICTION == Limits().eviction
