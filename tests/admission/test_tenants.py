"""Quotas of a running kvd: from kvd.toml to what workers and operators see."""

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.daemon.raw_worker import RawWorker, error_info, quota_failure, retry_info
from tests.running_kvd import RunningKvd, eventually, is_alive

import kvd_client
from kvd_client.cli import main

ME = f"uid:{os.geteuid()}"
SPEC = kvd_client.KVSpec(layers=2, kv_heads=2, head_dim=8, dtype="float32", block_size=16)
LONG_S = 50  # seconds to wait; no test takes so long unless it hangs
BLOCK = 16  # tokens

StartKvd = Callable[..., RunningKvd]


def config(folder: Path, **tenants: dict[str, int]) -> Path:
    """A kvd.toml with these quotas; `me` is this user, `others` are all that are not named."""
    names = {"me": ME, "others": "*"}
    lines = []
    for tenant, quota in tenants.items():
        lines.append(f'[tenants."{names.get(tenant, tenant)}"]')
        lines += [f"{key} = {value}" for key, value in quota.items()]
    path = folder / "kvd.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def tenants(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What kvctl tenant list says, by name."""
    capsys.readouterr()
    assert main(["--run-dir", str(run_dir), "-o", "json", "tenant", "list"]) == 0
    return {row["tenant"]: row for row in json.loads(capsys.readouterr().out)["tenants"]}


def test_a_tenant_holds_no_more_than_its_maximum(start_kvd: StartKvd, tmp_path: Path) -> None:
    kvd = start_kvd("--config", str(config(tmp_path, me={"max_blocks": 10})))
    with RawWorker(kvd.run_dir) as worker:
        worker.create_pool()
        worker.lease(8 * BLOCK)
        with pytest.raises(grpc.RpcError) as caught:
            worker.lease(4 * BLOCK)
        assert dict(error_info(caught.value).metadata) == {
            "tenant": ME,
            "wanted_blocks": "4",
            "held_blocks": "8",
            "max_blocks": "10",
            "pool": "pool",
        }
        assert quota_failure(caught.value).violations[0].subject == f"tenant:{ME}"
        assert retry_info(caught.value).retry_delay.ToNanoseconds() > 0
        with pytest.raises(grpc.RpcError, match="have max_blocks of the tenant raised"):
            worker.lease(11 * BLOCK)


