"""Certificates and tokens that change under a running kvd."""

import os
import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tests.running_kvd import RunningKvd, eventually, running_kvd

from kvd.credentials import new_token, token_line
from kvd.errors import InvalidArgumentError, UnauthenticatedError
from kvd_daemon.access.certificates import Certificates, TlsFiles
from kvd_daemon.access.roles import Role
from kvd_daemon.access.tokens import Tokens

from .audit_lines import audit_lines
from .calls import answer_to
from .certificates import Authority, channel_credentials
from .test_matrix import free_port

STATUS = "/kvd.v1.AdminService/GetStatus"


def write(path: Path, *lines: str) -> None:
    """At once, as careful people do: nobody reads half a file."""
    fresh = path.with_suffix(".fresh")
    fresh.touch(0o600)
    fresh.write_text("".join(f"{line}\n" for line in lines))
    os.replace(fresh, path)


def test_a_token_counts_from_its_line_on_until_it_is_withdrawn(tmp_path: Path) -> None:
    first, second, path = new_token(), new_token(), tmp_path / "tokens"
    write(path, "# people", token_line("ann", "operator", first))
    tokens = Tokens(path)
    assert tokens.of_token(first).roles == {Role.OPERATOR}
    assert not tokens.refresh()
    write(path, token_line("bob", "read-only", second))
    assert tokens.refresh()
    assert tokens.of_token(second).name == "token:bob"
    with pytest.raises(UnauthenticatedError):
        tokens.of_token(first)


@pytest.mark.parametrize(
    "line",
    [
        "ann operator",
        "ann emperor sha256:" + "0" * 64,
        "ann worker sha256:" + "0" * 64,
        "ann operator md5:00",
        "ann operator sha256:" + "0" * 63,
        "a/b operator sha256:" + "0" * 64,
        "\x00",
    ],
)
def test_a_token_file_that_cannot_be_read_changes_nothing_and_is_not_quoted(
    tmp_path: Path, line: str
) -> None:
    token, path = new_token(), tmp_path / "tokens"
    write(path, token_line("ann", "operator", token))
    tokens = Tokens(path)
    write(path, f"{line} {token}" if line == "ann operator" else line)
    with pytest.raises(InvalidArgumentError, match="line 1") as told:
        tokens.refresh()
    assert token not in str(told.value)
    assert tokens.of_token(token).name == "token:ann"
    assert not tokens.refresh(), "once per change"


def test_a_token_file_that_vanished_changes_nothing(tmp_path: Path) -> None:
    token, path = new_token(), tmp_path / "tokens"
    write(path, token_line("ann", "operator", token))
    tokens = Tokens(path)
    path.unlink()
    with pytest.raises(InvalidArgumentError):
        tokens.refresh()
    assert tokens.of_token(token).name == "token:ann"


def test_a_certificate_whose_key_is_not_there_yet_waits_for_it(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    used, renewed = authority.issue("server", "a.example"), authority.issue("renewed", "a.example")
    certificates = Certificates(TlsFiles(used.cert, used.key))
    before = certificates.material
    os.replace(renewed.cert, used.cert)
    with pytest.raises(InvalidArgumentError, match="belong together"):
        certificates.refresh()
    assert certificates.material is before
    os.replace(renewed.key, used.key)
    assert certificates.refresh()
    assert certificates.material.key == used.key.read_bytes() != before.key
    assert "PRIVATE" not in repr(certificates.material)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "authority")


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    write(path)
    return path


@pytest.fixture
def address(tmp_path: Path, authority: Authority, tokens_file: Path) -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def tls_kvd(tmp_path: Path, authority: Authority, tokens_file: Path, address: str) -> Iterator[RunningKvd]:
    pair = authority.issue("server", "127.0.0.1")
    tls = ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--token-file", str(tokens_file))
    with running_kvd(tmp_path, "--host-memory", "64MiB", "--listen", address, *tls) as kvd:
        yield kvd


def answer(address: str, authority: Authority, token: str) -> str:
    """Of a new connection."""
    credentials = channel_credentials(authority, token=token)
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.secure_channel(address, credentials, options=options) as channel:
        return answer_to(channel, STATUS)


def shown_serial(address: str, authority: Authority) -> str:
    """Of the certificate that a new connection is shown."""
    context = ssl.create_default_context(cafile=authority.pem)
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port))) as raw,
        context.wrap_socket(raw, server_hostname=host) as tls,
    ):
        certificate = tls.getpeercert()
    assert certificate is not None
    return str(certificate["serialNumber"])


def test_a_running_kvd_takes_new_tokens_and_forgets_withdrawn_ones(
    tls_kvd: RunningKvd, authority: Authority, tokens_file: Path, address: str
) -> None:
    token = new_token()
    assert answer(address, authority, token) == "UNAUTHENTICATED"
    write(tokens_file, token_line("ann", "read-only", token))
    eventually(lambda: answer(address, authority, token) == "served", "the new token")
    write(tokens_file)
    eventually(lambda: answer(address, authority, token) == "UNAUTHENTICATED", "the end of the token")
    assert [line["what"] for line in audit_lines(tls_kvd, "reload")] == ["tokens", "tokens"]


def test_a_running_kvd_shows_a_renewed_certificate_to_new_connections(
    tls_kvd: RunningKvd, authority: Authority, address: str
) -> None:
    before = shown_serial(address, authority)
    authority.issue("server", "127.0.0.1")
    os.kill(tls_kvd.process.pid, signal.SIGHUP)
    eventually(lambda: shown_serial(address, authority) != before, "the renewed certificate")
    assert tls_kvd.daemon_pid()


def test_a_running_kvd_keeps_its_tokens_when_the_file_is_broken_and_says_so(
    tls_kvd: RunningKvd, authority: Authority, tokens_file: Path, address: str
) -> None:
    token = new_token()
    write(tokens_file, token_line("ann", "read-only", token))
    eventually(lambda: answer(address, authority, token) == "served", "the new token")
    write(tokens_file, "nonsense")
    eventually(lambda: "tokens stay as they were" in tls_kvd.log.read_text(), "a word about it")
    assert answer(address, authority, token) == "served"
    assert audit_lines(tls_kvd, "reload")[-1]["outcome"] == "failed"
