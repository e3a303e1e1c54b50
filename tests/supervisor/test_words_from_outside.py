"""What other processes hand to a supervisor: systemd's environment, and an older supervisor's file."""

import json
import os
from pathlib import Path

import pytest

from kvd.errors import InvalidArgumentError
from kvd_daemon.settings import Settings
from kvd_daemon.supervisor.handoff import Handoff, check
from kvd_daemon.supervisor.kept import Kept, by_device, memory_bytes
from kvd_daemon.supervisor.systemd import Systemd, inherited_fds

NOBODY = Systemd({}, 1)


def test_descriptors_meant_for_another_process_are_left_alone() -> None:
    assert inherited_fds({"LISTEN_PID": "1", "LISTEN_FDS": "3", "LISTEN_FDNAMES": "a:b:c"}, os.getpid()) == {}


@pytest.mark.parametrize("nonsense", ["", "-1", "two", "1e3"])
def test_nonsense_in_the_environment_is_no_descriptor(nonsense: str) -> None:
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": nonsense}
    assert inherited_fds(environ, os.getpid()) == {}
    assert not Systemd({"NOTIFY_SOCKET": "/x", "FDSTORE": nonsense}, 1).keeps_fds
    assert Systemd({"WATCHDOG_USEC": nonsense}, 1).watchdog_s == 0


def test_a_watchdog_of_another_process_is_not_fed() -> None:
    assert Systemd({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "7"}, 8).watchdog_s == 0
    assert Systemd({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "8"}, 8).watchdog_s == 1


def test_names_belong_to_devices_and_a_name_without_one_is_closed() -> None:
    one, other = os.memfd_create("one"), os.memfd_create("other")
    found = by_device({"host0.pool.4f.bytes": one, "stored": other})
    assert found == {"host0": {"pool.4f.bytes": one}}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(other)
    kept = Kept(NOBODY, found)
    kept.drop("host0", "unknown")
    kept.drop_all_but(["host1"])
    assert kept.of("host0") == {}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(one)


def test_only_memory_that_is_taken_counts_as_such() -> None:
    fd = os.memfd_create("pool")
    os.ftruncate(fd, 64 << 20)
    pidfd = os.pidfd_open(os.getpid())
    assert memory_bytes([fd, pidfd]) == 0
    os.pwrite(fd, bytes(1 << 20), 0)
    assert memory_bytes([fd, pidfd]) == 1 << 20
    os.close(fd)
    os.close(pidfd)


def test_a_handoff_of_another_format_is_refused_with_the_way_out(tmp_path: Path) -> None:
    settings = Settings(host_memory_bytes=64 << 20, run_dir=str(tmp_path))
    fd = Handoff(os.getpid(), settings, (), {}, {}).file()
    check(fd)
    content = json.loads(os.pread(fd, 1 << 20, 0))
    os.pwrite(fd, json.dumps(content | {"format": 2}).encode(), 0)
    with pytest.raises(InvalidArgumentError, match="stop it and start this one"):
        check(fd)
    os.close(fd)
