"""The two doors of a daemon, and how a caller proves at each who it is.

The Unix socket: gRPC does not see its peer's credentials, but the attach socket does. So workers prove
themselves by the ticket or the session token in their messages, and operators by a ticket in the metadata;
where nobody but kvd's user and root can open the socket, having opened it is proof enough.

TCP: a certificate that the client authority signed, or a token. Nobody is a worker there.
"""

from typing import Protocol

from kvd.credentials import TICKET_METADATA, TOKEN_METADATA, TOKEN_SCHEME
from kvd.errors import UnauthenticatedError
from kvd_daemon.access.audit import Caller
from kvd_daemon.access.roles import Principal, Role
from kvd_daemon.engine.engine import Engine

from .answering import Context
from .tls_port import TlsPort


class Door(Protocol):
    """`name` is for the audit log."""

    name: str

    def is_open_to(self, needed: Role | None) -> bool:
        """Whether calls that need this pass without a look at who calls."""
        ...

    def caller_of(self, context: Context) -> Caller:
        """Who calls, before anything is proven."""
        ...

    def principal_of(self, context: Context) -> Principal:
        """Raises UnauthenticatedError, PermissionDeniedError."""
        ...


class UnixDoor:
    name = "unix"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def is_open_to(self, needed: Role | None) -> bool:
        return needed in (None, Role.WORKER)

    def caller_of(self, context: Context) -> Caller:
        return Caller(self.name, "unproven")

    def principal_of(self, context: Context) -> Principal:
        ticket = metadata_of(context, TICKET_METADATA)
        if not ticket:
            return self._engine.gate.unproven()
        assert isinstance(ticket, bytes), "gRPC decodes what ends in -bin"
        peer = self._engine.sessions.redeem(ticket)
        peer.close()
        return self._engine.gate.rules.of_user(peer.uid, peer.gids)


class TlsDoor:
    name = "tcp"

    def __init__(self, engine: Engine, port: TlsPort) -> None:
        self._engine = engine
        self._port = port

    def is_open_to(self, needed: Role | None) -> bool:
        return False

    def caller_of(self, context: Context) -> Caller:
        return Caller(self.name, "unproven", (("address", context.peer()),))

    def principal_of(self, context: Context) -> Principal:
        words = metadata_of(context, TOKEN_METADATA)
        if isinstance(words, str) and words.startswith(TOKEN_SCHEME):
            return self._port.of_token(words.removeprefix(TOKEN_SCHEME))
        if not self._port.wants_certificates:
            raise UnauthenticatedError("a token is needed here: kvctl --token-file FILE")
        proven = context.auth_context()
        names = [*proven.get("x509_common_name", ()), *proven.get("x509_subject_alternative_name", ())]
        return self._engine.gate.rules.of_certificate([name.decode(errors="replace") for name in names])


def metadata_of(context: Context, key: str) -> str | bytes:
    """Empty if the call has none; of several the first."""
    for name, value in context.invocation_metadata() or ():
        if name == key:
            return value
    return ""
