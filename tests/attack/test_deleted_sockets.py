"""Sockets that are deleted under a running kvd come back; a run dir that is gone is told."""

import shutil

import grpc
import pytest
from tests.client.daemon import Daemon
from tests.running_kvd import PATIENCE_S, RunningKvd, eventually

import kvd_client
from kvd.v1 import kvd_pb2 as pb
from kvd.v1 import kvd_pb2_grpc as rpc

from .geometry import SPEC


@pytest.mark.parametrize(
    "names", [["attach.sock"], ["grpc.sock"], ["attach.sock", "grpc.sock"]], ids=" ".join
)
def test_a_deleted_socket_is_bound_again_and_nobody_loses_anything(kvd: RunningKvd, names: list[str]) -> None:
    folder = kvd.run_dir / "host0"
    modes = [(folder / name).stat().st_mode for name in names]
    with kvd_client.connect(kvd.run_dir, name="old", timeout=PATIENCE_S) as client:
        session_id = client.session_id
        lease = client.pool("kept", SPEC, 8).lease(tokens=16)
        for name in names:
            (folder / name).unlink()
        eventually(lambda: all((folder / name).exists() for name in names), "the sockets")
        with kvd_client.connect(kvd.run_dir, name="new", timeout=PATIENCE_S) as other:
            assert other.pool("kept").lease(16).extend(16).size == 16
        assert lease.extend(32).size == 32
        assert client.session_id == session_id
        eventually(lambda: Daemon(kvd).status().health == "serving", "health")
    assert [(folder / name).stat().st_mode for name in names] == modes
    assert "somebody deleted" in kvd.log.read_text()


def test_a_socket_that_another_took_the_place_of_is_bound_again(kvd: RunningKvd) -> None:
    path = kvd.run_dir / "host0" / "attach.sock"
    path.unlink()
    path.touch()
    eventually(lambda: "attach.sock cannot be bound: Address already in use" in kvd.log.read_text(), "a word")
    eventually(lambda: "Address already in use" in Daemon(kvd).status().health_detail, "red health")
    path.unlink()
    eventually(lambda: Daemon(kvd).status().health == "serving", "health")
    kvd_client.connect(kvd.run_dir).close()


def test_a_device_whose_folder_was_removed_turns_red_and_says_what_to_do(kvd: RunningKvd) -> None:
    with grpc.insecure_channel(f"unix:{kvd.run_dir}/host0/grpc.sock") as channel:
        admin = rpc.AdminServiceStub(channel)
        admin.GetStatus(pb.GetStatusRequest(), timeout=PATIENCE_S)
        shutil.rmtree(kvd.run_dir / "host0")
        seen: list[pb.GetStatusResponse] = []

        def is_red() -> bool:
            seen[:] = [admin.GetStatus(pb.GetStatusRequest(), timeout=PATIENCE_S)]
            return "was removed" in seen[0].health_detail

        eventually(is_red, "red health")
        assert seen[0].health == "failing"
        assert f"restart this kvd (pid {kvd.process.pid})" in seen[0].health_detail
    assert not (kvd.run_dir / "host0" / "grpc.sock").exists()
