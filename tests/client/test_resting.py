"""Leases that rest give blocks to others, and those that do not are asked to."""

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import torch
from tests.running_kvd import PATIENCE_S, RunningKvd, eventually

import kvd_client
import kvd_client.aio
from kvd_client import KVSpec, Lease, Pool

from .daemon import Daemon

BLOCKS = 30  # none of them is a reserve
LONG = 25 * 16  # tokens: most of the pool
FLOOR = 64  # tokens


@pytest.fixture
def pool(new_pool, spec: KVSpec) -> Pool:
    return new_pool(spec, BLOCKS)


def filled(pool: Pool, floor: int = FLOOR, tokens: int = LONG) -> Lease:
    """Every slot holds its position, in all layers and heads."""
    lease = pool.lease(tokens=tokens, floor=floor)
    lease.extend(tokens)
    values = torch.arange(tokens, dtype=torch.float32)[:, None, None].expand(tokens, 2, 16)
    for layer in range(pool.spec.layers):
        lease.write(layer, lease.slot_mapping(0, tokens), values, -values)
    lease.commit(tokens)
    return lease


def holds_its_positions(lease: Lease) -> None:
    positions = lease.kept_positions()
    for layer in range(lease.pool.spec.layers):
        k, v = lease.gather(layer, "numpy")
        assert (k == positions[layer].T[:, :, None]).all()
        assert (v == -k).all()


def test_others_get_what_a_resting_lease_can_give(pool: Pool, daemon: Daemon) -> None:
    lease = filled(pool)
    lease.rest()
    assert daemon.lease_info(lease.lease_id).state == "resting"
    with pool.lease(tokens=16 * 16, wait=30) as other:
        assert other.block_table.size == 16
        assert lease.wake() == LONG - FLOOR
    assert (lease.length, lease.position) == (FLOOR, LONG)
    holds_its_positions(lease)
    told = daemon.lease_info(lease.lease_id)
    assert (told.state, told.gave_blocks, told.floor_tokens) == ("active", 21, FLOOR)
    lease.extend(1)
    lease.commit(1)
    assert lease.position == LONG + 1


def test_a_call_that_does_not_wait_prunes_nothing(pool: Pool) -> None:
    lease = filled(pool)
    lease.rest()
    with pytest.raises(kvd_client.PoolExhaustedError):
        pool.lease(tokens=16 * 16)
    assert lease.wake() == 0


def test_a_sealed_prompt_gives_what_it_can_once_others_have_made_room(pool: Pool) -> None:
    prompt = list(range(22 * 16))
    sealed, plain = pool.lease(prompt=prompt, floor=FLOOR), filled(pool, tokens=8 * 16)
    sealed.extend(len(prompt))
    sealed.commit(len(prompt))
    sealed.seal_prompt()
    sealed.rest()
    plain.rest()
    with pool.lease(tokens=20 * 16, wait=30):
        assert plain.wake() == 8 * 16 - FLOOR
        assert sealed.wake() == len(prompt) - FLOOR


def test_a_worker_is_told_of_a_revocation_while_its_lease_is_being_pruned(
    client: kvd_client.Client, pool: Pool, daemon: Daemon, shared_kvd: RunningKvd
) -> None:
    lease = filled(pool)
    lease.rest()
    eventually(lambda: daemon.status().health == "serving", "a kernel worker")
    worker = psutil.Process(shared_kvd.kernel_pid())
    worker.suspend()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(lambda: pool.lease(tokens=16 * 16, wait=60).release())
        eventually(lambda: daemon.lease_info(lease.lease_id).state == "compressing", "pruning")
        daemon.revoke(lease.lease_id, "by the test")
        with contextlib.suppress(psutil.NoSuchProcess):  # stopped for too long
            worker.resume()
        told = kvd_client.LeaseRevoked(lease.lease_id, "by the test")
        eventually(lambda: told in client.events.drain(), "the word of it")
        lease.release()
        waiting.result(PATIENCE_S)


