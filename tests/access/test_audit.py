"""The audit log: who was refused what, what operators did, and never a secret."""

import base64
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from tests.daemon.raw_worker import RawWorker, new_ticket
from tests.running_kvd import RunningKvd, eventually, running_kvd

from kvd.credentials import new_token, token_line
from kvd.errors import LimitExceededError, PermissionDeniedError
from kvd.v1 import attach_pb2 as ab
from kvd_client.cli import main as kvctl
from kvd_daemon.access import audit
from kvd_daemon.access.audit import AuditLog, Caller

from .audit_lines import audit_lines
from .calls import answer_to
from .certificates import Authority, channel_credentials
from .conftest import Ruled
from .peers import OTHER_UID, other_process
from .test_matrix import connect, free_port, rule, unix_channel

SOMEBODY = Caller("unix", "uid:5", (("pid", 7),))


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_says_who_what_and_why_and_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, "host0")
    assert not path.exists()
    log.refused(SOMEBODY, "DropPool", PermissionDeniedError("no role"))
    log.close()
    [line] = lines_of(path)
    assert line.pop("time")
    assert line == {
        "device": "host0",
        "event": "refusal",
        "door": "unix",
        "who": "uid:5",
        "pid": 7,
        "what": "DropPool",
        "reason": "PERMISSION_DENIED",
        "why": "no role",
    }
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("how", [os.symlink, os.link], ids=["symbolic link", "hard link"])
def test_a_link_that_somebody_laid_for_it_is_not_written_through(
    how: Callable[[Path, Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    victim, path = tmp_path / "victim", tmp_path / "audit.jsonl"
    victim.touch()
    how(victim, path)
    log = AuditLog(path, "host0")
    log.refused(SOMEBODY, "DropPool", PermissionDeniedError("no role"))
    log.close()
    assert victim.read_text() == ""
    assert f"{path} cannot be written" in caplog.text, "the daemon's log has the line"


def test_a_pipe_in_its_place_is_neither_waited_for_nor_written_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "audit.jsonl"
    os.mkfifo(path)
    log = AuditLog(path, "host0")
    log.refused(SOMEBODY, "DropPool", PermissionDeniedError("no role"))
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    log.noted("reload", "settings", {})
    assert os.read(reader, 1) == b""
    os.close(reader)
    assert caplog.text.count("cannot be written") == 2


def test_a_flood_of_refusals_is_one_line_and_hides_no_other(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, "host0")
    for _ in range(1000):
        log.refused(SOMEBODY, "DropPool", PermissionDeniedError("no role"))
    log.refused(Caller("unix", "uid:6"), "DropPool", PermissionDeniedError("no role"))
    log.refused(SOMEBODY, "DropPool", LimitExceededError("too much"))
    log.close()
    assert [(line["who"], line["reason"]) for line in lines_of(path)] == [
        ("uid:5", "PERMISSION_DENIED"),
        ("uid:6", "PERMISSION_DENIED"),
        ("uid:5", "LIMIT_EXCEEDED"),
    ]


def test_the_log_is_rotated_by_size_and_words_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "MAX_FILE_BYTES", 2000)
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, "host0")
    for number in range(40):
        log.acted(SOMEBODY, "RevokeLease", {"number": number, "cause": "x" * 10_000})
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["audit.jsonl", *(f"audit.jsonl.{age}" for age in (1, 2, 3))]
    assert all(file.stat().st_size <= 2000 for file in files)
    numbers = [line["number"] for file in reversed(files) for line in lines_of(file)]
    assert numbers[-1] == 39
    assert numbers == list(range(40 - len(numbers), 40))


def test_a_log_that_cannot_be_written_fails_no_call(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = AuditLog(tmp_path / "no such folder" / "audit.jsonl", "host0")
    log.refused(SOMEBODY, "DropPool", PermissionDeniedError("no role"))
    assert "no role" in caplog.text


def reasons(kvd: RunningKvd) -> set[tuple[str, str, str]]:
    return {
        (line["door"], line["what"].rpartition("/")[2], line["reason"])
        for line in audit_lines(kvd, "refusal")
    }


def test_every_kind_of_refusal_on_this_machine_is_written_down(ruled_kvd: Ruled) -> None:
    kvd = ruled_kvd(
        rule("read-only", tenant="t") + '[pools.ours]\ntenants = ["us"]\n[limits]\nsessions = 1\n'
    )
    with other_process(kvd.run_dir) as other, unix_channel(kvd.run_dir) as channel:
        ticket = other.ticket()
        assert connect(channel, ticket) == "PERMISSION_DENIED"
        assert connect(channel, ticket) == "TICKET_INVALID"
        metadata = (("kvd-ticket-bin", other.ticket()),)
        assert answer_to(channel, "/kvd.v1.AdminService/DropPool", metadata) == "PERMISSION_DENIED"
        assert answer_to(channel, "/kvd.v1.AdminService/GetStatus") == "UNAUTHENTICATED"
        assert answer_to(channel, "/kvd.v1.LeaseService/Lease") == "SESSION_NOT_FOUND"
        asked = ab.AttachRequest(map=ab.MapRequest(session_token=bytes(32), pool="ours"))
        assert other.ask(asked)[0].error.reason == "SESSION_NOT_FOUND"
    assert reasons(kvd) == {
        ("session", "Connect", "PERMISSION_DENIED"),
        ("session", "Connect", "TICKET_INVALID"),
        ("unix", "DropPool", "PERMISSION_DENIED"),
        ("unix", "GetStatus", "UNAUTHENTICATED"),
        ("session", "Lease", "SESSION_NOT_FOUND"),
        ("attach", "map", "SESSION_NOT_FOUND"),
    }
    denied = [
        line for line in audit_lines(kvd, "refusal") if line["door"] == "unix" and "role" in line["why"]
    ]
    assert [line["who"] for line in denied] == [f"uid:{OTHER_UID}"]


def test_refusals_within_a_session_name_the_session(tmp_path: Path) -> None:
    config = tmp_path / "kvd.toml"
    config.write_text('[pools.ours]\ntenants = ["us"]\n[limits]\nleases_per_call = 2\nsessions = 2\n')
    with (
        running_kvd(tmp_path, "--config", str(config)) as kvd,
        RawWorker(kvd.run_dir) as worker,
        RawWorker(kvd.run_dir) as another,
    ):
        worker.create_pool()
        [lease] = another.lease(16)
        for attempt in (
            lambda: worker.create_pool("ours"),
            lambda: worker.lease(1, 1, 1),
            lambda: worker.release(lease),
            lambda: RawWorker(kvd.run_dir),
        ):
            with pytest.raises(grpc.RpcError):
                attempt()
        assert reasons(kvd) == {
            ("session", "CreatePool", "PERMISSION_DENIED"),
            ("session", "Lease", "LIMIT_EXCEEDED"),
            ("session", "Release", "NOT_OWNER"),
            ("session", "Connect", "LIMIT_EXCEEDED"),
        }
        told = [line for line in audit_lines(kvd, "refusal") if line["what"] == "Release"]
        assert [(line["session"], line["pid"]) for line in told] == [(worker.opened.session_id, os.getpid())]


def test_what_operators_do_is_written_down_with_its_cause(kvd: RunningKvd) -> None:
    with RawWorker(kvd.run_dir) as worker:
        worker.create_pool("chat")
        [lease] = worker.lease(16, pool="chat")
        told = ["--run-dir", str(kvd.run_dir), "lease", "revoke", str(lease.lease_id), "--cause", "too old"]
        assert kvctl(told) == 0
        assert kvctl(["--run-dir", str(kvd.run_dir), "pool", "drop", "chat"]) == 1
    assert kvctl(["--run-dir", str(kvd.run_dir), "pool", "drop", "chat"]) == 0
    actions = [(a["what"].rpartition("/")[2], a["outcome"]) for a in audit_lines(kvd, "action")]
    assert actions == [("RevokeLease", "done"), ("DropPool", "failed"), ("DropPool", "done")]
    revoked, dropped, _ = audit_lines(kvd, "action")
    assert (revoked["lease_id"], revoked["cause"]) == (lease.lease_id, "too old")
    assert dropped["name"] == "chat"
    assert revoked["who"] == f"uid:{os.geteuid()}"


def test_no_secret_is_in_any_log_or_in_what_kvd_keeps(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    server, token, wrong = authority.issue("server", "127.0.0.1"), new_token(), new_token()
    tokens, address = tmp_path / "tokens", f"127.0.0.1:{free_port()}"
    tokens.touch(0o600)
    tokens.write_text(token_line("ci", "operator", token))
    tls = ("--tls-cert", str(server.cert), "--tls-key", str(server.key), "--token-file", str(tokens))
    with running_kvd(tmp_path, "--log-level", "debug", "--listen", address, *tls) as kvd:
        with RawWorker(kvd.run_dir) as worker:
            worker.create_pool()
            worker.lease(16)
            ticket = new_ticket(kvd.run_dir)
            with grpc.insecure_channel(f"unix:{kvd.run_dir}/host0/grpc.sock") as channel:
                assert connect(channel, worker.token) == "TICKET_INVALID"
                assert connect(channel, ticket) != "TICKET_INVALID"
                assert connect(channel, ticket) == "TICKET_INVALID"
            for shown in (token, wrong):
                with grpc.secure_channel(address, channel_credentials(authority, token=shown)) as channel:
                    answer_to(channel, "/kvd.v1.AdminService/DropPool")
            eventually(lambda: audit_lines(kvd, "action"), "what the operator did")
            written = b"".join(path.read_bytes() for path in files_of(kvd))
        for secret in (worker.token, ticket):
            for shape in (
                secret,
                secret.hex().encode(),
                base64.b64encode(secret),
                repr(secret)[2:-1].encode(),
            ):
                assert shape not in written
        for text in (token, wrong):
            assert text.encode() not in written


def files_of(kvd: RunningKvd) -> list[Path]:
    """Logs, audit log, journal: whatever lies there as a file."""
    return [kvd.log, *(path for path in kvd.run_dir.rglob("*") if path.is_file())]
