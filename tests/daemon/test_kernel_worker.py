"""The kernel worker: what it does to bytes, and what its death does to leases."""

import asyncio
import mmap
import os
import signal
from pathlib import Path

import grpc
import numpy as np
import pytest
from tests.running_kvd import RunningKvd, eventually, is_alive

from kvd.errors import KernelWorkerUnavailableError, LeaseLostError
from kvd.policy import Dense, Streaming
from kvd.spec import KVSpec
from kvd.v1 import kvd_pb2 as pb
from kvd_daemon.core import LeaseWish, Progress
from kvd_daemon.engine.admission import Asker
from kvd_daemon.engine.compressions import Outcome
from kvd_daemon.engine.engine import Engine
from kvd_daemon.engine.kernel_jobs import Given
from kvd_daemon.engine.sessions import OpenSession

from .engine_room import DyingCommand, open_session, running_engine
from .raw_worker import RawWorker, at, block_ids, fresh_id, reason_of

STREAM = pb.Policy(streaming=pb.StreamingPolicy(sinks=4, window=28, rope="original"))
SNAPKV = pb.Policy(
    snapkv=pb.SnapKVPolicy(
        window=8, kernel=5, pooling="avg", keep=pb.Keep(ratio=pb.Ratio(numerator=1, denominator=4))
    )
)
H2O = pb.Policy(h2o=pb.H2OPolicy(sinks=4, recent=8, keep=pb.Keep(ratio=pb.Ratio(numerator=1, denominator=4))))
SPEC = KVSpec(layers=2, kv_heads=2, head_dim_k=8, head_dim_v=8, dtype="float32")


@pytest.fixture
def worker(shared_kvd: RunningKvd):
    """A session with a pool of 64 blocks, dropped at the end."""
    with RawWorker(shared_kvd.run_dir) as worker:
        worker.create_pool()
        yield worker
    with RawWorker(shared_kvd.run_dir) as sweeper:
        sweeper.drop_pool("pool")


