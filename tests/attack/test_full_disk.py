"""stdout or stderr of kvd on a full disk, or its run dir: one line, an exit status, and no traceback."""

from pathlib import Path

import pytest
from tests.full_disk import run

from kvd.errors import InvalidArgumentError
from kvd_daemon.run_dir import DeviceDir

KVD = "kvd_daemon.cli"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_kvd_that_cannot_say_that_it_is_ready_ends_in_good_order(tmp_path: Path, unbuffered: str) -> None:
    arguments = ("--host-memory", "64MiB", "--run-dir", tmp_path / "run", "--log-level", "error")
    done = run(KVD, *arguments, full="stdout", unbuffered=unbuffered)
    assert done.returncode == 1
    assert done.stderr == "kvd: stdout: No space left on device; make room there, or send it elsewhere\n"
    left = {path.name for path in tmp_path.rglob("*") if not path.is_dir()}
    assert left <= {"audit.jsonl"}


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_kvd_that_cannot_complain_still_ends_with_its_status(tmp_path: Path, unbuffered: str) -> None:
    done = run(KVD, "--run-dir", tmp_path / "run", full="stderr", unbuffered=unbuffered)
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize("name", ["lock", "grpc.sock", "attach.sock"])
def test_a_run_dir_in_which_nothing_can_be_made_is_a_mistake_of_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "host0").mkdir(mode=0o700)
    (tmp_path / "host0" / name).mkdir()  # in the way, as no space would be
    with pytest.raises(InvalidArgumentError, match=f"{name}: .*another --run-dir"):
        DeviceDir(tmp_path, "host0")
