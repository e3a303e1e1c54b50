"""The demo's kvd and workers: real ones, told what went wrong, and nothing is left of them."""

import io

import psutil
import pytest
from kvd_demo.demo.pool import BLOCK_SIZE, POOL, POOL_BLOCKS
from kvd_demo.demo.pool_screen import PoolScreen
from kvd_demo.demo.running import DemoError, Kvd, Worker, together
from rich.console import Console

import kvd_client


@pytest.fixture
def kvd():
    with Kvd() as kvd:
        yield kvd


def test_nothing_is_left_when_the_demo_ends():
    with Kvd() as kvd:
        assert kvd.ready_line.startswith("kvd ready: host0 480 MiB")
        assert kvd.run_dir.exists()
    assert not kvd.run_dir.exists()
    assert not any(str(kvd.run_dir) in process.cmdline() for process in children())


def children():
    return psutil.Process().children(recursive=True)


def test_a_worker_that_fails_is_told_with_its_last_words(kvd):
    worker = Worker(kvd, "tenant", "ana", "/no/such/prompt")
    with worker, pytest.raises(DemoError, match=f"no pool .*{POOL}"):
        list(worker.events("ready"))


def test_one_failing_worker_of_several_ends_the_part(kvd):
    one, two = (Worker(kvd, "tenant", name, "/no/such/prompt") for name in ("ana", "ben"))
    with one, two, pytest.raises(DemoError, match="a worker failed"):
        list(together(one, two))


def test_the_map_shows_each_block_once_and_who_holds_it(kvd):
    spec = kvd_client.KVSpec(layers=1, kv_heads=1, head_dim=8, dtype="float32", block_size=BLOCK_SIZE)
    with (
        kvd_client.connect(kvd.run_dir, name="ana") as ana,
        kvd_client.connect(kvd.run_dir, name="ben") as ben,
    ):
        mine = ana.pool(POOL, spec, POOL_BLOCKS).lease(5 * BLOCK_SIZE, lease_ahead=0)
        other = ben.pool(POOL).lease(7 * BLOCK_SIZE, lease_ahead=0)
        screen = PoolScreen(kvd)
        console = Console(width=100, record=True, file=io.StringIO())
        console.print(screen)
        text = console.export_text()
        assert (mine.block_table.size, other.block_table.size) == (5, 7)
    assert "■ ana 5   □ ben 7   · free 628" in text
    assert (text.count("■"), text.count("□")) == (5 + 1, 7 + 1)
