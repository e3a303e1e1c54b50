"""After fork() the child starts anew and cannot disturb its parent. Each test forks a process of its own."""

import subprocess
import sys
import textwrap

from .daemon import Daemon

HEAD = """
import os, sys, gc
import kvd_client
client = kvd_client.connect(sys.argv[1], timeout=60)
spec = kvd_client.KVSpec(layers=1, kv_heads=1, head_dim=8, dtype="float32")
pool = client.pool(sys.argv[2], spec, 32)
lease = pool.lease(tokens=64)
k, v = pool.layer(0, "numpy")
k[lease.block_table] = 5.0

def fork(child):
    pid = os.fork()
    if pid == 0:
        child()
        sys.stdout.flush()
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0, "the child failed"
"""
TAIL = """
assert lease.extend(80).size == 80
assert (k[lease.block_table[:4]] == 5.0).all()
lease.release()
client.close()
print("parent is well")
"""


def _run(daemon: Daemon, pool: str, body: str) -> list[str]:
    program = HEAD + textwrap.dedent(body) + TAIL
    done = subprocess.run(
        [sys.executable, "-c", program, str(daemon.run_dir), pool],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("parent is well\n")
    return done.stdout.splitlines()[:-1]


def test_using_a_client_pool_or_lease_in_a_child_is_an_error_at_once(daemon: Daemon) -> None:
    said = _run(
        daemon,
        "forked-use",
        """
        def child():
            for use in (lambda: client.pool("x", spec, 1), lambda: client.epoch, lambda: pool.lease(tokens=1),
                        lambda: pool.layer(0), lambda: lease.extend(1), lambda: lease.commit(1),
                        lambda: lease.block_table, lease.compress, lease.kept_positions,
                        lambda: client.offers.get(60), lambda: client.events.get(60), client.offers.drain):
                try:
                    use()
                except kvd_client.ForkedClientError as error:
                    assert "connect()" in str(error)
                    print("refused")
        fork(child)
        """,
    )
    assert said == ["refused"] * 12


def test_closing_and_collecting_in_a_child_does_not_disturb_the_parent(daemon: Daemon) -> None:
    _run(
        daemon,
        "forked-close",
        """
        def child():
            global client, pool, lease, k, v
            lease.release()
            pool.close()
            client.close()
            del client, pool, lease, k, v
            gc.collect()
        fork(child)
        assert client.session_id
        """,
    )


def test_a_child_that_just_ends_does_not_disturb_the_parent(daemon: Daemon) -> None:
    _run(daemon, "forked-exit", "fork(lambda: None)")


def test_a_child_may_connect_for_itself(daemon: Daemon) -> None:
    said = _run(
        daemon,
        "forked-connect",
        """
        def child():
            with kvd_client.connect(sys.argv[1], timeout=60) as mine:
                with mine.pool(sys.argv[2]).lease(tokens=16) as own:
                    assert own.block_table[0] not in lease_blocks
                    theirs, _ = mine.pool(sys.argv[2]).layer(0, "numpy")
                    print((theirs[lease_blocks] == 5.0).all())
        lease_blocks = lease.block_table
        fork(child)
        """,
    )
    assert said == ["True"]


def test_a_child_has_no_mapping_to_write_to_after_its_parents_death(daemon: Daemon) -> None:
    said = _run(
        daemon,
        "forked-mapping",
        """
        address = k.ctypes.data
        def mapped():
            ranges = [line.split()[0].split("-") for line in open("/proc/self/maps")]
            return any(int(a, 16) <= address < int(b, 16) for a, b in ranges)
        print(mapped())
        fork(lambda: print(mapped()))
        """,
    )
    assert sorted(said) == ["False", "True"]


def test_multiprocessing_workers_start_clean_after_a_fork(daemon: Daemon) -> None:
    said = _run(
        daemon,
        "forked-pool",
        """
        import multiprocessing
        def work(number):
            with kvd_client.connect(sys.argv[1], timeout=60) as mine:
                return mine.pool(sys.argv[2]).lease(tokens=16).block_table.size + number
        with multiprocessing.get_context("fork").Pool(2) as workers:
            print(workers.map(work, range(4)))
        """,
    )
    assert said == ["[1, 2, 3, 4]"]
