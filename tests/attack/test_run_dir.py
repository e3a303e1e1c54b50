"""What becomes of a daemon whose run directory is pulled away from under it."""

import shutil
from pathlib import Path

import pytest
from tests.running_kvd import running_kvd, start_kvd

import kvd_client
from kvd.errors import InvalidArgumentError
from kvd_daemon.run_dir import DeviceDir


def test_a_kvd_whose_run_dir_was_removed_leaves_the_next_ones_sockets_alone(tmp_path: Path) -> None:
    first = start_kvd(tmp_path, "--host-memory", "256MiB")
    try:
        first.wait_until_ready()
        shutil.rmtree(first.run_dir)
        with running_kvd(tmp_path) as second:
            first.process.terminate()
            first.process.communicate()
            assert first.process.returncode == 0
            assert list(second.run_dir.glob("host0/journal/*.snapshot")), "the next one's journal too"
            kvd_client.connect(second.run_dir).close()
    finally:
        first.kill()


def test_a_run_dir_that_cannot_be_written_is_a_mistake_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "host0").mkdir(mode=0o700)
    (tmp_path / "host0" / "lock").mkdir()  # as a full disk would: the lock cannot be made
    with pytest.raises(InvalidArgumentError, match=r"lock: .*choose another --run-dir"):
        DeviceDir(tmp_path, "host0")
