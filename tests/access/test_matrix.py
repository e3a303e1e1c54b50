"""Role x call x transport: every call that is served, by everyone who might make it, through every door."""

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from tests.daemon.raw_worker import new_ticket
from tests.running_kvd import RunningKvd, eventually, running_kvd

from kvd.credentials import TICKET_METADATA, new_token, token_line
from kvd.v1 import kvd_pb2 as pb
from kvd.v1 import kvd_pb2_grpc

from .calls import LOOKING, STEERING, WORKING, answer_to, in_order, is_refused, reason_of
from .certificates import Authority, channel_credentials
from .conftest import Ruled
from .peers import OTHER_UID, other_process

ALL = frozenset(in_order())
REFUSED: dict[str, frozenset[str]] = {
    "nobody": LOOKING | STEERING,
    "worker": LOOKING | STEERING,
    "read-only": STEERING,
    "operator": frozenset(),
}
"""What the Unix socket refuses a role. Calls of workers prove themselves by what is in their messages."""
ROLES = (("worker",), ("operator",), ("read-only",), ("operator", "worker"))


def rule(*roles: str, tenant: str = "theirs") -> str:
    listed = ", ".join(f'"{role}"' for role in roles)
    return f'[[access.rules]]\nuid = {OTHER_UID}\nroles = [{listed}]\ntenant = "{tenant}"\n'


@contextlib.contextmanager
def unix_channel(run_dir: Path) -> Iterator[grpc.Channel]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"unix:{run_dir}/host0/grpc.sock", options=options) as channel:
        yield channel


def refused_calls(answer: Callable[[str], str]) -> frozenset[str]:
    answers = {call: answer(call) for call in in_order()}
    return frozenset(call for call in ALL if is_refused(answers[call]))


def connect(channel: grpc.Channel, ticket: bytes) -> str:
    """The tenant of the session that a ticket opens, or the reason why it opens none."""
    opening = pb.ConnectRequest(open=pb.OpenSession(ticket=ticket, client_name="matrix"))
    stream = kvd_pb2_grpc.SessionServiceStub(channel).Connect(iter([opening]), timeout=60)
    try:
        return next(stream).opened.tenant
    except grpc.RpcError as error:
        return reason_of(error)
    finally:
        stream.cancel()


@pytest.mark.parametrize("roles", ROLES, ids="+".join)
def test_on_a_shared_unix_socket_a_ticket_gives_the_rights_of_its_user(
    ruled_kvd: Ruled, roles: tuple[str, ...]
) -> None:
    kvd = ruled_kvd(rule(*roles))
    with other_process(kvd.run_dir) as other, unix_channel(kvd.run_dir) as channel:
        assert connect(channel, other.ticket()) == ("theirs" if "worker" in roles else "PERMISSION_DENIED")
        refused = refused_calls(lambda call: answer_to(channel, call, ((TICKET_METADATA, other.ticket()),)))
    assert refused == frozenset.intersection(*(REFUSED[role] for role in roles))


def test_on_a_shared_unix_socket_nobody_gets_far_without_a_ticket(ruled_kvd: Ruled) -> None:
    kvd = ruled_kvd(rule())
    with other_process(kvd.run_dir) as other, unix_channel(kvd.run_dir) as channel:
        assert other.refusal() == "PERMISSION_DENIED"
        assert connect(channel, b"") == "TICKET_INVALID"
        assert refused_calls(lambda call: answer_to(channel, call)) == REFUSED["nobody"]


def test_calls_of_workers_are_heard_on_the_unix_socket_but_need_a_session(kvd: RunningKvd) -> None:
    with unix_channel(kvd.run_dir) as channel:
        answers = {call: answer_to(channel, call) for call in WORKING}
    assert answers.pop("/kvd.v1.SessionService/Connect") == "INVALID_ARGUMENT"
    assert set(answers.values()) == {"SESSION_NOT_FOUND"}


def test_a_unix_socket_that_only_its_owner_can_open_needs_no_ticket(kvd: RunningKvd) -> None:
    with unix_channel(kvd.run_dir) as channel:
        assert refused_calls(lambda call: answer_to(channel, call)) == frozenset()


def test_a_rule_about_users_makes_everybody_show_a_ticket(tmp_path: Path) -> None:
    """It may speak of kvd's own user or of root, whom file permissions do not tell apart."""
    config = tmp_path / "kvd.toml"
    config.write_text(rule("read-only"))
    status = "/kvd.v1.AdminService/GetStatus"
    with running_kvd(tmp_path, "--config", str(config)) as kvd, unix_channel(kvd.run_dir) as channel:
        assert answer_to(channel, status) == "UNAUTHENTICATED"
        assert answer_to(channel, status, ((TICKET_METADATA, new_ticket(kvd.run_dir)),)) == "served"