def pool_floats(worker: RawWorker) -> np.ndarray:
    """The mapped pool as float32 [blocks, floats of a block]."""
    response, fds = worker.map_pool()
    mapped = mmap.mmap(fds[0], response.map.pool_bytes)
    for fd in fds:
        os.close(fd)
    return np.frombuffer(mapped, np.float32).reshape(-1, SPEC.block_bytes // 4)


def token_numbers(floats: np.ndarray, table: list[int]) -> np.ndarray:
    """First element of each token's first key, in slot order."""
    keys = floats[table][:, : 16 * 2 * 8].reshape(len(table) * 16, 2, 8)
    return keys[:, 0, 0]


def write_token_numbers(floats: np.ndarray, table: list[int]) -> None:
    """Every element of token t's keys and values is t."""
    numbers = np.arange(len(table) * 16, dtype=np.float32).reshape(len(table), 1, 16, 1)
    floats[table] = np.broadcast_to(numbers, (len(table), 4, 16, 16)).reshape(len(table), -1)


def scratch_queries(worker: RawWorker, tokens: int, pool: str = "pool") -> pb.Queries:
    [scratch] = worker.lease(tokens * 8, pool=pool, scratch=True)
    return pb.Queries(scratch_lease_id=scratch.lease_id, tokens=tokens, query_heads=4, dtype="float32")


def test_a_compression_moves_the_kept_tokens_and_frees_the_rest(worker: RawWorker) -> None:
    [lease] = worker.lease(160)
    floats = pool_floats(worker)
    write_token_numbers(floats, block_ids(lease))
    reply = worker.leases.Compress(worker.compress_request(lease, 160, STREAM))
    assert (reply.report.tokens_before, reply.report.tokens_kept) == (160, 32)
    assert (reply.report.blocks_before, reply.report.blocks_after) == (10, 2)
    assert (reply.lease.length, reply.lease.position, reply.lease.generation) == (32, 160, 2)
    kept = token_numbers(floats, block_ids(reply.lease))
    assert kept.tolist() == [0, 1, 2, 3, *range(132, 160)]
    assert worker.pool_status().blocks_leased == 2
    assert worker.pool_status().blocks_saved == 8


def test_queries_vote_and_the_retained_attention_is_told(worker: RawWorker) -> None:
    [lease] = worker.lease(160)
    request = worker.compress_request(lease, 160, SNAPKV)
    request.queries.CopyFrom(scratch_queries(worker, 8))
    report = worker.leases.Compress(request).report
    assert report.tokens_kept == 48
    assert len(report.mass_retained) == 2


def test_observed_attention_decides_what_h2o_keeps(worker: RawWorker) -> None:
    [lease] = worker.lease(160)
    observe = pb.ObserveRequest(
        session_token=worker.token,
        request_id=fresh_id(),
        progress=at(lease, 160),
        queries=scratch_queries(worker, 8),
    )
    assert worker.leases.Observe(observe).observed_length == 160
    assert worker.leases.Compress(worker.compress_request(lease, 160, H2O)).report.tokens_kept == 48


def test_what_the_kernels_refuse_leaves_the_lease_as_it_was(worker: RawWorker) -> None:
    [lease] = worker.lease(160)
    request = worker.compress_request(lease, 160, SNAPKV)
    request.queries.CopyFrom(scratch_queries(worker, 8))
    request.queries.tokens = 400
    with pytest.raises(grpc.RpcError) as refusal:
        worker.leases.Compress(request)
    assert reason_of(refusal.value) == "INVALID_ARGUMENT"
    assert worker.lease_info(lease).state == "active"
    assert worker.lease_info(lease).generation == 1


def test_a_kernel_worker_killed_with_a_job_costs_only_a_retry(
    shared_kvd: RunningKvd, worker: RawWorker
) -> None:
    [lease] = worker.lease(160)
    eventually(lambda: worker.status().health == "serving", "a kernel worker")
    floats = pool_floats(worker)
    write_token_numbers(floats, block_ids(lease))
    kernel_pid = shared_kvd.kernel_pid()
    os.kill(kernel_pid, signal.SIGSTOP)
    request = worker.compress_request(lease, 160, STREAM)
    running = worker.leases.Compress.future(request)
    eventually(lambda: worker.lease_info(lease).state == "compressing", "a running compression")
    os.kill(kernel_pid, signal.SIGKILL)
    with pytest.raises(grpc.RpcError) as failure:
        running.result(timeout=60)
    assert reason_of(failure.value) == "KERNEL_WORKER_UNAVAILABLE"
    assert worker.lease_info(lease).state == "active"
    assert worker.pool_status().blocks_leased == 10
    reply = worker.leases.Compress(request)
    assert token_numbers(floats, block_ids(reply.lease)).tolist() == [0, 1, 2, 3, *range(132, 160)]
    assert not is_alive(kernel_pid)


def test_a_busy_lease_is_refused_and_its_worker_may_die_meanwhile(
    shared_kvd: RunningKvd, worker: RawWorker
) -> None:
    eventually(lambda: worker.status().health == "serving", "a kernel worker")
    os.kill(shared_kvd.kernel_pid(), signal.SIGSTOP)
    leaver = RawWorker(shared_kvd.run_dir)
    [lease] = leaver.lease(160)
    running = leaver.leases.Compress.future(leaver.compress_request(lease, 160, STREAM))
    eventually(lambda: worker.lease_info(lease).state == "compressing", "a running compression")
    with pytest.raises(grpc.RpcError) as refusal:
        leaver.release(lease)
    assert reason_of(refusal.value) == "LEASE_BUSY"
    running.cancel()
    leaver.close()
    assert worker.pool_status().blocks_leased > 0
    os.kill(shared_kvd.kernel_pid(), signal.SIGCONT)
    eventually(lambda: worker.pool_status().blocks_leased == 0, "the leaver's blocks")


def test_a_dropped_pools_memory_is_let_go_by_the_daemon_and_the_same_kernel_worker(
    shared_kvd: RunningKvd, worker: RawWorker
) -> None:
    pids = (shared_kvd.daemon_pid(), shared_kvd.kernel_pid())
    worker.create_pool("passing")
    [lease] = worker.lease(160, pool="passing")
    request = worker.compress_request(lease, 160, SNAPKV)
    request.queries.CopyFrom(scratch_queries(worker, 8, "passing"))
    worker.leases.Compress(request)
    [pool] = [status.pool for status in worker.status().pools if status.pool.name == "passing"]
    worker.release(lease, pb.LeaseState(lease_id=request.queries.scratch_lease_id))
    assert all(pool.pool_id in Path(f"/proc/{pid}/maps").read_text() for pid in pids[1:])
    worker.drop_pool("passing")
    eventually(
        lambda: not any(pool.pool_id in Path(f"/proc/{pid}/maps").read_text() for pid in pids), "unmapping"
    )
    assert shared_kvd.kernel_pid() == pids[1]


def as_it_is(outcome: Outcome) -> Outcome:
    return outcome


def leased(engine: Engine, opened: OpenSession, tokens: int) -> Progress:
    """A new lease of pool "pool", filled with `tokens`."""
    [lease] = engine.leases.lease(opened, "pool", [LeaseWish(tokens, Dense())]).leases
    return Progress(lease.lease_id, lease.generation, tokens, tokens)


def test_a_kernel_worker_that_dies_in_place_loses_that_lease_and_no_other() -> None:
    async def story() -> None:
        async with running_engine(DyingCommand(1, None)) as engine:  # type: ignore[arg-type]
            engine.pools.create("pool", SPEC, 31)
            opened = open_session(engine, "tenant")
            doomed, other = leased(engine, opened, 20 * 16), leased(engine, opened, 10 * 16)
            policy = Streaming(sinks=4, window=28)
            with pytest.raises(LeaseLostError, match="prefill again"):
                await engine.compressions.compress(opened, doomed, policy, Given(), as_it_is)
            states = [engine.device.leases[p.lease_id].state for p in (doomed, other)]
            assert states == ["lost", "active"]
            engine.leases.release(opened, [doomed.lease_id])
            with pytest.raises(KernelWorkerUnavailableError, match="as it was"):
                await engine.compressions.compress(opened, other, policy, Given(), as_it_is)
            assert engine.device.leases[other.lease_id].state == "active"
            engine.device.check()
            opened.peer.close()

    asyncio.run(story())


def test_a_block_that_changes_tenant_is_zeroed_before_it_is_answered() -> None:
    async def story() -> None:
        async with running_engine() as engine:
            pool, _ = engine.pools.create("pool", SPEC, 31)
            one, two = open_session(engine, "one"), open_session(engine, "two")
            secret = leased(engine, one, 20 * 16)
            table = engine.device.leases[secret.lease_id].table.copy()
            memory = engine.pools.memory_of(pool)
            with mmap.mmap(memory.pool_fd, memory.pool_bytes) as mapped:
                blocks = np.frombuffer(mapped, np.uint8).reshape(32, -1)
                blocks[table] = 0xAB
                engine.leases.release(one, [secret.lease_id])
                granted = engine.leases.lease(two, "pool", [LeaseWish(25 * 16)])
                assert granted.scrub
                lease = granted.leases[0]
                assert lease.state == "compressing"
                await engine.leases.scrub(granted.leases, lambda: None)
                assert lease.state == "active"
                assert not blocks[lease.table].any()
                del blocks
            again = engine.leases.lease(two, "pool", [LeaseWish(16)])
            assert not again.scrub
            engine.device.check()
            one.peer.close()
            two.peer.close()

    asyncio.run(story())


def test_kernel_workers_that_die_over_a_copy_leave_the_block_shared() -> None:
    async def story() -> None:
        async with running_engine(DyingCommand(1, None)) as engine:  # type: ignore[arg-type]
            engine.pools.create("pool", SPEC, 31)
            opened = open_session(engine, "tenant")
            parent = leased(engine, opened, 20)
            forked = engine.handing.fork(opened, parent, 1)
            child = forked.children[0]
            before, asker = child.table.tolist(), Asker(opened.session_id, "tenant")
            progress = Progress(child.lease_id, child.generation, 20, 20)
            extended = engine.leases.extend(asker, [(progress, 1)])
            assert len(extended.copies) == 1
            with pytest.raises(KernelWorkerUnavailableError, match="zeroed or copied"):
                await engine.leases.scrub([child], lambda: None)
            assert (child.table.tolist(), child.state, child.sealed_blocks) == (before, "active", 2)
            engine.device.check()
            engine.leases.release(opened, [parent.lease_id])
            alone = engine.leases.extend(asker, [(progress, 1)])
            assert (list(alone.copies), child.table.tolist()) == ([], before)
            opened.peer.close()

    asyncio.run(story())
