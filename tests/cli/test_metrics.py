"""`kvctl metrics`, once and served, beside what `kvctl pool status` says."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from tests.cli.conftest import BLOCKS, Kvctl, Worker
from tests.running_kvd import PATIENCE_S, eventually, running_kvd

Samples = dict[tuple[str, ...], float]


def samples_of(text: str) -> Samples:
    """By name and label values, in the order of the labels' names."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_say_what_pool_status_says(kvctl: Kvctl, worker: Worker) -> None:
    document = kvctl("pool", "status", "-o", "json").document
    answer = kvctl("metrics")
    found, (pool,) = samples_of(answer.out), document["pools"]
    assert answer.status == 0
    for device in document["devices"]:
        name = device["device"]
        assert found["kvd_up", name] == 1
        assert found["kvd_health", name, "serving"] == 1
        assert found["kvd_health", name, "failing"] == 0
        assert found["kvd_daemon_info", name, "host", device["version"]] == 1
        assert found["kvd_device_memory_used_bytes", name] == device["memory_used_bytes"]
        assert found["kvd_sessions", name] == device["sessions"]
    for field in ("leases", "total_bytes", "compressions", "sink_blocks_locked", "waiting_calls"):
        series = {"total_bytes": "bytes", "compressions": "compressions_total"}.get(field, field)
        assert found[f"kvd_pool_{series}", "host0", "chat"] == pool[field], field
    states = {key[-1]: value for key, value in found.items() if key[0] == "kvd_pool_blocks"}
    assert states == {state: pool[f"blocks_{state}"] for state in states}
    assert sum(states.values()) == BLOCKS
    assert found["kvd_tenant_leases", "host0", f"uid:{os.getuid()}"] == 2


def test_metrics_have_one_format(kvctl: Kvctl) -> None:
    answer = kvctl("metrics", "-o", "json")
    assert (answer.status, answer.out) == (2, "")
    assert "leave -o away" in answer.err


def test_an_address_that_cannot_be_served_is_the_operators_mistake(kvctl: Kvctl) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        answer = kvctl("metrics", "--listen", address)
    assert answer.status == 2
    assert f"--listen {address}: Address already in use" in answer.err


@contextmanager
def served(run_dir: Path) -> Iterator[str]:
    """A `kvctl metrics --listen`; its URL."""
    command = [sys.executable, "-c", "import sys; from kvd_client.cli import main; sys.exit(main())"]
    command += ["--run-dir", str(run_dir), "metrics", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            line = server.stderr.readline()
            yield next(word for word in line.split() if word.startswith("http")).rstrip(";")
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(PATIENCE_S) == -signal.SIGTERM
            assert server.stderr.read() == ""


def scraped(url: str) -> Samples:
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return samples_of(answer.read().decode())


def test_a_server_of_metrics_outlives_the_kvd_it_asks(tmp_path: Path) -> None:
    with served(tmp_path / "run") as url:
        assert scraped(url) == {}
        with running_kvd(tmp_path, "--host-memory", "16MiB") as kvd:
            eventually(lambda: scraped(url).get(("kvd_health", "host0", "serving")) == 1, "a kvd that serves")
            kvd.process.send_signal(signal.SIGSTOP)  # nobody starts another daemon meanwhile
            pid = kvd.daemon_pid()
            try:
                subprocess.run(["kill", "-9", str(pid)], check=True)
                eventually(lambda: scraped(url).get(("kvd_up", "host0")) == 0, "the death to be noticed")
            finally:
                kvd.process.send_signal(signal.SIGCONT)
            eventually(lambda: scraped(url).get(("kvd_up", "host0")) == 1, "the next daemon")