@dataclass(frozen=True)
class TlsKvd:
    """A kvd with a TCP port, and who may call it."""

    kvd: RunningKvd
    address: str
    authority: Authority
    tokens: dict[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def channel(self, credentials: grpc.ChannelCredentials) -> Iterator[grpc.Channel]:
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.secure_channel(self.address, credentials, options=options) as channel:
            yield channel

    def by_certificate(self, name: str) -> "contextlib.AbstractContextManager[grpc.Channel]":
        shown = self.authority.issue(name, f"{name}.example", common_name=name)
        return self.channel(channel_credentials(self.authority, shown))

    def wait_until_replaced(self, pid: int) -> None:
        """After a restart, which is one of the calls."""
        eventually(lambda: self.kvd.daemon_pid() != pid, "another daemon")
        with unix_channel(self.kvd.run_dir) as channel:
            call = "/kvd.v1.AdminService/GetStatus"
            eventually(lambda: answer_to(channel, call) == "served", "a daemon that answers")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.fixture(scope="module", params=["certificates", "tokens"])
def tls_kvd(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[TlsKvd]:
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder, "authority")
    server = authority.issue("server", "127.0.0.1")
    tokens = {role: new_token() for role in ("operator", "read-only", "stranger")}
    (folder / "tokens").write_text("".join(token_line(r, r, tokens[r]) + "\n" for r in ROLES_OF_TOKENS))
    (folder / "tokens").chmod(0o600)
    config = folder / "kvd.toml"
    config.write_text(CERTIFICATE_RULES)
    address = f"127.0.0.1:{free_port()}"
    proofs = {
        "certificates": ("--tls-client-ca", authority.pem),
        "tokens": ("--token-file", folder / "tokens"),
    }
    arguments = ["--listen", address, "--tls-cert", server.cert, "--tls-key", server.key, "--config", config]
    with running_kvd(folder, *map(str, [*arguments, *proofs[request.param]])) as kvd:
        yield TlsKvd(kvd, address, authority, tokens if request.param == "tokens" else {})


ROLES_OF_TOKENS = ("operator", "read-only")
CERTIFICATE_RULES = """
[[access.rules]]
certificate = "operator"
roles = ["operator"]
[[access.rules]]
certificate = "read-only.example"
roles = ["read-only"]
"""


@pytest.mark.parametrize("role", ["read-only", "stranger", "operator"])
def test_over_tcp_everybody_proves_who_they_are_and_nobody_is_a_worker(tls_kvd: TlsKvd, role: str) -> None:
    pid = tls_kvd.kvd.daemon_pid()
    if tls_kvd.tokens:
        opened = tls_kvd.channel(channel_credentials(tls_kvd.authority, token=tls_kvd.tokens[role]))
    else:
        opened = tls_kvd.by_certificate(role)
    with opened as channel:
        refused = refused_calls(lambda call: answer_to(channel, call))
    if role == "operator":
        tls_kvd.wait_until_replaced(pid)
    assert refused == (ALL if role == "stranger" else WORKING | REFUSED[role])


def test_over_tcp_nothing_is_heard_without_a_proof(tls_kvd: TlsKvd) -> None:
    with tls_kvd.channel(channel_credentials(tls_kvd.authority)) as channel:
        answers = {answer_to(channel, call) for call in in_order()}
    assert answers == ({"UNAUTHENTICATED"} if tls_kvd.tokens else {"UNAVAILABLE"})


def test_over_tcp_a_certificate_of_another_authority_is_no_proof(tls_kvd: TlsKvd, tmp_path: Path) -> None:
    forged = Authority(tmp_path, "forger").issue("operator", common_name="operator")
    with tls_kvd.channel(channel_credentials(tls_kvd.authority, forged)) as channel:
        answer = answer_to(channel, "/kvd.v1.AdminService/GetStatus")
    assert answer == ("UNAUTHENTICATED" if tls_kvd.tokens else "UNAVAILABLE")


def test_over_tcp_nothing_is_heard_without_tls(tls_kvd: TlsKvd) -> None:
    with grpc.insecure_channel(tls_kvd.address) as channel:
        assert answer_to(channel, "/grpc.health.v1.Health/Check") == "UNAVAILABLE"


def test_a_ticket_is_no_proof_over_tcp(tls_kvd: TlsKvd) -> None:
    metadata = ((TICKET_METADATA, new_ticket(tls_kvd.kvd.run_dir)),)
    with tls_kvd.channel(channel_credentials(tls_kvd.authority)) as channel:
        assert answer_to(channel, "/kvd.v1.AdminService/GetStatus", metadata) != "served"
