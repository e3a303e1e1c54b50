"""Many threads, asyncio, and any order of calls."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.running_kvd import PATIENCE_S

import kvd_client
import kvd_client.aio
from kvd.v1 import kvd_pb2 as pb
from kvd_client import Streaming
from kvd_client._handle import LeaseHandle
from kvd_client._state import SlotState

from .daemon import Daemon


def test_threads_with_leases_of_their_own_never_share_a_block(daemon: Daemon, new_pool, spec) -> None:
    pool = new_pool(spec, 400)
    barrier = threading.Barrier(8)

    def work(number: int) -> None:
        with pool.lease() as lease:
            barrier.wait(PATIENCE_S)
            for step in range(40):
                slots = lease.extend(5)
                rows = torch.full((5, 2, 16), float(1000 * number + step))
                pool.write(0, slots, rows, rows)
                lease.commit(5)
                if step % 13 == 12:
                    lease.trim()
            k, _ = lease.gather(0, "numpy")
            assert k[:, 0, 0].tolist() == [1000.0 * number + step for step in range(40) for _ in range(5)]

    with ThreadPoolExecutor(8) as workers:
        list(workers.map(work, range(8)))
    assert daemon.pool_status(pool.name).blocks_free == 400


def test_threads_that_share_a_lease_get_slots_one_after_the_other(new_pool, spec) -> None:
    with new_pool(spec).lease() as lease, ThreadPoolExecutor(4) as workers:
        list(workers.map(lambda _: lease.extend(100), range(20)))
        assert lease.extend(100).tolist() == lease.slot_mapping(0, 100).tolist()


def test_groups_of_leases_that_overlap_do_not_wait_in_a_circle(new_pool, spec) -> None:
    pool = new_pool(spec, 200)
    a, b, c = pool.lease_many([kvd_client.LeaseWish(lease_ahead=0)] * 3)
    groups = [[a, b], [b, a], [b, c], [c, a]] * 10
    with ThreadPoolExecutor(4) as workers:
        list(workers.map(lambda group: pool.extend_many(group, [16, 32]), groups))
    pool.release_many([a, b, c])


class Between(LeaseHandle):
    """Of a lease that loses its blocks in another thread after every look at it."""

    looks = 0

    @property
    def state(self) -> SlotState:
        self.looks += 1
        full: SlotState = self.__dict__["state"]
        return full if self.looks == 1 else replace(full, table=full.table[:0])


@pytest.mark.parametrize(
    "look", [lambda lease: lease.slot_mapping(0, 40), lambda lease: lease.visible_slots()], ids=["map", "see"]
)
def test_who_looks_at_slots_sees_one_state_of_them(new_pool, spec, look) -> None:
    with new_pool(spec).lease(tokens=48) as lease:
        lease.commit(48)
        before = look(lease)
        lease.handle.__class__ = Between
        assert look(lease).tolist() == before.tolist()


def test_a_match_that_is_released_meanwhile_is_not_a_lease_without_it(new_pool, spec) -> None:
    class Leaving(kvd_client.Match):
        looks = 0

        @property
        def pin_id(self) -> int:
            self.looks += 1
            return 0 if self.looks > 1 else 7

        @pin_id.setter
        def pin_id(self, value: int) -> None: ...

    item = pb.LeaseItem()
    Leaving(new_pool(spec), [b"h" * 32], 7).name_in(item)
    assert item.pin_id == 7


def test_asyncio_awaits_the_same_calls(daemon: Daemon, new_pool, spec) -> None:
    name = new_pool(spec).name

    async def work() -> list[int]:
        async with await kvd_client.aio.connect(daemon.run_dir, timeout=PATIENCE_S) as client:
            pool = await client.pool(name)
            leases = await pool.lease_many([kvd_client.LeaseWish(32), kvd_client.LeaseWish(16)])
            slots = await pool.extend_many(leases, [32, 16])
            async with leases[0] as lease:
                lease.commit(32)
                report = await lease.compress(Streaming(sinks=4, window=12))
                assert report.tokens_kept == lease.length == 16
            return [each.size for each in slots]

    assert asyncio.run(work()) == [32, 16]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 70)),
        st.tuples(st.just("ask only"), st.integers(0, 70)),
        st.tuples(st.just("trim"), st.just(0)),
        st.tuples(st.just("compress"), st.integers(1, 60)),
    ),
    max_size=12,
)


@given(steps=STEPS, lease_ahead=st.integers(0, 3))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_after_any_order_of_calls_every_slot_holds_the_token_that_its_position_says(
    any_order_pool, steps, lease_ahead
) -> None:
    expected: list[int] = []
    with any_order_pool.lease(lease_ahead=lease_ahead) as lease:
        for call, amount in steps:
            if call == "append":
                expected += range(lease.position, lease.position + amount)
                _append(lease, amount)
            elif call == "ask only":
                lease.extend(amount)
            elif call == "trim":
                lease.trim()
            else:
                lease.compress(Streaming(sinks=4, window=amount))
                if len(expected) > 4 + amount:
                    expected = expected[:4] + expected[-amount:]
            assert (lease.kept_positions() == expected).all()
            assert lease.gather(1, "numpy")[1][:, 0, 0].tolist() == expected
            assert lease.length == len(expected) <= lease.capacity


def _append(lease: kvd_client.Lease, count: int) -> None:
    rows = np.arange(lease.position, lease.position + count, dtype=np.float32)[:, None, None]
    rows = np.broadcast_to(rows, (count, 2, 16))
    lease.pool.write(1, lease.extend(count), rows, rows)
    lease.commit(count)
