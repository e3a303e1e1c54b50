"""A pool that is mapped for reading alone: the same tests for host memory and for a GPU's, in real processes.

cuIpc handles cannot be mapped so: there it is an error with the way out.
"""

import signal

import pytest

from kvd_client import (
    GpuError,
    GpuHandleError,
    InvalidArgumentError,
    PoolNotFoundError,
    ReadOnlyError,
    StaleGenerationError,
)

from .test_sharing import BLOCKS, fresh_pool, status
from .workers import Site, Worker


def on(*kinds: str) -> pytest.MarkDecorator:
    *fakes, real = kinds
    return pytest.mark.parametrize("here", [*fakes, pytest.param(real, marks=pytest.mark.gpu)], indirect=True)


wherever_it_can_be = on("host", "cuda", "gpu")


def pool_with_a_reader(here: Site) -> tuple[str, Worker, Worker]:
    """Its writer has 40 tokens in it, 100.0 and on."""
    writer, reader, pool = here.worker(), here.worker(), fresh_pool()
    writer.pool(name=pool, blocks=BLOCKS)
    writer.fill(pool=pool, lease="a", tokens=40, value=100.0)
    reader.pool(name=pool, read_only=True)
    return pool, writer, reader


@wherever_it_can_be
def test_a_reader_sees_what_is_written_now_and_later(here: Site) -> None:
    pool, writer, reader = pool_with_a_reader(here)
    assert reader.read(pool=pool, told=writer.readable(lease="a")) == [100.0 + t for t in range(40)]
    blocks = writer.fill(pool=pool, lease="a", tokens=8, value=100.0)
    assert reader.peek(pool=pool, block_ids=blocks)[:48] == [100.0 + t for t in range(48)]


@wherever_it_can_be
def test_a_lease_that_moved_or_ended_is_an_error_for_its_reader(here: Site) -> None:
    pool, writer, reader = pool_with_a_reader(here)
    before = writer.readable(lease="a")
    _, positions = writer.compress(lease="a", method="streaming")
    with pytest.raises(StaleGenerationError, match="ask its owner"):
        reader.read(pool=pool, told=before)
    after = writer.readable(lease="a")
    assert reader.read(pool=pool, told=after) == [100.0 + position for position in positions]
    writer.release(lease="a")
    with pytest.raises(StaleGenerationError):
        reader.read(pool=pool, told=after)
    with pytest.raises(InvalidArgumentError, match="in pool"):
        reader.read(pool=pool, told=after | {"pool_id": "another"})


@wherever_it_can_be
def test_a_reader_takes_a_published_lease_reads_it_and_gives_it_on(here: Site) -> None:
    pool, writer, reader = pool_with_a_reader(here)
    writer.publish(lease="a", key="a key")
    reader.adopt(pool=pool, key="a key")
    assert reader.numbers(lease="a key") == [100.0 + t for t in range(40)]
    for change in ("extend", "commit"):
        with pytest.raises(ReadOnlyError):
            reader.ask(change, {"lease": "a key"})
    with pytest.raises(ReadOnlyError):
        reader.compress(lease="a key", method="snapkv")
    reader.publish(lease="a key", key="a key")
    writer.adopt(pool=pool, key="a key")
    writer.fill(pool=pool, lease="a key", tokens=8, value=100.0)
    assert writer.numbers(lease="a key") == [100.0 + t for t in range(48)]


@wherever_it_can_be
def test_a_reader_can_neither_write_nor_lease_nor_create(here: Site) -> None:
    pool, writer, reader = pool_with_a_reader(here)
    leased = status(here, pool).blocks_leased
    for change in ("write", "lease"):
        with pytest.raises(ReadOnlyError, match="for reading alone"):
            reader.ask(change, {"pool": pool})
    with pytest.raises(InvalidArgumentError, match="only attaches"):
        reader.pool(name=fresh_pool(), blocks=BLOCKS, read_only=True)
    with pytest.raises(PoolNotFoundError):
        reader.pool(name=fresh_pool(), read_only=True)
    assert status(here, pool).blocks_leased == leased
    assert writer.numbers(lease="a")[0] == 100.0


@pytest.mark.parametrize("here", ["host"], indirect=True)
def test_the_kernel_ends_a_reader_that_writes_all_the_same(here: Site) -> None:
    pool, writer, reader = pool_with_a_reader(here)
    assert reader.death("scribble", pool=pool) == signal.SIGSEGV
    assert writer.numbers(lease="a") == [100.0 + t for t in range(40)]


@pytest.mark.parametrize("here", ["host"], indirect=True)
def test_torch_reads_and_knows_no_read_only_tensors_so_that_the_kernel_ends_it_too(here: Site) -> None:
    pool, writer, reader = pool_with_a_reader(here)
    assert reader.torch_view(pool=pool) == 100.0
    assert reader.death("torch_view", pool=pool, write=True) == signal.SIGSEGV
    assert writer.numbers(lease="a") == [100.0 + t for t in range(40)]


@on("cuda", "gpu")
def test_the_driver_refuses_a_reader_that_writes_all_the_same(here: Site) -> None:
    pool, writer, reader = pool_with_a_reader(here)
    with pytest.raises(GpuError):
        reader.scribble(pool=pool)
    assert writer.numbers(lease="a") == [100.0 + t for t in range(40)]


@on("cuda_legacy", "gpu_legacy")
def test_memory_that_cannot_be_mapped_for_reading_alone_is_refused_with_the_way_out(here: Site) -> None:
    pool = fresh_pool()
    here.worker().pool(name=pool, blocks=BLOCKS)
    with pytest.raises(GpuHandleError, match=r"cannot be mapped read-only: .*--gpu-sharing descriptors"):
        here.worker().pool(name=pool, read_only=True)
