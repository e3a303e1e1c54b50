"""Jobs that do not end as they should: without descriptors, or because nobody waits any more."""

import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from tests.running_kvd import PATIENCE_S

from kvd.errors import DeviceUnavailableError
from kvd.policy import Dense, Streaming
from kvd.spec import KVSpec
from kvd_daemon.core import LeaseWish, Progress, Tier
from kvd_daemon.engine.admission import Asker
from kvd_daemon.engine.engine import Engine
from kvd_daemon.engine.health import HealthState
from kvd_daemon.engine.kernel_jobs import Given, GivenQueries
from kvd_daemon.engine.sessions import OpenSession
from kvd_daemon.kernel.client import Priority
from kvd_daemon.kernel.messages import Ping

from .engine_room import open_session, running_engine

SPEC = KVSpec(layers=2, kv_heads=2, head_dim_k=8, head_dim_v=8, dtype="float32")
BLOCKS, TOKENS = 100, 20 * 16
Begin = Callable[[Engine, OpenSession, Progress], Coroutine[Any, Any, Any]]


def as_it_is(answer: Any) -> Any:
    return answer


def leased(engine: Engine, opened: OpenSession, tokens: int = TOKENS, scratch: bool = False) -> Progress:
    """A new lease of pool "pool", filled with `tokens`."""
    wish = LeaseWish(tokens, Dense(), scratch=scratch)
    [lease] = engine.device.lease(opened.session_id, "pool", [wish], 0).leases
    return Progress(lease.lease_id, lease.generation, tokens, tokens)


@contextlib.contextmanager
def no_descriptors_left() -> Iterator[None]:
    """For this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def until_kernel_serves(engine: Engine) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while engine.kernel.trouble is not None:
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def tiered_engine() -> "contextlib.AsyncIterator[tuple[Engine, OpenSession]]":
    """With a host tier, a pool, and a session."""
    async with running_engine() as engine:
        engine.parking.set_budgets(8 << 20, 0)
        engine.pools.create("pool", SPEC, BLOCKS)
        opened = open_session(engine, "tenant")
        await until_kernel_serves(engine)
        await engine.kernel.perform(Ping(), Priority.POPULATE)  # after all of the pool's memory
        yield engine, opened
        engine.device.check()
        opened.peer.close()


def test_without_descriptors_what_should_be_parked_stays_as_it_was() -> None:
    async def story() -> None:
        async with tiered_engine() as (engine, opened):
            await engine.parking.suspend(opened, leased(engine, opened), as_it_is)
            used = engine.device.arenas[Tier.HOST].used_bytes
            progress = leased(engine, opened)
            with no_descriptors_left(), pytest.raises(DeviceUnavailableError, match="Too many open files"):
                await engine.parking.suspend(opened, progress, as_it_is)
            assert engine.device.leases[progress.lease_id].state == "active"
            assert engine.device.arenas[Tier.HOST].used_bytes == used
            await engine.parking.suspend(opened, progress, as_it_is)

    asyncio.run(story())


async def compress(engine: Engine, opened: OpenSession, progress: Progress) -> None:
    policy = Streaming(sinks=4, window=28)
    await engine.compressions.compress(opened, progress, policy, Given(), as_it_is)


async def compress_with_checkpoint(engine: Engine, opened: OpenSession, progress: Progress) -> None:
    policy = Streaming(sinks=4, window=28)
    await engine.compressions.compress(opened, progress, policy, Given(park=True), as_it_is)


async def observe(engine: Engine, opened: OpenSession, progress: Progress) -> None:
    scratch = leased(engine, opened, 16 * 8, scratch=True)
    queries = GivenQueries(scratch.lease_id, 8, 4, "float32", has_row_lse=False)
    await engine.compressions.observe(opened, progress, queries, as_it_is)


async def suspend(engine: Engine, opened: OpenSession, progress: Progress) -> None:
    await engine.parking.suspend(opened, progress, as_it_is)


async def scrub(engine: Engine, opened: OpenSession, progress: Progress) -> None:
    forked = engine.handing.fork(opened, progress, 1)
    parent = Progress(progress.lease_id, forked.parent.generation, progress.length, progress.position)
    extended = engine.leases.extend(Asker(opened.session_id, "tenant"), [(parent, 1)])
    await engine.leases.scrub([change.lease for change in extended.leases], lambda: None)


JOBS: list[Begin] = [compress, compress_with_checkpoint, observe, suspend, scrub]


def test_a_job_that_nobody_waits_for_any_more_is_undone_when_the_worker_is_done_with_it() -> None:
    async def story() -> None:
        async with tiered_engine() as (engine, opened):
            for job in JOBS:
                await broken_off(engine, opened, job)
            await brought_back_in_vain(engine, opened)
            await never_begun(engine, opened)

    asyncio.run(story())


async def broken_off(engine: Engine, opened: OpenSession, job: Begin) -> None:
    progress = leased(engine, opened, TOKENS - 1)
    lease = engine.device.leases[progress.lease_id]
    async with cancelled_under_way(engine, job(engine, opened, progress)):
        assert lease.state == "compressing", job.__name__
    assert lease.state == "active", job.__name__
    mine = engine.device.sessions[opened.session_id].leases.values()
    engine.leases.release(opened, [each.lease_id for each in mine])
    assert engine.device.arenas[Tier.HOST].used_bytes == 0
    assert engine.device.pools["pool"].counts.leased == 0


async def brought_back_in_vain(engine: Engine, opened: OpenSession) -> None:
    progress = leased(engine, opened)
    suspended = await engine.parking.suspend(opened, progress, as_it_is)
    asker = Asker(opened.session_id, "tenant")
    plan = engine.parking.resume(asker, suspended.lease_id, suspended.generation)
    async with cancelled_under_way(engine, engine.parking.fetched(plan, as_it_is)):
        assert engine.device.pools["pool"].counts.leased == TOKENS // 16
    assert suspended.state == "suspended"
    assert engine.device.pools["pool"].counts.leased == 0


async def never_begun(engine: Engine, opened: OpenSession) -> None:
    progress, other = leased(engine, opened), leased(engine, opened)
    async with cancelled_under_way(engine, suspend(engine, opened, progress)):
        waiting = asyncio.create_task(suspend(engine, opened, other))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert engine.device.leases[other.lease_id].state == "active"
        assert engine.device.leases[progress.lease_id].state == "compressing"


@contextlib.asynccontextmanager
async def cancelled_under_way(
    engine: Engine, work: Coroutine[Any, Any, Any]
) -> "contextlib.AsyncIterator[None]":
    """Meanwhile the worker has the job still, though it was cancelled."""
    await engine.kernel.perform(Ping())  # what was in line before is done
    os.kill(engine.kernel.pid, signal.SIGSTOP)
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    task.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    yield
    os.kill(engine.kernel.pid, signal.SIGCONT)
    await asyncio.wait([task])
    assert task.cancelled()


def test_a_bug_in_background_work_is_logged_and_turns_health_red(caplog: pytest.LogCaptureFixture) -> None:
    async def bug() -> None:
        raise ZeroDivisionError("a bug")

    async def story() -> None:
        async with running_engine() as engine:
            await asyncio.wait([engine.spawn(bug())])
            assert engine.health.state is HealthState.FAILING
            assert "a bug" in engine.health.detail

    asyncio.run(story())
    assert "ZeroDivisionError" in caplog.text
