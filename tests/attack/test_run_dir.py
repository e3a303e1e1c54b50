"""What becomes of a daemon whose run directory is pulled away from under it."""

import shutil
from pathlib import Path

from tests.running_kvd import running_kvd, start_kvd

import kvd_client


def test_a_kvd_whose_run_dir_was_removed_leaves_the_next_ones_sockets_alone(tmp_path: Path) -> None:
    first = start_kvd(tmp_path, "--host-memory", "256MiB")
    try:
        first.wait_until_ready()
        shutil.rmtree(first.run_dir)
        with running_kvd(tmp_path) as second:
            first.process.terminate()
            first.process.communicate()
            assert first.process.returncode == 0
            kvd_client.connect(second.run_dir).close()
    finally:
        first.kill()