def test_a_lease_that_nobody_presses_wakes_as_it_was(pool: Pool) -> None:
    lease = filled(pool)
    table, generation = lease.block_table.tolist(), lease.generation
    lease.rest()
    with pool.lease(tokens=32):  # there is room
        assert lease.wake() == 0
    assert (lease.block_table.tolist(), lease.generation, lease.length) == (table, generation, LONG)
    assert lease.wake() == 0
    holds_its_positions(lease)


def test_a_resting_lease_is_used_by_nobody(pool: Pool) -> None:
    lease = filled(pool)
    lease.rest()
    for use in (
        lambda: lease.block_table,
        lambda: lease.extend(1),
        lambda: lease.commit(1),
        lambda: lease.gather(0),
        lambda: lease.slot_mapping(0, 1),
        lease.rest,
        lease.check,
        lease.trim,
        lambda: lease.publish("key"),
    ):
        with pytest.raises(kvd_client.LeaseRestingError, match="wake"):
            use()
    lease.wake()
    lease.extend(1)


def test_a_resting_lease_without_a_floor_gives_nothing(pool: Pool) -> None:
    lease = filled(pool, floor=0)
    lease.rest()
    with pytest.raises(kvd_client.PoolExhaustedError):
        pool.lease(tokens=16 * 16, wait=2)
    assert lease.wake() == 0
    lease.rest(floor=FLOOR)
    pool.lease(tokens=16 * 16, wait=30).release()
    assert lease.wake() == LONG - FLOOR


def test_a_resting_lease_can_be_released(pool: Pool) -> None:
    lease = filled(pool)
    lease.rest()
    lease.release()
    pool.lease(tokens=BLOCKS * 16).release()


@pytest.mark.parametrize("floor", [-1, 1.5, "64", True])
def test_a_floor_is_a_number_of_tokens(pool: Pool, floor: object) -> None:
    with pytest.raises(kvd_client.InvalidArgumentError, match="floor"):
        pool.lease(tokens=1, floor=floor)
    lease = filled(pool)
    with pytest.raises(kvd_client.InvalidArgumentError, match="floor"):
        lease.rest(floor=floor)
    holds_its_positions(lease)


def test_the_worker_of_a_busy_lease_is_asked(client: kvd_client.Client, pool: Pool) -> None:
    lease, other = filled(pool), filled(pool, floor=0, tokens=16)
    assert lease.compress_wanted is None
    waiting = threading.Thread(target=lambda: pool.lease(tokens=16 * 16, wait=60).release())
    waiting.start()
    eventually(lambda: lease.compress_wanted == FLOOR, "the wish")
    assert other.compress_wanted is None
    lease.compress(kvd_client.Streaming(sinks=4, window=lease.compress_wanted - 4))
    waiting.join()
    assert lease.compress_wanted is None
    pressure = [event for event in client.events.drain() if isinstance(event, kvd_client.Pressure)]
    asked = {event.compressible for event in pressure}  # also before the daemon has heard of its length
    assert asked == {(lease.lease_id,)}


def test_rest_and_wake_are_awaitable(pool: Pool) -> None:
    lease = filled(pool)

    async def story() -> int:
        turn = kvd_client.aio.Async(lease)
        await turn.rest()
        return await turn.wake()

    assert asyncio.run(story()) == 0
    assert np.asarray(lease.block_table).size == 25


@pytest.mark.parametrize("floor", [48, 33, 1])
def test_a_wish_is_met_from_sinks_and_window_on_and_refused_below_in_so_many_words(
    pool: Pool, floor: int
) -> None:
    lease = filled(pool, floor)
    lease.handle.wanted_floor = floor  # as an event says
    assert lease.compress_wanted == floor
    policy = kvd_client.Dual(sinks=4, window=28, keep=kvd_client.Keep(tokens=lease.compress_wanted))
    queries = np.zeros((pool.spec.layers, 28, 2, 16), np.float32)
    if floor < policy.sinks + policy.window:
        with pytest.raises(kvd_client.InvalidArgumentError, match=r"sinks|window"):
            lease.compress(policy, queries=queries)
        assert lease.length == LONG
    else:
        assert lease.compress(policy, queries=queries).tokens_kept == lease.length == 48
