"""kvctl says who it is: by a ticket on this machine, by a certificate or a token elsewhere."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.running_kvd import RunningKvd, eventually, running_kvd

from kvd_client.cli import main

from .audit_lines import audit_lines
from .certificates import Authority
from .conftest import Ruled
from .test_matrix import free_port

Kvctl = Callable[..., tuple[int, str, str]]


@pytest.fixture
def kvctl(capsys: pytest.CaptureFixture[str]) -> Kvctl:
    """kvctl("pool", ...): the exit status, and what it said on stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "authority")


@pytest.fixture(scope="module")
def address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def tls_kvd(
    tmp_path_factory: pytest.TempPathFactory, authority: Authority, address: str
) -> Iterator[RunningKvd]:
    """Takes certificates, and tokens from those who have one."""
    folder = tmp_path_factory.mktemp("kvd")
    server, tokens, config = authority.issue("server", "127.0.0.1"), folder / "tokens", folder / "kvd.toml"
    tokens.touch(0o600)
    config.write_text('[[access.rules]]\ncertificate = "looker"\nroles = ["read-only"]\n')
    files = ("--tls-cert", server.cert, "--tls-key", server.key, "--token-file", tokens, "--config", config)
    arguments = ("--host-memory", "64MiB", "--listen", address, "--tls-client-ca", authority.pem, *files)
    with running_kvd(folder, *map(str, arguments)) as kvd:
        yield kvd


@pytest.fixture
def as_looker(tls_kvd: RunningKvd, authority: Authority, address: str) -> list[object]:
    """The words of somebody elsewhere who may only look."""
    shown = authority.issue("looker", common_name="looker")
    proof = ["--tls-cert", shown.cert, "--tls-key", shown.key]
    return ["--endpoint", address, "--tls-ca", authority.pem, *proof]


def test_a_certificate_gives_its_role_from_elsewhere(
    kvctl: Kvctl, tls_kvd: RunningKvd, as_looker: list[object], address: str
) -> None:
    assert (
        kvctl("--run-dir", tls_kvd.run_dir, "pool", "create", "chat", "--model", "llama-3-8b", "--blocks", 4)[
            0
        ]
        == 0
    )
    shown = json.loads(kvctl(*as_looker, "pool", "status", "chat", "-o", "json")[1])
    assert [device["device"] for device in shown["devices"]] == [address]
    assert [pool["device"] for pool in shown["pools"]] == [address]
    status, _, err = kvctl(*as_looker, "pool", "drop", "chat")
    assert status == 1
    assert "DropPool needs role operator; certificate:looker has read-only" in err
    refused = audit_lines(tls_kvd, "refusal")[-1]
    assert (refused["door"], refused["who"]) == ("tcp", "certificate:looker")
    assert refused["address"].startswith("ipv4:127.0.0.1:")


def test_a_token_made_by_kvctl_gives_its_role_once_its_line_is_in_the_file(
    kvctl: Kvctl, tls_kvd: RunningKvd, as_looker: list[object], tmp_path: Path
) -> None:
    made = json.loads(kvctl("token", "new", "ci", "--role", "operator", "-o", "json")[1])
    secret = tmp_path / "secret"
    secret.write_text(f"{made['token']}\n")
    as_ci = [*as_looker, "--token-file", secret]
    status, _, err = kvctl(*as_ci, "pool", "list")
    assert status == 1
    assert "the token is unknown" in err
    (tls_kvd.run_dir.parent / "tokens").write_text(f"{made['line']}\n")
    eventually(lambda: kvctl(*as_ci, "pool", "list")[0] == 0, "the token")
    assert kvctl(*as_ci, "pool", "create", "made", "--model", "llama-3-8b", "--blocks", 4)[0] == 0
    assert kvctl(*as_ci, "pool", "drop", "made")[0] == 0
    assert audit_lines(tls_kvd, "action")[-1]["who"] == "token:ci"


def test_a_new_token_is_shown_once_with_its_line_and_no_two_are_alike(kvctl: Kvctl) -> None:
    first, second = (kvctl("token", "new", "ann")[1].split("\n")[0] for _ in range(2))
    assert first != second
    assert len(first) == len("kvd_") + 43
    assert kvctl("token", "new", "a/b")[0] == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tls-ca", "x"], "are for --endpoint"),
        (["--endpoint", "h:1", "--run-dir", "x"], "give one"),
        (["--endpoint", "h:1", "--tls-cert", "x"], "belong together"),
        (["--endpoint", "h:1", "--tls-ca", "/no/such/file"], "No such file"),
        (["--endpoint", "h:1", "--device", "host0"], "called HOST:PORT"),
        (["--endpoint", "h:1", "--token-file", "/dev/null"], "holds no token"),
    ],
)
def test_words_that_do_not_fit_together_are_a_mistake(kvctl: Kvctl, words: list[str], said: str) -> None:
    status, _, err = kvctl(*words, "pool", "list")
    assert status == 2
    assert said in err


def test_a_daemon_whose_certificate_is_not_trusted_is_not_spoken_to(
    kvctl: Kvctl, tls_kvd: RunningKvd, address: str, tmp_path: Path
) -> None:
    elsewhere = Authority(tmp_path, "elsewhere")
    status, _, err = kvctl("--endpoint", address, "--tls-ca", elsewhere.pem, "pool", "list")
    assert status == 1
    assert "look at its address, --tls-ca" in err


def test_on_a_shared_socket_kvctl_proves_itself_by_tickets(kvctl: Kvctl, ruled_kvd: Ruled) -> None:
    """Also as kvd's own user, and for every page of a list."""
    kvd = ruled_kvd("")
    assert kvctl("--run-dir", kvd.run_dir, "lease", "list", "--all")[0] == 0
    assert audit_lines(kvd, "refusal") == []
