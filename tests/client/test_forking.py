"""Parallel samples of one prompt: shared until they part, and every byte where it should be."""

import os
import signal

import numpy as np
import pytest
import torch
from tests.running_kvd import PATIENCE_S, RunningKvd, is_alive

import kvd_client

from .daemon import Daemon

LAYERS = 2


def fill(lease: kvd_client.Lease, values: list[float]) -> None:
    """A token for each value, whose keys are the value and whose values are its negative."""
    slots = lease.extend(len(values))
    rows = torch.tensor(values)[:, None, None].expand(-1, 2, 16)
    for layer in range(LAYERS):
        lease.write(layer, slots, rows, -rows)
    lease.commit(len(values))


def tokens_of(lease: kvd_client.Lease) -> list[float]:
    for layer in range(LAYERS):
        k, v = lease.gather(layer, "numpy")
        assert (k == -v).all()
        assert (k == k[:, :1, :1]).all()
    return [float(each) for each in k[:, 0, 0]]


def numbers(count: int, start: int = 0) -> list[float]:
    return [float(number) for number in range(start, start + count)]


@pytest.fixture(params=["block_outermost", "layer_outermost"])
def pool(request: pytest.FixtureRequest, new_pool) -> kvd_client.Pool:
    return new_pool(kvd_client.KVSpec(LAYERS, 2, 16, dtype="float32", layout=request.param))


def test_samples_of_a_prompt_share_it_and_part_where_they_write(daemon: Daemon, pool) -> None:
    prompt = pool.lease()
    fill(prompt, numbers(40))
    samples = prompt.fork(3)
    assert daemon.pool_status(pool.name).blocks_sealed == 3
    for number, sample in enumerate([prompt, *samples]):
        fill(sample, numbers(30, start=1000 * (number + 1)))
    for number, sample in enumerate([prompt, *samples]):
        assert tokens_of(sample) == numbers(40) + numbers(30, start=1000 * (number + 1))
        assert sample.block_table[:2].tolist() == prompt.block_table[:2].tolist()
    assert len({int(sample.block_table[2]) for sample in [prompt, *samples]}) == 4
    prompt.release()
    assert tokens_of(samples[2])[:40] == numbers(40)


def test_the_last_one_goes_on_in_the_block_that_all_had(pool) -> None:
    prompt = pool.lease()
    fill(prompt, numbers(20))
    table = prompt.block_table.tolist()
    [sample] = prompt.fork()
    prompt.release()
    fill(sample, [7.0])
    assert sample.block_table[:2].tolist() == table[:2]
    assert tokens_of(sample) == [*numbers(20), 7.0]


def test_a_fork_of_forks_is_a_fork(daemon: Daemon, pool) -> None:
    leases = [pool.lease()]
    fill(leases[0], numbers(20))
    for step in range(3):
        leases += [child for lease in leases for child in lease.fork()]
        for number, lease in enumerate(leases):
            fill(lease, [float(100 * step + number)])
    assert len(leases) == 8
    assert all(tokens_of(lease)[:20] == numbers(20) for lease in leases)
    assert tokens_of(leases[7])[20:] == [1.0, 103.0, 207.0]
    pool.release_many(leases)
    assert daemon.pool_status(pool.name).blocks_free == 64


def test_nothing_can_be_committed_into_a_shared_block(pool) -> None:
    prompt = pool.lease()
    fill(prompt, numbers(20))
    [sample] = prompt.fork()
    for lease in (prompt, sample):
        with pytest.raises(kvd_client.InvalidArgumentError, match="since a fork"):
            lease.commit(1)
    stale = sample.generation
    sample.extend(1)
    assert sample.generation == stale + 1
    sample.commit(1)


def test_samples_of_a_compressed_prompt_keep_its_positions_and_part(pool) -> None:
    prompt = pool.lease(policy=kvd_client.H2O(sinks=2, recent=10, keep=0.5))
    rng = np.random.default_rng(3)
    rows = torch.from_numpy(rng.standard_normal((100, 2, 16)).astype(np.float32))
    slots = prompt.extend(100)
    for layer in range(LAYERS):
        prompt.write(layer, slots, rows, -rows)
    prompt.commit(100)
    prompt.compress(queries=rng.standard_normal((LAYERS, 100, 4, 16)).astype(np.float32))
    fill(prompt, [1.0] * 3)
    kept, keys = prompt.kept_positions(), prompt.gather(0, "numpy")[0]
    samples = prompt.fork(2)
    for number, sample in enumerate(samples):
        fill(sample, [float(number)] * 20)
        assert (sample.kept_positions()[..., : kept.shape[-1]] == kept).all()
        assert sample.kept_positions()[0, 0, -1] == sample.position - 1 == 122
        got = sample.gather(0, "numpy")[0]
        assert (got[: len(keys)] == keys).all()
        assert (got[len(keys) :] == number).all()
    fill(prompt, [9.0])
    assert (prompt.kept_positions()[..., :-1] == kept).all()


def test_samples_can_be_sealed_published_and_adopted(pool) -> None:
    prompt = pool.lease(prompt=list(range(40)))
    fill(prompt, numbers(40))
    first, second = prompt.fork(2)
    prompt.seal_prompt()
    second.publish("second")
    fill(first, [5.0])
    adopted = pool.adopt("second")
    fill(adopted, [6.0])
    assert (tokens_of(first)[40:], tokens_of(adopted)[40:]) == ([5.0], [6.0])
    with pool.lease(prompt=list(range(40))) as found:
        assert found.prefix_tokens == 32


def test_a_kernel_worker_killed_before_the_copy_is_made_is_replaced_and_it_is_made(kvd: RunningKvd) -> None:
    daemon = Daemon(kvd)
    with kvd_client.connect(daemon.run_dir, timeout=PATIENCE_S) as client:
        pool = client.pool("pool", kvd_client.KVSpec(LAYERS, 2, 16, dtype="float32"), 64)
        prompt = pool.lease()
        fill(prompt, numbers(20))
        [sample] = prompt.fork()
        pid = kvd.kernel_pid()
        os.kill(pid, signal.SIGKILL)
        fill(sample, [7.0])
        assert not is_alive(pid)
        assert tokens_of(sample) == [*numbers(20), 7.0]
        assert tokens_of(prompt) == numbers(20)
        assert daemon.status().kernel_restarts == 1


def test_a_daemon_killed_with_forks_under_way_keeps_what_each_has(kvd: RunningKvd) -> None:
    daemon = Daemon(kvd)
    with kvd_client.connect(daemon.run_dir, timeout=PATIENCE_S) as client:
        pool = client.pool("pool", kvd_client.KVSpec(LAYERS, 2, 16, dtype="float32"), 64)
        prompt = pool.lease()
        fill(prompt, numbers(20))
        first, second = prompt.fork(2)
        fill(first, [1.0])
        daemon.kill()
        fill(second, [2.0])
        fill(prompt, [3.0])
        assert [tokens_of(lease)[20] for lease in (first, second, prompt)] == [1.0, 2.0, 3.0]
        assert daemon.status().recovery.leases == 3
