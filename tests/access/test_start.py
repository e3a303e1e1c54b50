"""What kvd refuses to start with, and what it says that it would start with."""

import os
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd_daemon.cli import main
from kvd_daemon.settings import Settings, settings_from
from kvd_daemon.supervisor import OPERATOR_MISTAKE

from .certificates import Authority

Refusal = Callable[..., str]


@pytest.fixture
def refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """The one line of a kvd that does not start; it must have made nothing."""

    def ask(toml: str = "", *arguments: str) -> str:
        config = tmp_path / "kvd.toml"
        config.write_text(toml)
        run_dir = tmp_path / "run"
        command = ["--host-memory", "64MiB", "--run-dir", str(run_dir), "--config", str(config), *arguments]
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == OPERATOR_MISTAKE
        assert not run_dir.exists()
        said = capsys.readouterr()
        assert said.out == ""
        return said.err

    return ask


@pytest.fixture
def pem(tmp_path: Path) -> dict[str, str]:
    authority = Authority(tmp_path, "authority")
    one, other = authority.issue("one", "one.example"), authority.issue("other", "other.example")
    return {
        "ca": str(authority.pem),
        "cert": str(one.cert),
        "key": str(one.key),
        "other key": str(other.key),
    }


def test_a_plain_tcp_port_is_refused(refusal: Refusal) -> None:
    assert "without TLS is refused" in refusal("", "--listen", "0.0.0.0:7443")


def test_a_tcp_port_that_lets_everybody_in_is_refused(refusal: Refusal, pem: dict[str, str]) -> None:
    said = refusal("", "--listen", "0.0.0.0:7443", "--tls-cert", pem["cert"], "--tls-key", pem["key"])
    assert "--tls-client-ca" in said
    assert "--token-file" in said


def test_credentials_without_a_port_are_a_mistake(refusal: Refusal, pem: dict[str, str]) -> None:
    assert "tls_cert is for --listen" in refusal("", "--tls-cert", pem["cert"])


@pytest.mark.parametrize("address", ["7443", "host", "host:port", "host:99999", ":1", "http://h:1"])
def test_an_address_that_is_none_is_refused(refusal: Refusal, address: str) -> None:
    assert "HOST:PORT is needed" in refusal("", "--listen", address)


def test_a_key_of_another_certificate_is_refused(refusal: Refusal, pem: dict[str, str]) -> None:
    tls = ("--tls-cert", pem["cert"], "--tls-key", pem["other key"], "--tls-client-ca", pem["ca"])
    assert "belong together" in refusal("", "--listen", "127.0.0.1:7443", *tls)


def test_a_key_that_everybody_may_read_is_refused(refusal: Refusal, pem: dict[str, str]) -> None:
    Path(pem["key"]).chmod(0o644)
    tls = ("--tls-cert", pem["cert"], "--tls-key", pem["key"], "--tls-client-ca", pem["ca"])
    assert "chmod 0640" in refusal("", "--listen", "127.0.0.1:7443", *tls)


def test_a_token_file_that_others_may_write_is_refused(
    refusal: Refusal, pem: dict[str, str], tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.touch()
    tokens.chmod(0o666)
    tls = ("--tls-cert", pem["cert"], "--tls-key", pem["key"], "--token-file", str(tokens))
    assert "chmod 0644" in refusal("", "--listen", "127.0.0.1:7443", *tls)


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[acces]", "did you mean access?"),
        ("[access]\nrule = []", "did you mean rules?"),
        ("[[access.rules]]\nuuid = 1\nroles = []", "did you mean uid?"),
        ("[[access.rules]]\nuid = 1\nrole = 'worker'", "did you mean roles?"),
        ("[[access.rules]]\nuid = 1\nroles = ['woker']", "did you mean worker?"),
        ("[[access.rules]]\nroles = ['worker']", "exactly one of uid, gid, certificate"),
        ("[[access.rules]]\nuid = 1\ngid = 1\nroles = ['worker']", "exactly one of uid, gid, certificate"),
        ("[[access.rules]]\nuid = 1", 'roles = ["worker"]'),
        ("[[access.rules]]\nuid = -1\nroles = []", "a number from 0 to"),
        ("[[access.rules]]\nuid = 'no such user'\nroles = []", "no user 'no such user'"),
        ("[[access.rules]]\ngid = 'no such group'\nroles = []", "no group 'no such group'"),
        ("[[access.rules]]\nuid = 1\nroles = []\ntenant = 'a b'", "tenant is 'a b'"),
        ("[[access.rules]]\ncertificate = 'c'\nroles = ['worker']", "no network carries"),
        ("[[access.rules]]\ncertificate = ''\nroles = []", "common name"),
        ("access = 1", "[[access.rules]]"),
        ("[limits]\nsesions = 1", "did you mean sessions?"),
        ("[limits]\nsessions = 0", "an integer from 1 to"),
        ("[limits]\nmessage_bytes = true", "an integer from"),
        ("[pools.p]\ntenant = ['t']", "did you mean tenants?"),
        ("[pools.p]\ntenants = []", "a list of 1 to"),
        ("[pools]\np = 1", "tenants ="),
        ("socket_group = 'no such group'", "no group 'no such group'"),
        ("socket_group = 5", "a text in quotes"),
    ],
)
def test_a_mistake_in_kvd_toml_is_told_with_the_way_out(refusal: Refusal, toml: str, said: str) -> None:
    assert said in refusal(toml)


def test_a_group_that_kvds_user_is_not_in_is_refused_before_a_daemon_cannot_start(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 54_321)
    monkeypatch.setattr(os, "getgroups", lambda: [5])
    assert "user 54321 is not in group 54322" in refusal("socket_group = '54322'")


def test_check_config_prints_what_would_apply_as_a_kvd_toml(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "kvd.toml"
    config.write_text(
        "host_memory = '64MiB'\nsession_ttl = '1.5s'\n[limits]\nsessions = 7\n"
        "[[access.rules]]\nuid = 5\nroles = ['worker']\ntenant = 't'\n"
        "[[access.rules]]\ncertificate = 'ops'\nroles = ['operator', 'read-only']\n"
        "[pools.'a.b c']\ntenants = ['t', 'u']\n[tenants.t]\nmax_blocks = 9\n"
    )
    main(["--config", str(config), "--devices", "2", "--check-config"])
    printed = capsys.readouterr().out
    said = Settings(**settings_from(tomllib.loads(printed)))  # type: ignore[arg-type]
    written = settings_from(tomllib.loads(config.read_text()), {"devices": 2})
    assert said == Settings(**written)  # type: ignore[arg-type]
    assert said == Settings.from_json(said.to_json())
    assert [path.name for path in tmp_path.iterdir()] == ["kvd.toml"]
