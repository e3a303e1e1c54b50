"""What kvctl does without any daemon: the plan, usage errors, and where to go from an error."""

import json
import os
import pty
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvd_client.cli import main

PLAN = ["plan", "--model", "llama-3-70b", "--context", "128k", "--sessions", "16"]
KVCTL = str(Path(sys.executable).with_name("kvctl"))


def test_the_plan_is_the_same_in_json_and_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert main(["-o", "yaml", *PLAN]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == document
    assert document["total_bytes"] == 640 << 30
    assert [row["policy"] for row in document["policies"]][:2] == ["dense", "streaming"]


def test_the_plans_table_heads_its_columns_with_the_json_fields(capsys: pytest.CaptureFixture[str]) -> None:
    main([*PLAN, "--memory", "8x80GiB", "-o", "json"])
    row = json.loads(capsys.readouterr().out)["policies"][0]
    main([*PLAN, "--memory", "8x80GiB"])
    head = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("policy"))
    assert set(head.split()) <= row.keys()


def test_the_plan_says_where_the_folklore_number_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    main(PLAN)
    text = capsys.readouterr().out
    assert "40 GiB = 131,072 tokens" in text
    assert "320 GiB per session counts all 64 query heads" in text
    assert "8 times too much" in text


def test_yaml_without_pyyaml_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)  # what an import of a missing package meets
    assert main([*PLAN, "-o", "yaml"]) == 2
    assert "pip install 'kvd-pool[cli]', or use -o json" in capsys.readouterr().err


def test_a_policy_that_cannot_is_refused_beside_those_that_can(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama-3-8b", "--context", "128", "--window", "64"]) == 0
    assert "snapkv is refused: keep=0.15 of 128 tokens" in capsys.readouterr().out
    assert main(["plan", "--model", "llama-3-8b", "--context", "128", "--policy", "h2o"]) == 1


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["pool", "create", "chat"], "one of the arguments --blocks --size is required"),
        (["pool", "create", "chat", "--size", "2 furlongs"], "a size such as 512MiB"),
        (["lease", "show", "seven"], "a lease id (see: kvctl lease list)"),
        (["plan", "--model", "llama-3-8b", "--context", "long"], "a number of tokens"),
        ([*PLAN, "--keep", "150%"], "ratio in (0, 1]"),
        (["pool", "status", "--timeout", "0"], "seconds from 0.001"),
        (["lease", "list", "--all", "--limit", "3"], "not allowed with"),
        ([], "see: kvctl --help"),
    ],
)
def test_wrong_usage_exits_2_and_says_what_is_needed(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert complaint in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["plan", "--model", "nothing.json", "--context", "1k"], "no file and no built-in model"),
        ([*PLAN, "--dtype", "int3"], "one of float32"),
        (["pool", "create", "chat", "--blocks", "8"], "a pool needs a geometry"),
        (["pool", "create", "chat", "--size", "1MiB", "--model", "llama-3-8b"], "at least 4 MiB"),
        (["pool", "status", "--watch", "-o", "json"], "--watch is for people"),
    ],
)
def test_values_that_make_no_sense_together_exit_2_too(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert complaint in captured.err
    assert captured.out == ""


def test_without_a_daemon_the_error_ends_in_how_to_start_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pool", "status", "--run-dir", str(tmp_path / "none")]) == 1
    assert "start one with: kvd --host-memory 2GiB" in capsys.readouterr().err


def test_the_run_dir_comes_from_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVD_ENDPOINT", raising=False)
    monkeypatch.setenv("KVD_RUN_DIR", str(tmp_path / "mine"))
    assert main(["lease", "list"]) == 1
    assert f"no kvd at {tmp_path / 'mine'}" in capsys.readouterr().err


def test_a_socket_that_nobody_serves_is_reported_for_its_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = tmp_path / "host0"
    device.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(device / "grpc.sock"))
    assert main(["pool", "status", "--run-dir", str(tmp_path), "-o", "json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["devices"][0]["health"] == "unreachable"
    assert f"host0: no daemon answers at {device}/grpc.sock" in captured.err


def test_a_daemon_that_hangs_costs_the_timeout_and_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = tmp_path / "host0"
    device.mkdir()
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(device / "grpc.sock"))
        hung.listen()
        assert main(["session", "list", "--run-dir", str(tmp_path), "--timeout", "0.2"]) == 1
    assert "raise --timeout" in capsys.readouterr().err


def test_an_unknown_device_is_answered_with_those_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "host0").mkdir()
    (tmp_path / "host0" / "lock").touch()
    assert main(["pool", "list", "--run-dir", str(tmp_path), "--device", "gpu7"]) == 2
    assert "there is host0" in capsys.readouterr().err


def test_a_reader_that_stops_reading_is_no_error() -> None:
    command = f"set -o pipefail; '{KVCTL}' {' '.join(PLAN)} -o json | head -c 1"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("{", "", 0)


def test_without_stdout_nothing_is_told_and_nothing_is_an_error() -> None:
    command = f"'{KVCTL}' {' '.join(PLAN)} >&-"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.stderr, ended.returncode) == ("", 0)


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_colour_comes_on_a_terminal_unless_no_color_is_set(no_color: str, coloured: bool) -> None:
    environ = os.environ | {"NO_COLOR": no_color, "TERM": "xterm", "COLUMNS": "80"}
    leader, follower = pty.openpty()
    ended = subprocess.run([KVCTL, *PLAN], stdout=follower, check=False, timeout=60, env=environ)
    os.close(follower)
    text = os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert ended.returncode == 0
    assert ("\x1b[" in text) == coloured
    assert max(len(line) for line in text.replace("\r", "").split("\n") if "\x1b" not in line) <= 80


def test_output_to_a_file_has_no_colour_and_nothing_cut(capsys: pytest.CaptureFixture[str]) -> None:
    main(PLAN)
    text = capsys.readouterr().out
    assert "\x1b[" not in text
    assert "streaming(sinks=4, window=1020, rope=original)" in text
