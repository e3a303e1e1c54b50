"""Kernel workers that hang: seen, killed, replaced, and what they had in work is all that is lost."""

import asyncio
from pathlib import Path

import pytest
from tests.daemon.engine_room import open_session
from tests.running_kvd import is_alive

from kvd.errors import KernelWorkerUnavailableError, KvdError, LeaseLostError
from kvd.policy import Streaming
from kvd.spec import KVSpec
from kvd_daemon.core import LeaseWish
from kvd_daemon.engine.admission import Asker
from kvd_daemon.engine.compressions import Outcome
from kvd_daemon.engine.health import HealthState
from kvd_daemon.engine.kernel_jobs import Given
from kvd_daemon.kernel import budgets
from kvd_daemon.kernel import client as kernel_client

from .rooms import PATIENCE_S, Served, leased, served, wedging

SPEC = KVSpec(layers=2, kv_heads=2, head_dim_k=8, head_dim_v=8, dtype="float32")
POLICY = Streaming(sinks=4, window=28)
BLOCKS = 31
WAYS = ("stop", "spin", "block")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may take half a second here, so that tests do not take ten."""
    monkeypatch.setattr(budgets, "PATIENCE_S", 0.5)
    monkeypatch.setattr(kernel_client, "LATE_S", 0.3)
    monkeypatch.setattr(kernel_client, "PING_INTERVAL_S", 0.1)
    monkeypatch.setattr(kernel_client, "TICK_S", 0.1)


def as_it_is(outcome: Outcome) -> Outcome:
    return outcome


async def replaced(room: Served, pid: int) -> None:
    """Another worker serves in the place of `pid`, of which nothing is left."""
    await room.becomes(HealthState.SERVING)
    assert room.engine.kernel.pid not in (0, pid)
    assert room.engine.kernel.restarts == 1
    assert not is_alive(pid)


@pytest.mark.parametrize("how", WAYS)
def test_an_idle_worker_that_hangs_turns_health_red_and_is_replaced(how: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path, wedging(tmp_path, how, "Ping")) as room:
            await room.becomes(HealthState.SERVING)
            pid = room.engine.kernel.pid
            detail = await room.becomes(HealthState.FAILING)
            assert f"kernel worker {pid}" in detail
            assert "over a Ping" in detail
            await replaced(room, pid)

    asyncio.run(story())


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_worker_that_hangs_in_a_compression_costs_that_lease_at_most(
    how: str, in_place: bool, tmp_path: Path
) -> None:
    async def story() -> None:
        async with served(tmp_path, wedging(tmp_path, how, "Compress")) as room:
            engine = room.engine
            engine.pools.create("pool", SPEC, BLOCKS)
            opened = open_session(engine, "tenant")
            struck, other = leased(engine, opened, 20 * 16), leased(engine, opened, 5 * 16)
            if in_place:  # nothing is left to move to
                leased(engine, opened, 6 * 16)
            await room.becomes(HealthState.SERVING)
            pid = engine.kernel.pid
            before = engine.device.leases[struck.lease_id].table.tolist()
            compress = engine.compressions.compress
            running = asyncio.create_task(compress(opened, struck, POLICY, Given(), as_it_is))
            waiting = asyncio.create_task(compress(opened, other, POLICY, Given(), as_it_is))
            expected: type[KvdError] = LeaseLostError if in_place else KernelWorkerUnavailableError
            with pytest.raises(expected):
                await asyncio.wait_for(running, PATIENCE_S)
            lease = engine.device.leases[struck.lease_id]
            assert lease.state == ("lost" if in_place else "active")
            assert lease.table.tolist() == before
            done = await asyncio.wait_for(waiting, PATIENCE_S)  # by the next worker
            assert done.compressed is not None
            await replaced(room, pid)
            engine.device.check()
            opened.peer.close()

    asyncio.run(story())


def test_a_worker_that_hangs_while_it_populates_is_replaced_and_the_pool_gets_its_pages(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with served(tmp_path, wedging(tmp_path, "block", "Populate")) as room:
            pool, _ = room.engine.pools.create("pool", SPEC, BLOCKS)
            await room.becomes(HealthState.SERVING)
            pid = room.engine.kernel.pid
            await room.becomes(HealthState.FAILING)
            await replaced(room, pid)
            async with asyncio.timeout(PATIENCE_S):
                while room.engine.pools.populated_bytes(pool) < SPEC.pool_bytes(pool.blocks_total):
                    await asyncio.sleep(0.01)

    asyncio.run(story())


def test_a_worker_that_hangs_at_its_start_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_client, "START_S", 1.0)

    async def story() -> None:
        async with served(tmp_path, wedging(tmp_path, "block", "Start")) as room:
            detail = await room.becomes(HealthState.FAILING)
            assert "over its start" in detail
            await room.becomes(HealthState.SERVING)
            assert room.engine.kernel.restarts == 1

    asyncio.run(story())


def test_a_worker_that_cannot_die_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in a system call that nothing interrupts: no patience at all is left for the killed one here."""
    monkeypatch.setattr(kernel_client, "UNDEAD_PATIENCE_S", 0.0)

    async def story() -> None:
        async with served(tmp_path, wedging(tmp_path, "stop", "Ping")) as room:
            await room.becomes(HealthState.SERVING)
            pid = room.engine.kernel.pid
            await room.becomes(HealthState.FAILING)
            await replaced(room, pid)

    asyncio.run(story())


