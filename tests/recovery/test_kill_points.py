"""The daemon dies before, in the midst of, and after what it writes: whoever asked gets one answer, once."""

import os
import signal
from collections.abc import Iterator

import pytest
from tests.chaos.armed import ArmedKvd, armed_kvd
from tests.chaos.inject.kill_points import POINTS, SNAPSHOT_POINTS
from tests.client.daemon import Daemon
from tests.running_kvd import PATIENCE_S

import kvd_client
import kvd_client.cli

from .filling import fill, values

SPEC = kvd_client.KVSpec(layers=1, kv_heads=1, head_dim=8, dtype="float32")
GEOMETRY = ("--layers", "1", "--kv-heads", "1", "--head-dim", "8", "--dtype", "float32", "--blocks", "32")


@pytest.fixture(scope="module")
def armed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ArmedKvd]:
    with armed_kvd(tmp_path_factory.mktemp("armed")) as armed:
        yield armed


@pytest.fixture(autouse=True)
def kept(armed: ArmedKvd) -> Iterator[None]:
    """A worker that nobody's death may cost a byte."""
    with kvd_client.connect(armed.kvd.run_dir, timeout=PATIENCE_S) as client:
        lease = client.pool("kept", SPEC, 64).lease()
        fill(lease, 40, 7.0)
        yield
        lease.check()
        assert values(lease) == {7.0}
        assert Daemon(armed.kvd).status().recovery.state == "recovered"
        lease.release()


def kvctl(armed: ArmedKvd, *words: str) -> None:
    command = ["--run-dir", str(armed.kvd.run_dir), "--timeout", str(PATIENCE_S), *words]
    assert kvd_client.cli.main(command) == 0, armed.kvd.log.read_text()


def pool_names(armed: ArmedKvd) -> list[str]:
    return [status.pool.name for status in Daemon(armed.kvd).status().pools]


@pytest.mark.parametrize("point", POINTS)
def test_a_pool_is_created_and_dropped_once(
    armed: ArmedKvd, point: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with armed.dying_at(point):
        kvctl(armed, "pool", "create", "new", *GEOMETRY)
    assert "new on host0 created" in capsys.readouterr().out, "also where the first attempt had done it"
    with kvd_client.connect(armed.kvd.run_dir, timeout=PATIENCE_S) as client:
        lease = client.pool("new").lease()
        fill(lease, 32, 1.0)
        assert values(lease) == {1.0}
        lease.release()
    with armed.dying_at(point):
        kvctl(armed, "pool", "drop", "new")
    assert "dropped" in capsys.readouterr().out
    assert pool_names(armed) == ["kept"]


@pytest.mark.parametrize("point", POINTS)
def test_a_session_opens_though_the_daemon_dies_over_it(armed: ArmedKvd, point: str) -> None:
    with armed.dying_at(point):
        client = kvd_client.connect(armed.kvd.run_dir, timeout=PATIENCE_S)
    with client:
        assert client.pool("kept").lease(tokens=16).extend(16).size == 16


@pytest.mark.parametrize("point", POINTS)
def test_a_lease_is_revoked_once(armed: ArmedKvd, point: str, capsys: pytest.CaptureFixture[str]) -> None:
    with kvd_client.connect(armed.kvd.run_dir, timeout=PATIENCE_S) as client:
        lease = client.pool("kept").lease()
        fill(lease, 16, 1.0)
        with armed.dying_at(point):
            kvctl(armed, "lease", "revoke", str(lease.lease_id), "--cause", "test")
        assert "revoked" in capsys.readouterr().out
        with pytest.raises(kvd_client.LeaseRevokedError):
            lease.check()


def test_what_an_operator_changes_is_looked_for_until_a_daemon_answers(
    armed: ArmedKvd, capsys: pytest.CaptureFixture[str]
) -> None:
    kvctl(armed, "pool", "create", "new", *GEOMETRY)
    with kvd_client.connect(armed.kvd.run_dir, timeout=PATIENCE_S) as client:
        lease = client.pool("kept").lease()
        os.kill(armed.kvd.daemon_pid(), signal.SIGKILL)
        kvctl(armed, "lease", "revoke", str(lease.lease_id))
        os.kill(armed.kvd.daemon_pid(), signal.SIGKILL)
        kvctl(armed, "pool", "drop", "new")
    assert "dropped" in capsys.readouterr().out


@pytest.mark.parametrize("point", SNAPSHOT_POINTS)
def test_a_snapshot_that_was_not_finished_costs_nothing(armed: ArmedKvd, point: str) -> None:
    with armed.dying_at(point):
        os.kill(armed.kvd.daemon_pid(), signal.SIGTERM)
