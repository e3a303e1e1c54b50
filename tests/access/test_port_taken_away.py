"""A TCP port that is lost with a daemon: workers do not wait for it, operators read that it is gone."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.client.daemon import Daemon
from tests.running_kvd import RunningKvd, eventually, is_alive, running_kvd, start_kvd

import kvd_client
import kvd_client.cli
from kvd.credentials import new_token, token_line

from .certificates import Authority, KeyPair
from .test_matrix import free_port
from .test_renewal import answer, write

TOKEN = new_token()
SPEC = kvd_client.KVSpec(layers=1, kv_heads=1, head_dim=8, dtype="float32")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "authority")


@pytest.fixture
def pair(authority: Authority) -> KeyPair:
    return authority.issue("server", "127.0.0.1")


@pytest.fixture
def words(tmp_path: Path, pair: KeyPair) -> list[str]:
    """Of the command line, but for the port."""
    tokens = tmp_path / "tokens"
    write(tokens, token_line("ann", "operator", TOKEN))
    files = ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--token-file", str(tokens))
    return ["--host-memory", "64MiB", *files]


@contextlib.contextmanager
def without_a_daemon(kvd: RunningKvd) -> Iterator[None]:
    """It is killed, and the next one does not start yet."""
    old = kvd.daemon_pid()
    kvd.process.send_signal(signal.SIGSTOP)
    os.kill(old, signal.SIGKILL)
    eventually(lambda: not is_alive(old), "its end")
    yield
    kvd.process.send_signal(signal.SIGCONT)


def taken(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    other = socket.socket()
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def is_bound() -> bool:  # the last thread of a killed daemon takes the socket along
        with contextlib.suppress(OSError):
            other.bind((host, int(port)))
        return other.getsockname()[1] == int(port)

    eventually(is_bound, "the port")
    other.listen()
    return other


def status_page(kvd: RunningKvd, capsys: pytest.CaptureFixture[str]) -> str:
    kvd_client.cli.main(["--run-dir", str(kvd.run_dir), "pool", "status"])
    return capsys.readouterr().out


def test_a_port_taken_since_costs_workers_nothing_and_comes_back(
    tmp_path: Path, words: list[str], authority: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"127.0.0.1:{free_port()}"
    with running_kvd(tmp_path, *words, "--listen", address) as kvd:
        with kvd_client.connect(kvd.run_dir, timeout=60) as client:
            pool = client.pool("pool", SPEC, 8)
            with without_a_daemon(kvd):
                thief = taken(address)
            assert pool.lease(tokens=16).lease_id
        eventually(lambda: Daemon(kvd).status().health == "serving", "health, which is about workers")
        assert f"{address} cannot be opened" in Daemon(kvd).status().health_detail
        assert "degraded, operators cannot call by TCP" in status_page(kvd, capsys)
        thief.close()
        eventually(lambda: Daemon(kvd).status().health_detail == "", "the port")
        assert answer(address, authority, TOKEN) == "served"


def test_a_certificate_gone_bad_costs_workers_nothing_and_is_taken_when_it_is_good_again(
    tmp_path: Path, words: list[str], authority: Authority, pair: KeyPair
) -> None:
    address = f"127.0.0.1:{free_port()}"
    with running_kvd(tmp_path, *words, "--listen", address) as kvd:
        with kvd_client.connect(kvd.run_dir, timeout=60) as client:
            pool = client.pool("pool", SPEC, 8)
            with without_a_daemon(kvd):
                pair.cert.write_text("no certificate")
            assert pool.lease(tokens=16).lease_id
        eventually(lambda: "belong together" in Daemon(kvd).status().health_detail, "word of it")
        authority.issue("server", "127.0.0.1")
        eventually(lambda: Daemon(kvd).status().health_detail == "", "the port")
        assert answer(address, authority, TOKEN) == "served"


def test_a_reload_moves_a_port_that_could_not_be_opened(
    tmp_path: Path, words: list[str], authority: Authority
) -> None:
    first, second, config = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}", tmp_path / "kvd.toml"
    config.write_text(f'listen = "{first}"\n')
    with running_kvd(tmp_path, *words, "--config", str(config)) as kvd:
        with without_a_daemon(kvd):
            thief = taken(first)
        with thief:
            eventually(lambda: "cannot be opened" in kvd.log.read_text(), "the complaint")
            eventually(lambda: (kvd.run_dir / "host0/grpc.sock").exists(), "the next daemon")
            config.write_text(f'listen = "{second}"\n')
            kvd.process.send_signal(signal.SIGHUP)
            eventually(lambda: f"operators may call {second}" in kvd.log.read_text(), "the port")
            assert answer(second, authority, TOKEN) == "served"


def test_a_kvd_that_starts_with_a_port_that_is_taken_is_refused(tmp_path: Path, words: list[str]) -> None:
    with socket.socket() as thief:
        thief.bind(("127.0.0.1", 0))
        thief.listen()
        kvd = start_kvd(tmp_path, *words, "--listen", f"127.0.0.1:{thief.getsockname()[1]}")
        try:
            assert kvd.process.wait(60) == 2
            assert "choose a free port" in kvd.log.read_text()
        finally:
            kvd.kill()
