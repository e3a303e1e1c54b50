"""Calls that were carried out though their reply came too late, made again as the docstrings say."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.running_kvd import running_kvd

import kvd_client
from kvd.errors import DeadlineExceededError, LeaseSuspendedError, PinNotFoundError

SPEC = kvd_client.KVSpec(layers=2, kv_heads=2, head_dim=8, dtype="float32", block_size=16)
TOKENS = 200


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kvd_client.Client]:
    folder = tmp_path_factory.mktemp("kvd")
    with (
        running_kvd(folder, "--host-memory", "16MiB", "--host-tier", "8MiB") as kvd,
        kvd_client.connect(kvd.run_dir, timeout=60.0) as client,
    ):
        yield client


@pytest.fixture
def pool(client: kvd_client.Client) -> Iterator[kvd_client.Pool]:
    with client.pool("p", SPEC, 60) as pool:
        yield pool


@pytest.fixture
def lease(pool: kvd_client.Pool) -> kvd_client.Lease:
    lease = pool.lease(floor=64)
    filled(lease, TOKENS)
    return lease


def filled(lease: kvd_client.Lease, tokens: int) -> None:
    slots = lease.extend(tokens)
    rows = np.random.default_rng(1).standard_normal((tokens, 2, 8)).astype(np.float32)
    for layer in range(SPEC.layers):
        lease.write(layer, slots, rows, rows)
    lease.commit(tokens)


@contextmanager
def late(service: Any, method: str) -> Iterator[None]:
    """Its next reply comes too late; the daemon has carried the call out."""
    real, coming = getattr(service, method), ["the reply came too late"]

    def reply_too_late(request: Any, timeout: float) -> Any:
        answer = real(request, timeout=timeout)
        if coming:
            raise DeadlineExceededError(coming.pop())
        return answer

    setattr(service, method, reply_too_late)
    try:
        with pytest.raises(DeadlineExceededError, match="too late"):
            yield
    finally:
        setattr(service, method, real)


def test_a_restore_made_again_tells_what_it_dropped(lease: kvd_client.Lease) -> None:
    lease.compress(kvd_client.KeyDiff(keep=0.5), park=True)
    filled(lease, 7)
    with late(lease.pool.session.share_service, "Restore"):
        lease.restore()
    assert lease.restore() == 7
    assert lease.length == TOKENS


def test_a_compression_made_again_prunes_once(lease: kvd_client.Lease) -> None:
    queries = np.ones((2, 8, 4, 8), np.float32)
    compress: list[Callable[[], kvd_client.CompressionReport]] = [
        lambda: lease.compress(kvd_client.KeyDiff(keep=0.5)),
        lambda: lease.compress(kvd_client.SnapKV(window=8, keep=0.5), queries=queries),
    ]
    for made in compress:
        before = lease.length
        with late(lease.pool.session.lease_service, "Compress"):
            made()
        report = made()
        assert (report.tokens_before, report.tokens_kept) == (before, lease.length)
        assert before // 2 <= lease.length < before, "pruned twice, less than half would be left"


def test_another_compression_is_another_one(lease: kvd_client.Lease) -> None:
    with late(lease.pool.session.lease_service, "Compress"):
        lease.compress(kvd_client.KeyDiff(keep=0.5))
    report = lease.compress(kvd_client.KeyDiff(keep=0.8))
    assert TOKENS // 2 <= report.tokens_before < TOKENS
    assert report.tokens_kept < report.tokens_before


def test_a_suspend_and_a_resume_made_again_are_done(lease: kvd_client.Lease) -> None:
    with late(lease.pool.session.share_service, "Suspend"):
        lease.suspend()
    lease.suspend()
    with pytest.raises(LeaseSuspendedError):
        lease.check()
    with late(lease.pool.session.share_service, "Resume"):
        lease.resume()
    lease.resume()
    assert lease.gather(0, "numpy")[0].shape == (TOKENS, 2, 8)


def test_a_wake_made_again_tells_what_was_given(pool: kvd_client.Pool) -> None:
    lease = pool.lease(floor=64)
    filled(lease, 400)
    with late(pool.session.share_service, "Rest"):
        lease.rest()
    lease.rest()
    pool.lease(tokens=45 * 16, wait=30.0).release()
    with late(pool.session.share_service, "Wake"):
        lease.wake()
    assert lease.wake() == 400 - 64
    assert lease.length == 64
    assert lease.wake() == 0


def test_a_wake_of_what_does_not_rest_changes_nothing(lease: kvd_client.Lease) -> None:
    """Not even what the daemon has not heard of yet."""
    filled(lease, 20)
    assert lease.wake() == 0
    assert (lease.length, lease.position) == (TOKENS + 20, TOKENS + 20)


def test_a_publication_made_again_is_done(lease: kvd_client.Lease) -> None:
    with late(lease.pool.session.share_service, "Publish"):
        lease.publish("twice")
    lease.publish("twice")
    assert lease.pool.adopt("twice").length == TOKENS


@pytest.mark.parametrize("left", ["collected", "released"])
def test_what_is_left_of_a_late_publication_does_not_release_the_adopted_lease(
    pool: kvd_client.Pool, left: str
) -> None:
    old = pool.lease(tokens=TOKENS)
    filled(old, TOKENS)
    with late(pool.session.share_service, "Publish"):
        old.publish("late")
    adopted = pool.adopt("late")
    if left == "released":
        old.release()
    del old
    gc.collect()
    pool.lease(tokens=16).release()
    filled(adopted, 40)
    assert adopted.length == TOKENS + 40


def test_a_match_may_be_left_after_its_pool_or_client(tmp_path: Path) -> None:
    with running_kvd(tmp_path, "--host-memory", "16MiB") as kvd:
        client = kvd_client.connect(kvd.run_dir, timeout=60.0)
        pool = client.pool("p", SPEC, 60)
        lease = pool.lease()
        filled(lease, 16)
        lease.seal([bytes(32)])
        with pool.match([bytes(32)]) as match:
            assert len(match) == 1
            pool.close()
        with client.pool("p").match([bytes(32)]):
            client.close()


def test_a_prompt_whose_matches_end_waits_no_longer_than_it_said(
    pool: kvd_client.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def match_ended(wishes: object, wait: float) -> list[kvd_client.Lease]:
        waits.append(wait)
        time.sleep(0.02)
        raise PinNotFoundError("its time was over")

    monkeypatch.setattr(pool, "lease_many", match_ended)
    with pytest.raises(PinNotFoundError):
        pool.lease(prompt=list(range(100)), wait=0.03)
    assert waits == sorted(waits, reverse=True)
    assert (waits[0] <= 0.03, waits[-1]) == (True, 0.0)