def test_what_is_guaranteed_to_others_stays_free(
    start_kvd: StartKvd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kvd = start_kvd("--config", str(config(tmp_path, search={"guaranteed_blocks": 40, "pin_blocks": 7})))
    with kvd_client.connect(kvd.run_dir) as client, client.pool("pool", SPEC, blocks=64) as pool:
        lease = pool.lease(tokens=22 * BLOCK)
        with pytest.raises(kvd_client.PoolExhaustedError, match="40 that are guaranteed to other tenants"):
            lease.extend(23 * BLOCK)
        shown = tenants(kvd.run_dir, capsys)
        assert shown["search"] == {
            "device": "host0",
            "tenant": "search",
            "blocks": 0,
            "max_blocks": None,
            "guaranteed_blocks": 40,
            "leases": 0,
            "sessions": 0,
            "waiting_calls": 0,
            "pin_blocks": 7,
            "pinned_blocks": 0,
            "max_parked_blocks": None,
            "parked_blocks": 0,
        }
        assert (shown[ME]["blocks"], shown[ME]["leases"], shown[ME]["sessions"]) == (22, 1, 1)


def test_a_tenant_parks_no_more_than_it_may_and_shelves_no_more_than_its_share(
    start_kvd: StartKvd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(tmp_path, me={"max_parked_blocks": 10})
    path.write_text(path.read_text() + "[limits]\nshelved_leases_per_tenant = 1\n")
    kvd = start_kvd("--config", str(path), "--host-tier", "4MiB")
    with kvd_client.connect(kvd.run_dir) as client, client.pool("pool", SPEC, blocks=64) as pool:
        first, second = (filled(pool, 6 * BLOCK) for _ in range(2))
        first.suspend()
        with pytest.raises(
            kvd_client.QuotaExceededError, match=r"may park 10 and has parked 6; .* max_parked_blocks"
        ):
            second.suspend()
        with pytest.raises(kvd_client.QuotaExceededError, match="max_parked_blocks"):
            second.compress(kvd_client.KeyDiff(keep=0.5), park=True)
        shown = tenants(kvd.run_dir, capsys)[ME]
        assert (shown["max_parked_blocks"], shown["parked_blocks"]) == (10, 6)
        first.resume()
        second.suspend()
        second.resume()
        first.publish("one")
        with pytest.raises(kvd_client.LimitExceededError, match=r"limits\.shelved_leases_per_tenant"):
            second.publish("two")
        first = pool.adopt("one")
        second.publish("two")


def filled(pool: kvd_client.Pool, tokens: int) -> kvd_client.Lease:
    lease = pool.lease(tokens=tokens)
    lease.extend(tokens)
    lease.commit(tokens)
    return lease


def test_new_quotas_apply_without_a_restart_and_bad_ones_not_at_all(
    start_kvd: StartKvd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kvd = start_kvd("--config", str(config(tmp_path, me={"max_blocks": 10})))
    with (
        kvd_client.connect(kvd.run_dir) as client,
        client.pool("pool", SPEC, blocks=64) as pool,
        ThreadPoolExecutor(1) as thread,
    ):
        first = pool.lease(tokens=8 * BLOCK)
        waiting = thread.submit(pool.lease, tokens=8 * BLOCK, wait=LONG_S)
        eventually(lambda: tenants(kvd.run_dir, capsys)[ME]["waiting_calls"] == 1, "a call in line")
        config(tmp_path, me={"max_block": 20})
        kvd.process.send_signal(signal.SIGHUP)
        eventually(lambda: "did you mean max_blocks?" in kvd.log.read_text(), "a word in the log")
        assert tenants(kvd.run_dir, capsys)[ME]["max_blocks"] == 10
        config(tmp_path, me={"max_blocks": 20})
        kvd.process.send_signal(signal.SIGHUP)
        assert waiting.result().capacity == first.capacity


@pytest.fixture
def pool(shared_kvd: RunningKvd) -> Any:
    with kvd_client.connect(shared_kvd.run_dir, timeout=10) as client:
        yield client.pool("pool", SPEC, blocks=31)


def test_a_worker_waits_longer_than_its_timeout_if_it_says_so(shared_kvd: RunningKvd, pool: Any) -> None:
    held = pool.lease(tokens=31 * BLOCK)
    with kvd_client.connect(shared_kvd.run_dir, timeout=0.3) as client, ThreadPoolExecutor(1) as thread:
        other = client.pool("pool")
        began = time.monotonic()
        waiting = thread.submit(other.lease_many, [kvd_client.LeaseWish(5 * BLOCK)] * 2, wait=LONG_S)
        eventually(lambda: time.monotonic() - began > 1, "more than its timeout to pass")
        assert not waiting.done()
        held.release()
        assert [lease.capacity for lease in waiting.result()] == [5 * BLOCK] * 2


def test_a_worker_that_waited_in_vain_is_told_what_helps(shared_kvd: RunningKvd, pool: Any) -> None:
    lease = pool.lease(tokens=31 * BLOCK)
    for call in (lambda: pool.lease(tokens=1, wait=0.1), lambda: lease.extend(32 * BLOCK, wait=0.1)):
        with pytest.raises(kvd_client.PoolExhaustedError):
            call()
    lease.release()


def test_a_lease_that_grows_waits_for_what_it_needs_and_not_for_blocks_ahead(
    shared_kvd: RunningKvd, pool: Any
) -> None:
    growing, held = pool.lease(tokens=BLOCK, lease_ahead=8), pool.lease(tokens=30 * BLOCK)
    with ThreadPoolExecutor(1) as thread:
        growing.extend(BLOCK)
        growing.commit(BLOCK)
        waiting = thread.submit(growing.extend, BLOCK, wait=LONG_S)
        with RawWorker(shared_kvd.run_dir) as other:
            eventually(lambda: other.pool_status().wanted_blocks == 1, "a call for one block")
        held.trim()
        assert waiting.result().size == BLOCK
    assert growing.capacity >= 2 * BLOCK


def test_a_frozen_daemon_costs_a_waiting_worker_its_wait_and_its_timeout(kvd: RunningKvd) -> None:
    with kvd_client.connect(kvd.run_dir, timeout=0.3) as client:
        pool = client.pool("pool", SPEC, blocks=31)
        pid = kvd.daemon_pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(kvd_client.DeadlineExceededError):
                pool.lease(tokens=BLOCK, wait=0.3)
        finally:
            os.kill(pid, signal.SIGCONT)
        with RawWorker(kvd.run_dir) as other:
            eventually(lambda: pool.lease(tokens=31 * BLOCK).release() is None, "all blocks to be there")
            assert other.pool_status().waiting_calls == 0


@pytest.mark.parametrize("end", ["killed", "restarted"])
def test_who_waits_goes_on_waiting_at_the_next_daemon(
    kvd: RunningKvd, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with kvd_client.connect(kvd.run_dir, timeout=LONG_S) as client, ThreadPoolExecutor(1) as thread:
        pool = client.pool("pool", SPEC, blocks=31)
        held = pool.lease(tokens=31 * BLOCK)
        waiting = thread.submit(pool.lease, tokens=5 * BLOCK, wait=LONG_S)
        wait_for_a_call_in_line(kvd, capsys)
        pid = kvd.daemon_pid()
        if end == "killed":
            os.kill(pid, signal.SIGKILL)
        else:
            assert main(["--run-dir", str(kvd.run_dir), "daemon", "restart"]) == 0
        eventually(lambda: not is_alive(pid), "the daemon to end")
        wait_for_a_call_in_line(kvd, capsys)
        held.release()
        assert waiting.result().capacity == 5 * BLOCK


def wait_for_a_call_in_line(kvd: RunningKvd, capsys: pytest.CaptureFixture[str]) -> None:
    """Also through times in which no daemon answers."""

    def waits() -> bool:
        capsys.readouterr()
        main(["--run-dir", str(kvd.run_dir), "-o", "json", "status"])
        pools = json.loads(capsys.readouterr().out)["pools"]
        return [pool["waiting_calls"] for pool in pools] == [1]

    eventually(waits, "a call in line")


def test_a_pool_in_which_blocks_are_pinned_for_good_is_not_dropped_unless_told_so(
    start_kvd: StartKvd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kvd = start_kvd("--config", str(config(tmp_path, me={"pin_blocks": 10})))
    drop = ["--run-dir", str(kvd.run_dir), "pool", "drop", "pool"]
    with kvd_client.connect(kvd.run_dir) as client, client.pool("pool", SPEC, blocks=64) as pool:
        hashes = [bytes([depth]) * 32 for depth in range(4)]
        with pool.lease() as lease:
            lease.extend(4 * BLOCK)
            lease.commit(4 * BLOCK)
            lease.seal(hashes)
            pin_id = pool.pin(hashes)
        assert main(drop) == 1
        told = capsys.readouterr().err
        assert f"hard pins, {pin_id} of tenant {ME};" in told
        assert "kvctl pin drop" in told
        pool.match(hashes, ttl=60)
        assert main([*drop, "--with-pins"]) == 0
        assert main([*drop, "--with-pins"]) == 1
