"""The awaited client forgets no call that the synchronous one has."""

import asyncio
import gc
import inspect

import pytest
from tests.running_kvd import PATIENCE_S, eventually

import kvd_client
from kvd_client import Client, Lease, LeaseWish, Match, Pool, aio

from .test_prefix import sealed

LOCAL = {
    Client: set[str](),
    Pool: {
        *("check", "check_writable", "layer", "write", "gather"),
        *("adopt_state", "lose", "lose_memory", "scratch", "settle"),  # of the client itself
    },
    Lease: {
        *("slot_mapping", "visible_slots", "kept_positions", "gather", "readable", "write", "commit"),
        "check",  # asks only about a lease that has ended or moved, when all that is left is an error
    },
    Match: {"name_in", "taken"},
}
"""What does not wait for the daemon."""


def calls(of: type) -> dict[str, str]:
    """Public methods and what they say of themselves."""
    methods = inspect.getmembers(of, inspect.isfunction)
    return {name: inspect.getdoc(method) or "" for name, method in methods if not name.startswith("_")}


@pytest.mark.parametrize("of", LOCAL, ids=lambda of: of.__name__)
def test_every_call_is_either_awaited_or_local(of: type) -> None:
    awaited = aio.AWAITED[of]
    assert awaited | LOCAL[of] == set(calls(of))
    assert not awaited & LOCAL[of]


@pytest.mark.parametrize("of", LOCAL, ids=lambda of: of.__name__)
def test_what_says_that_it_asks_the_daemon_is_awaited_and_the_other_way_round(of: type) -> None:
    told = {name: " ".join(text.lower().split()) for name, text in calls(of).items()}
    says_so = {name for name in told if "asks the daemon" in told[name]}
    assert says_so == aio.AWAITED[of] - {"wait_for"}  # which waits for a GPU


def test_a_lease_is_parked_and_brought_back_in_coroutines(new_pool, spec) -> None:
    async def story() -> None:
        async with await aio.Async(new_pool(spec)).lease(16) as lease:
            await lease.suspend()  # it has no bytes yet, so that this needs no host tier
            await lease.resume()
            with pytest.raises(kvd_client.InvalidArgumentError, match="no checkpoint"):
                await lease.restore()

    asyncio.run(story())


def test_a_wish_takes_an_awaited_match(new_pool, spec) -> None:
    pool = new_pool(spec)
    hashes = sealed(pool, list(range(90)))

    async def story() -> None:
        pool_ = aio.Async(pool)
        async with await pool_.match(hashes) as match:
            (lease,) = await pool_.lease_many([LeaseWish(90, prefix=match)])
            assert lease.prefix_tokens == 16 * len(match.sync) > 0
            await lease.release()

    asyncio.run(story())


@pytest.mark.parametrize("when", ["before it was published", "after it was adopted"])
def test_a_lease_that_a_cancelled_adopt_takes_is_had_by_the_next_one(
    daemon, client, new_pool, spec, when
) -> None:
    pool = new_pool(spec)
    giver = pool.lease(tokens=20)
    lease_id = giver.lease_id

    def is_taken() -> bool:
        return daemon.lease_info(lease_id).state == "active"

    async def story() -> None:
        pool_ = aio.Async(pool)
        adopting = asyncio.create_task(pool_.adopt("key", wait=PATIENCE_S))
        await asyncio.to_thread(eventually, lambda: daemon.pool_status(pool.name).leases, "the lease")
        if when.startswith("before"):
            await asyncio.sleep(0)
            adopting.cancel()
        giver.publish("key")
        eventually(is_taken, "the adoption")  # holds up the loop, so that the answer is not taken
        adopting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adopting
        gc.collect()
        lease = await pool_.adopt("key", wait=PATIENCE_S)
        assert lease.lease_id == lease_id
        client.pool(pool.name).lease(tokens=1).release()  # with which all that nobody holds is released
        assert (await lease.extend(20)).size == 20

    asyncio.run(story())
