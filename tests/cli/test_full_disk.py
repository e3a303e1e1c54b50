"""stdout or stderr of kvctl on a full disk: one line on the other, an exit status, and no traceback."""

from pathlib import Path

import pytest
from tests.full_disk import run
from tests.running_kvd import RunningKvd

KVCTL = "kvd_client.cli"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("status",),
        ("status", "-o", "json"),
        ("status", "-o", "yaml"),
        ("status", "--watch", "1"),
        ("plan", "--model", "llama-3-8b", "--context", "4k"),
        ("--help",),
        ("--version",),
        ("pool", "create", "--help"),
    ],
    ids=" ".join,
)
def test_kvctl_says_that_its_answer_found_no_room(
    shared_kvd: RunningKvd, arguments: tuple[str, ...], unbuffered: str
) -> None:
    done = run(KVCTL, "--run-dir", shared_kvd.run_dir, *arguments, full="stdout", unbuffered=unbuffered)
    assert done.returncode == 1
    assert done.stderr == "error: stdout: No space left on device; make room there, or send it elsewhere\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("arguments", "status"), [(("status",), 1), (("nonsense",), 2), (("pool", "create", "x"), 2)], ids=str
)
def test_kvctl_that_cannot_complain_still_ends_with_its_status(
    tmp_path: Path, arguments: tuple[str, ...], status: int, unbuffered: str
) -> None:
    done = run(KVCTL, "--run-dir", tmp_path, *arguments, full="stderr", unbuffered=unbuffered)
    assert (done.returncode, done.stdout) == (status, "")
