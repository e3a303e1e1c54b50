"""What leaves the pool and comes back, and what is copied in it: the same for every kind of memory."""

import uuid
from collections.abc import Callable, Iterator

import pytest
from tests.client.daemon import Daemon
from tests.running_kvd import eventually, is_alive

from kvd_client import LeaseSuspendedError

from .workers import Site, Worker

BLOCKS, BLOCK = 32, 16
TOKENS = 100  # of a lease: seven blocks, the last one not full
LAYOUTS = ("block_outermost", "layer_outermost")


def new_pool(worker: Worker, layout: str = LAYOUTS[0], blocks: int = BLOCKS) -> str:
    name = f"pool-{uuid.uuid4().hex[:8]}"
    worker.pool(name=name, blocks=blocks, layout=layout)
    return name


@pytest.fixture
def one_gpu(sites: Callable[[str], Site]) -> Iterator[Site]:
    """For kernel workers that die, which is the same with either kind of memory."""
    yield sites("cuda")
    sites("cuda").clear()


def numbers(value: float, tokens: int) -> list[float]:
    return [value + t for t in range(tokens)]


def overwrite(worker: Worker, pool: str, blocks: int) -> None:
    """Somebody else uses so many blocks meanwhile."""
    worker.fill(pool=pool, lease="other", tokens=blocks * BLOCK, value=9000.0)
    worker.release(lease="other")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_suspended_lease_comes_back_with_its_bytes(here: Site, layout: str) -> None:
    worker = here.worker()
    pool = new_pool(worker, layout)
    worker.fill(pool=pool, lease="a", tokens=TOKENS, value=100.0)
    worker.suspend(lease="a")
    overwrite(worker, pool, BLOCKS - 1)
    worker.resume(lease="a")
    assert worker.numbers(lease="a") == numbers(100.0, TOKENS)
    worker.fill(pool=pool, lease="a", tokens=20, value=100.0)
    assert worker.numbers(lease="a") == numbers(100.0, TOKENS + 20)


def test_a_suspended_lease_comes_back_with_positions_and_running_scores(here: Site) -> None:
    worker = here.worker()
    pool = new_pool(worker)
    for lease, value in (("a", 100.0), ("twin", 100.0)):
        worker.fill(pool=pool, lease=lease, tokens=80, value=value)
        worker.observe(lease=lease)
        worker.compress(lease=lease, method="h2o by what was observed")
    before = worker.content(lease="a")
    worker.suspend(lease="a")
    overwrite(worker, pool, 26)
    worker.resume(lease="a")
    assert worker.content(lease="a") == before
    for lease in ("a", "twin"):
        worker.compress(lease=lease, method="h2o by what was observed")
    assert worker.content(lease="a") == worker.content(lease="twin") != before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_compressed_lease_goes_back_to_what_it_was(here: Site, layout: str) -> None:
    worker = here.worker()
    pool = new_pool(worker, layout)
    worker.fill(pool=pool, lease="a", tokens=160, value=100.0)
    kept, positions = worker.compress(lease="a", method="snapkv", park=True)
    assert kept < 160
    overwrite(worker, pool, BLOCKS - 4)
    assert worker.numbers(lease="a") == [100.0 + position for position in positions]
    assert worker.restore(lease="a") == 0
    assert worker.numbers(lease="a") == numbers(100.0, 160)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_evicted_prompt_is_found_with_its_bytes(here: Site, layout: str) -> None:
    worker, daemon = here.worker(), Daemon(here.kvd, here.device)
    pool, tokens = new_pool(worker, layout), 10 * BLOCK
    assert worker.prompt(pool=pool, lease="a", tokens=tokens + 1) == 0
    worker.fill(pool=pool, lease="a", tokens=tokens, value=100.0)
    worker.seal(lease="a")
    worker.release(lease="a")
    worker.fill(pool=pool, lease="pressure", tokens=18 * BLOCK, value=9000.0)
    eventually(lambda: daemon.pool_status(pool).blocks_copied == 10, "copies of cached blocks")
    worker.release(lease="pressure")
    overwrite(worker, pool, BLOCKS - 1)
    assert worker.prompt(pool=pool, lease="b", tokens=tokens + 1) == tokens
    assert worker.numbers(lease="b") == numbers(100.0, tokens)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_forks_that_part_see_their_own_bytes(here: Site, layout: str) -> None:
    worker = here.worker()
    pool = new_pool(worker, layout)
    worker.fill(pool=pool, lease="a", tokens=TOKENS, value=100.0)
    worker.fork(lease="a", child="b")
    for lease, value in (("b", 500.0), ("a", 300.0)):
        worker.fill(pool=pool, lease=lease, tokens=20, value=value)
    for lease, value in (("b", 500.0), ("a", 300.0)):
        own = [value + t for t in range(TOKENS, TOKENS + 20)]
        assert worker.numbers(lease=lease) == numbers(100.0, TOKENS) + own


def test_a_copy_is_made_again_if_the_kernel_worker_dies_over_it(one_gpu: Site) -> None:
    worker = one_gpu.worker()
    pool = new_pool(worker)
    worker.fill(pool=pool, lease="a", tokens=TOKENS, value=100.0)

    def strike() -> int:
        pid = one_gpu.kernel_pid()
        one_gpu.gpus.kill_in_copy(pid, 4)
        return pid

    struck = strike()
    worker.suspend(lease="a")
    assert not is_alive(struck)
    overwrite(worker, pool, BLOCKS - 1)
    struck = strike()
    worker.resume(lease="a")
    assert not is_alive(struck)
    assert worker.numbers(lease="a") == numbers(100.0, TOKENS)


def test_the_copy_of_a_tail_is_made_again_if_the_kernel_worker_dies_over_it(one_gpu: Site) -> None:
    worker = one_gpu.worker()
    pool = new_pool(worker)
    worker.fill(pool=pool, lease="a", tokens=TOKENS, value=100.0)
    worker.fork(lease="a", child="b")
    struck = one_gpu.kernel_pid()
    one_gpu.gpus.kill_in_copy(struck, 2)
    worker.fill(pool=pool, lease="b", tokens=1, value=100.0)
    assert not is_alive(struck)
    assert worker.numbers(lease="a") == numbers(100.0, TOKENS)
    assert worker.numbers(lease="b") == numbers(100.0, TOKENS + 1)


def test_a_lease_that_was_parked_before_its_bytes_move_is_suspended_if_the_kernel_worker_dies_over_them(
    one_gpu: Site,
) -> None:
    worker = one_gpu.worker()
    pool = new_pool(worker, blocks=22)  # two leases of 160 tokens fill it: bytes have to move in place
    for lease, value in (("a", 100.0), ("b", 300.0)):
        worker.fill(pool=pool, lease=lease, tokens=160, value=value)
    one_gpu.gpus.kill_in_kernel(one_gpu.kernel_pid(), "compact_1")
    with pytest.raises(LeaseSuspendedError, match="resume"):
        worker.compress(lease="a", method="streaming", park=True)
    with pytest.raises(LeaseSuspendedError):
        worker.numbers(lease="a")
    overwrite(worker, pool, 10)
    worker.resume(lease="a")
    assert worker.numbers(lease="a") == numbers(100.0, 160)
    kept, positions = worker.compress(lease="a", method="streaming", park=True)
    assert worker.numbers(lease="a") == [100.0 + position for position in positions[:kept]]
