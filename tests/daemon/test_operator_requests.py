"""Operators' calls that are repeated: answered as the first one was, done once."""

import os
import signal

import grpc
import pytest
from tests.access.calls import STEERING, WORKING
from tests.client.daemon import Daemon
from tests.running_kvd import RunningKvd, eventually, is_alive

from kvd.v1 import kvd_pb2 as pb

from .raw_worker import SPEC, TIMEOUT_S, RawWorker, fresh_id, reason_of

NO_REQUEST_ID = {"Connect": "a stream; its ticket is good for one"}


def test_every_call_that_changes_something_has_a_request_id() -> None:
    without = set()
    for service in pb.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            changes = f"/{service.full_name}/{method.name}" in WORKING | STEERING
            if changes and "request_id" not in method.input_type.fields_by_name:
                without.add(method.name)
    assert without == set(NO_REQUEST_ID)


def test_repeated_calls_get_the_first_reply(kvd: RunningKvd) -> None:
    with RawWorker(kvd.run_dir) as worker:
        create = pb.AdminCreatePoolRequest(name="pool", spec=SPEC, blocks=64, request_id=fresh_id())
        first = worker.admin.AdminCreatePool(create, timeout=TIMEOUT_S)
        assert first.created
        assert worker.admin.AdminCreatePool(create, timeout=TIMEOUT_S) == first
        [lease] = worker.lease(100)
        revoke = pb.RevokeLeaseRequest(lease_id=lease.lease_id, cause="test", request_id=fresh_id())
        revoked = worker.admin.RevokeLease(revoke, timeout=TIMEOUT_S)
        assert revoked.quarantined_blocks == 7
        assert worker.admin.RevokeLease(revoke, timeout=TIMEOUT_S) == revoked
        worker.release(lease)
        drop = pb.DropPoolRequest(name="pool", request_id=fresh_id())
        assert worker.admin.DropPool(drop, timeout=TIMEOUT_S) == worker.admin.DropPool(
            drop, timeout=TIMEOUT_S
        )
        with pytest.raises(grpc.RpcError) as reused:
            worker.admin.DropPool(pb.DropPoolRequest(name="other", request_id=drop.request_id))
        assert reason_of(reused.value) == "REQUEST_REUSED"


def test_a_late_repetition_of_a_drain_does_not_undo_its_end(kvd: RunningKvd) -> None:
    with RawWorker(kvd.run_dir) as worker:
        drain = pb.DrainRequest(request_id=fresh_id())
        worker.admin.Drain(drain, timeout=TIMEOUT_S)
        worker.admin.Drain(pb.DrainRequest(resume=True, request_id=fresh_id()), timeout=TIMEOUT_S)
        worker.admin.Drain(drain, timeout=TIMEOUT_S)
        assert worker.status().health != "draining"
        kill_daemon(kvd)
        with Daemon(kvd).admin() as admin:
            admin.Drain(drain, timeout=TIMEOUT_S)
        assert Daemon(kvd).status().health == "draining", "the next daemon has not heard of it"


def kill_daemon(kvd: RunningKvd) -> None:
    """The next one serves when this returns."""
    pid = kvd.daemon_pid()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not is_alive(pid), "the daemon's end")
    eventually(lambda: kvd.log.read_text().count("kvd.main serving") == 2, "the next one")


def test_a_repeated_restart_does_not_replace_the_daemon_that_the_first_one_started(kvd: RunningKvd) -> None:
    restart = pb.RestartRequest(request_id=fresh_id())
    pid = kvd.daemon_pid()
    with Daemon(kvd).admin() as admin:
        admin.Restart(restart, timeout=TIMEOUT_S)
    eventually(lambda: not is_alive(pid), "the old daemon's end")
    eventually(lambda: kvd.log.read_text().count("kvd.main serving") == 2, "the next one")
    epoch = Daemon(kvd).status().epoch
    with Daemon(kvd).admin() as admin:
        assert admin.Restart(restart, timeout=TIMEOUT_S).epoch == epoch
    assert Daemon(kvd).status().epoch == epoch
    assert (
        "makes room"
        not in kvd.log.read_text().partition("kvd.main serving")[2].partition("kvd.main serving")[2]
    )
