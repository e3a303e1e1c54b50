"""A call ends by its own deadline, whatever it has to do first."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.running_kvd import PATIENCE_S, eventually

import kvd_client
from kvd_client import DeadlineExceededError, Lease, SnapKV

from .daemon import Daemon

SOON = 0.2  # seconds
NEVER = 1e6  # seconds; the client's own deadline, by which a call that forgets its own is not back


@pytest.fixture
def lease(daemon: Daemon, new_pool, spec) -> Iterator[Lease]:
    """Sixty tokens long, of a client that is very patient."""
    name = new_pool(spec).name
    with kvd_client.connect(daemon.run_dir, timeout=NEVER) as client:
        made = client.pool(name).lease(tokens=60)
        made.extend(60)
        made.commit(60)
        yield made


def compress(lease: Lease, queries: bool = True) -> None:
    spec = lease.pool.spec
    window = np.ones((spec.layers, 4, spec.kv_heads, spec.head_dim_k), np.float32) if queries else None
    policy = SnapKV(window=4, keep=0.5) if queries else kvd_client.Streaming(sinks=4, window=12)
    lease.compress(policy, window, timeout=SOON)


def observe(lease: Lease) -> None:
    spec = lease.pool.spec
    lease.observe(np.ones((spec.layers, 4, spec.kv_heads, spec.head_dim_k), np.float32), timeout=SOON)


CALLS: dict[str, Callable[[Lease], object]] = {
    "compress": lambda lease: compress(lease, queries=False),
    "compress with queries": compress,
    "observe": observe,
    "suspend": lambda lease: lease.suspend(timeout=SOON),
    "resume": lambda lease: lease.resume(timeout=SOON),
    "resume that waits": lambda lease: lease.resume(wait=SOON, timeout=SOON),
    "restore": lambda lease: lease.restore(timeout=SOON),
    "wake": lambda lease: lease.wake(timeout=SOON),
}


def ends_in_time(threads: ThreadPoolExecutor, call: Callable[[Lease], object], lease: Lease) -> None:
    with pytest.raises(DeadlineExceededError):
        threads.submit(call, lease).result(PATIENCE_S)


@pytest.mark.parametrize("again", CALLS)
def test_a_call_that_repeats_one_that_broke_off_ends_by_its_own_deadline(
    daemon: Daemon, lease: Lease, again: str
) -> None:
    with ThreadPoolExecutor(1) as threads, daemon.frozen():
        ends_in_time(threads, CALLS["compress"], lease)
        ends_in_time(threads, CALLS[again], lease)


@pytest.mark.parametrize("call", ["compress with queries", "observe"])
def test_a_call_ends_by_its_own_deadline_though_its_queries_find_no_place(
    daemon: Daemon, lease: Lease, call: str
) -> None:
    with ThreadPoolExecutor(1) as threads, daemon.frozen():
        for _ in range(2):  # the second one gives back first what the first may have taken
            ends_in_time(threads, CALLS[call], lease)


def is_locked(lease: Lease) -> bool:
    if not lease.handle.lock.acquire(blocking=False):
        return True
    lease.handle.lock.release()
    return False


def test_a_call_ends_by_its_own_deadline_while_another_thread_makes_one(daemon: Daemon, lease: Lease) -> None:
    with ThreadPoolExecutor(2) as threads:
        with daemon.frozen():
            patient = threads.submit(lease.seal, [b"h" * 32])
            eventually(lambda: is_locked(lease), "the other thread's call")
            ends_in_time(threads, CALLS["suspend"], lease)
            assert not patient.done()
        patient.result(PATIENCE_S)
