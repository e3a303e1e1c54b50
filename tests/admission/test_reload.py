"""kvd.toml is read again while tenants hold, want and wait for blocks."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from tests.daemon.raw_worker import TIMEOUT_S, RawWorker, new_ticket, reason_of
from tests.running_kvd import RunningKvd, eventually

from kvd.credentials import TICKET_METADATA
from kvd.v1 import kvd_pb2 as pb

from .test_waiting_workers import BLOCK, send, wait_until, waiting_request

THREADS = 3  # of the load
ROUNDS = 8  # reloads under it


def own_tenant(worker: RawWorker) -> str:
    return worker.opened.tenant


class Config:
    """The kvd.toml of a running kvd."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self.write("")

    def write(self, text: str) -> None:
        self._path.write_text(text)

    def reload(self, kvd: RunningKvd, text: str) -> None:
        """Returns when the supervisor has read it."""
        self.write(text)
        kvd.process.send_signal(signal.SIGHUP)
        self._read += 1
        eventually(
            lambda: kvd.log.read_text().count("the settings were read again") == self._read, "the reload"
        )


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(tmp_path / "kvd.toml")


@pytest.fixture
def kvd(start_kvd: Callable[..., RunningKvd], config: Config, tmp_path: Path) -> RunningKvd:
    return start_kvd("--config", str(tmp_path / "kvd.toml"))


class OperatorsWorker(RawWorker):
    """Where a rule speaks of our own user, operators show tickets."""

    def status(self) -> pb.GetStatusResponse:
        return self.admin.GetStatus(pb.GetStatusRequest(), timeout=TIMEOUT_S, metadata=self._ticket())

    def tenants(self) -> dict[str, pb.TenantInfo]:
        listed = self.admin.ListTenants(pb.ListTenantsRequest(), timeout=TIMEOUT_S, metadata=self._ticket())
        return {tenant.tenant: tenant for tenant in listed.tenants}

    def quarantined(self) -> int:
        """By a worker that renews its session."""
        self.renew()
        return self.pool_status().blocks_quarantined

    def _ticket(self) -> tuple[tuple[str, bytes], ...]:
        return ((TICKET_METADATA, new_ticket(self.run_dir)),)


def quota(tenant: str, blocks: int) -> str:
    return f'[tenants."{tenant}"]\nmax_blocks = {blocks}\n'


def test_a_maximum_that_is_raised_lets_those_go_on_who_wait_for_it(kvd: RunningKvd, config: Config) -> None:
    with RawWorker(kvd.run_dir) as worker:
        worker.create_pool()
        config.reload(kvd, quota(own_tenant(worker), 10))
        eventually(lambda: tenants(worker)[own_tenant(worker)].max_blocks == 10, "the maximum")
        worker.lease(10 * BLOCK)
        call = send(worker, waiting_request(worker, 5))
        wait_until(worker, 1)
        config.reload(kvd, quota(own_tenant(worker), 15))
        assert len(call.result().leases) == 1
        late = send(worker, waiting_request(worker, 5))
        wait_until(worker, 1)
        config.reload(kvd, quota(own_tenant(worker), 4))
        with pytest.raises(grpc.RpcError) as caught:
            late.result()
        assert reason_of(caught.value) == "QUOTA_EXCEEDED", "more than it may ever have: no wait helps"
        assert worker.pool_status().blocks_leased == 15, "nobody loses what was granted"


def tenants(worker: RawWorker) -> dict[str, pb.TenantInfo]:
    listed = worker.admin.ListTenants(pb.ListTenantsRequest(), timeout=TIMEOUT_S)
    return {tenant.tenant: tenant for tenant in listed.tenants}


def test_reloads_under_load_lose_no_call_and_no_block(kvd: RunningKvd, config: Config) -> None:
    over, unexpected = threading.Event(), list[str]()
    with RawWorker(kvd.run_dir) as watcher:
        watcher.create_pool()

        def load() -> None:
            with RawWorker(kvd.run_dir) as worker:
                while not over.is_set():
                    try:
                        [lease] = send(worker, waiting_request(worker, 20, wait_s=5.0)).result().leases
                        worker.release(lease)
                    except grpc.RpcError as error:
                        unexpected.append(reason_of(error))

        threads = [threading.Thread(target=load) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for number in range(ROUNDS):
            config.reload(kvd, quota(own_tenant(watcher), 20 + 10 * (number % 4)))
        over.set()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert unexpected == []
        status = watcher.pool_status()
        assert (status.leases, status.waiting_calls, status.blocks_leased) == (0, 0, 0)


def test_a_dropped_pool_ends_the_wait_for_it_at_once(kvd: RunningKvd, config: Config) -> None:
    with RawWorker(kvd.run_dir) as worker:
        worker.create_pool("here")
        worker.create_pool("gone")
        config.reload(kvd, quota(own_tenant(worker), 10))
        eventually(lambda: tenants(worker)[own_tenant(worker)].max_blocks == 10, "the maximum")
        worker.lease(10 * BLOCK, pool="here")
        request = worker.lease_request(5 * BLOCK, pool="gone")
        request.max_wait.FromSeconds(50)
        call = send(worker, request)
        eventually(lambda: worker.pool_status("gone").waiting_calls == 1, "a call that waits")
        worker.drop_pool("gone")
        with pytest.raises(grpc.RpcError) as caught:
            call.result()
        assert reason_of(caught.value) == "POOL_NOT_FOUND"


def test_a_tenant_that_is_called_otherwise_now_keeps_nothing_and_loses_nothing(
    start_kvd: Callable[..., RunningKvd], config: Config, tmp_path: Path
) -> None:
    """Its blocks are the old name's until its worker lets go of them; they count there, and nowhere else."""

    def rule(tenant: str) -> str:
        roles = 'roles = ["worker", "operator"]'
        return f'[[access.rules]]\nuid = {os.geteuid()}\n{roles}\ntenant = "{tenant}"\n' + quota(tenant, 40)

    config.write(rule("old"))
    kvd = start_kvd("--config", str(tmp_path / "kvd.toml"), "--session-ttl", "4s")
    worker = OperatorsWorker(kvd.run_dir)
    worker.create_pool()
    [lease] = worker.lease(30 * BLOCK)
    config.reload(kvd, rule("new"))
    with pytest.raises(grpc.RpcError) as ended:
        worker.stream.until("nothing that comes")
    assert reason_of(ended.value) == "SESSION_NOT_FOUND"
    with OperatorsWorker(kvd.run_dir) as renamed:
        assert own_tenant(renamed) == "new"
        [other] = renamed.lease(30 * BLOCK)
        eventually(lambda: renamed.quarantined() == 30, "the old session's TTL")
        assert {name: tenant.blocks for name, tenant in renamed.tenants().items()} == {"old": 30, "new": 30}
        renamed.renew()
        with pytest.raises(grpc.RpcError) as refused:
            renamed.lease(11 * BLOCK)
        assert reason_of(refused.value) == "QUOTA_EXCEEDED"
        renamed.release(other)
        worker.release(lease)
        assert renamed.pool_status().blocks_free == 64
    worker.channel.close()
