"""What a daemon adopts of the one before it, and what it does not take for its own."""

import asyncio
import mmap
import os
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvd_daemon.core import SessionIdentity
from kvd_daemon.device.fence_memory import FenceMemory
from kvd_daemon.device.host import HostMemory
from kvd_daemon.processes import has_exited

from .engine_room import TTL_NS, running_engine

POOL_BYTES, SIDECAR_BYTES = 1 << 16, 1 << 14


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    made = HostMemory()
    yield made
    made.close()


def copies(memory: HostMemory, pool_id: str) -> tuple[int, int]:
    """As another process would have kept them."""
    pool = memory.memory_of(pool_id)
    return os.dup(pool.pool_fd), os.dup(pool.sidecar_fd)


def test_adopted_memory_has_the_bytes_of_before(memory: HostMemory) -> None:
    created = memory.create("p", POOL_BYTES, SIDECAR_BYTES)
    os.pwrite(created.pool_fd, b"what a worker wrote", 100)
    kept = copies(memory, "p")
    memory.close()
    assert memory.adopt("p", POOL_BYTES, SIDECAR_BYTES, kept)
    assert os.pread(memory.memory_of("p").pool_fd, 19, 100) == b"what a worker wrote"


def test_memory_of_another_size_or_kind_is_not_adopted(memory: HostMemory) -> None:
    memory.create("p", POOL_BYTES, SIDECAR_BYTES)
    pool_fd, sidecar_fd = copies(memory, "p")
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, POOL_BYTES)
    nothing = os.open(os.devnull, os.O_RDWR)
    assert not memory.adopt("q", 2 * POOL_BYTES, SIDECAR_BYTES, (pool_fd, sidecar_fd))
    for stranger in (unsealed, nothing):
        assert not memory.adopt("q", POOL_BYTES, SIDECAR_BYTES, (stranger, sidecar_fd))
        os.close(stranger)
    assert memory.adopt("q", POOL_BYTES, SIDECAR_BYTES, (pool_fd, sidecar_fd))


def test_fences_are_written_by_the_next_daemon_and_read_by_workers_of_before() -> None:
    first = FenceMemory.create(1024)
    worker = mmap.mmap(os.dup(first.readers_fd), first.byte_count, prot=mmap.PROT_READ)
    words = np.frombuffer(worker, np.uint64)
    first.words[7] = 5
    second = FenceMemory(os.dup(first.fd), 1024)
    first.close()
    assert words[7] == second.words[7] == 5
    second.words[8] = 6
    assert words[8] == 6
    second.lower_all()
    assert not words.any()
    second.close()


def test_a_process_has_exited_when_it_can_run_no_more() -> None:
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(read_fd, 1)
        os._exit(0)
    pidfd = os.pidfd_open(pid)
    assert not has_exited(pidfd)
    os.write(write_fd, b"x")
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)  # a zombie is enough
    assert has_exited(pidfd)
    os.waitpid(pid, 0)
    assert has_exited(pidfd)
    for fd in (pidfd, read_fd, write_fd):
        os.close(fd)


def test_a_session_whose_process_ends_while_it_is_adopted_is_over() -> None:
    """Where a pidfd says nothing (before Linux 6.9) the process is looked up, and may be gone by then."""
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)

    async def adopt() -> None:
        async with running_engine() as engine:
            identity = SessionIdentity("late", "red", pid, 0)
            session = engine.device.open_session(identity, TTL_NS, time.monotonic_ns())
            engine.sessions.adopt(session, os.eventfd(0))
            assert list(engine.sessions) == []
            assert engine.device.sessions == {}

    asyncio.run(adopt())