def test_a_scrub_that_hangs_is_done_by_the_next_worker(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path, wedging(tmp_path, "block", "Scrub")) as room:
            engine = room.engine
            engine.pools.create("pool", SPEC, BLOCKS)
            one, two = open_session(engine, "one"), open_session(engine, "two")
            passing = leased(engine, one, 20 * 16)
            engine.leases.release(one, [passing.lease_id])
            await room.becomes(HealthState.SERVING)
            granted = engine.leases.lease(Asker(two.session_id, "two"), "pool", [LeaseWish(25 * 16)])
            assert granted.scrub
            scrub = engine.leases.scrub(granted.leases, lambda: None)
            await asyncio.wait_for(scrub, PATIENCE_S)
            assert granted.leases[0].state == "active"
            for opened in (one, two):
                opened.peer.close()

    asyncio.run(story())


def test_a_daemon_that_makes_room_for_the_next_ends_the_job_in_work_and_begins_none(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path, wedging(tmp_path, "slow", "Compress")) as room:
            engine = room.engine
            engine.pools.create("pool", SPEC, BLOCKS)
            opened = open_session(engine, "tenant")
            in_work, waiting = leased(engine, opened, 12 * 16), leased(engine, opened, 12 * 16)
            await room.becomes(HealthState.SERVING)
            jobs = [
                asyncio.create_task(engine.compressions.compress(opened, lease, POLICY, Given(), as_it_is))
                for lease in (in_work, waiting)
            ]
            async with asyncio.timeout(PATIENCE_S):
                while not (tmp_path / "wedged").exists():  # the first compression has begun
                    await asyncio.sleep(0.01)
            await engine.kernel.rest(PATIENCE_S)
            assert (await jobs[0]).compressed is not None
            with pytest.raises(KernelWorkerUnavailableError):
                await jobs[1]
            with pytest.raises(KernelWorkerUnavailableError):
                await engine.compressions.compress(opened, waiting, POLICY, Given(), as_it_is)
            assert engine.device.leases[waiting.lease_id].state == "active"
            opened.peer.close()

    asyncio.run(story())


def test_a_long_job_whose_steps_end_is_no_wedge(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path, wedging(tmp_path, "slow", "Compress")) as room:
            engine = room.engine
            engine.pools.create("pool", SPEC, BLOCKS)
            opened = open_session(engine, "tenant")
            lease = leased(engine, opened, 20 * 16)
            await room.becomes(HealthState.SERVING)
            seen: list[HealthState] = []
            engine.health.listen(lambda: seen.append(engine.health.state))
            done = await engine.compressions.compress(opened, lease, POLICY, Given(), as_it_is)
            assert done.compressed is not None
            assert HealthState.FAILING not in seen
            assert engine.kernel.restarts == 0
            opened.peer.close()

    asyncio.run(story())
