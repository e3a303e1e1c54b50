"""Certificates that are expired, not valid yet, or of another authority: with real processes, over TCP."""

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import trustme
from tests.client.daemon import Daemon
from tests.running_kvd import RunningKvd, running_kvd

import kvd_client

from .calls import answer_to
from .certificates import Authority, KeyPair, channel_credentials
from .test_matrix import free_port

STATUS = "/kvd.v1.AdminService/GetStatus"
DAY = datetime.timedelta(days=1)
RULE = '[[access.rules]]\ncertificate = "ops"\nroles = ["operator"]\n'


@dataclass(frozen=True)
class Door:
    kvd: RunningKvd
    address: str
    authority: Authority

    def answer(self, shown: KeyPair | None) -> str:
        """Of a new connection."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        credentials = channel_credentials(self.authority, shown)
        with grpc.secure_channel(self.address, credentials, options=options) as channel:
            return answer_to(channel, STATUS)


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    folder = tmp_path_factory.mktemp("certificates")
    authority, address = Authority(folder, "authority"), f"127.0.0.1:{free_port()}"
    pair, config = authority.issue("server", "127.0.0.1"), folder / "kvd.toml"
    config.write_text(RULE)
    tls = ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--tls-client-ca", str(authority.pem))
    with running_kvd(
        folder, "--host-memory", "64MiB", "--config", str(config), "--listen", address, *tls
    ) as kvd:
        yield Door(kvd, address, authority)


def issued(door: Door, name: str, until: datetime.timedelta, since: datetime.timedelta) -> KeyPair:
    now = datetime.datetime.now(datetime.UTC)
    return door.authority.issue(name, "ops.example", common_name="ops", valid=(now + since, now + until))


def test_a_good_certificate_opens_the_door(door: Door) -> None:
    assert door.answer(issued(door, "good", DAY, -DAY)) == "served"


@pytest.mark.parametrize(
    ("since", "until"), [(-2 * DAY, -DAY), (DAY, 2 * DAY)], ids=["expired", "not valid yet"]
)
def test_a_certificate_out_of_its_time_opens_nothing(
    door: Door, since: datetime.timedelta, until: datetime.timedelta
) -> None:
    assert door.answer(issued(door, "bad", until, since)) == "UNAVAILABLE"


def test_a_certificate_of_another_authority_or_none_opens_nothing(door: Door, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other").issue("ops", "ops.example", common_name="ops")
    assert door.answer(other) == "UNAVAILABLE"
    assert door.answer(None) == "UNAVAILABLE"


def test_a_certificate_that_signs_itself_opens_nothing(door: Door, tmp_path: Path) -> None:
    own = trustme.CA(organization_name="ops")
    pair = KeyPair(tmp_path / "own.pem", tmp_path / "own.key")
    own.cert_pem.write_to_path(pair.cert)
    own.private_key_pem.write_to_path(pair.key)
    assert door.answer(pair) == "UNAVAILABLE"


def test_workers_and_the_next_operator_are_served_all_the_same(door: Door) -> None:
    kvd_client.connect(door.kvd.run_dir, timeout=60).close()
    assert Daemon(door.kvd).status().epoch
    assert door.answer(issued(door, "good", DAY, -DAY)) == "served"
