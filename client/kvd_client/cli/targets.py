"""What kvctl speaks to: a device of this machine by its socket, or one elsewhere by TLS."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import grpc

from kvd.credentials import TICKET_METADATA
from kvd.errors import DeadlineExceededError, InvalidArgumentError, UnauthenticatedError, UnavailableError
from kvd.run_dir import DOWN_FILE, GRPC_SOCKET
from kvd_client._attach import ask_ticket
from kvd_client._endpoint import Endpoint

MAX_FILE_BYTES = 1 << 20  # bytes of a certificate, a key or a token; a chain of certificates is 10 KB
MAX_REPLY_BYTES = 64 << 20  # bytes; the block table of the largest lease
OPTIONS = [("grpc.max_receive_message_length", MAX_REPLY_BYTES)]
PROVEN_PREFIX = "/kvd.v1.AdminService/"  # calls that say who makes them
START_HINT = "start one with: kvd --host-memory 2GiB"


class Target(Protocol):
    """A daemon."""

    @property
    def device(self) -> str:
        """How it is called in what kvctl shows."""
        ...

    def channel(self, timeout_s: float) -> grpc.Channel:
        """Its calls carry a proof of who makes them."""
        ...

    def why_away(self, details: str) -> str:
        """In words, if nobody answers."""
        ...


@dataclass(frozen=True)
class LocalDevice:
    """The kernel tells its daemon who asks, at the attach socket."""

    endpoint: Endpoint

    @property
    def device(self) -> str:
        return self.endpoint.device

    def channel(self, timeout_s: float) -> grpc.Channel:
        channel = grpc.insecure_channel(self.endpoint.grpc_target, options=OPTIONS)
        return grpc.intercept_channel(channel, _WithTicket(self.endpoint.attach_path, timeout_s))

    def why_away(self, details: str) -> str:
        """The supervisor's word, if it left one."""
        folder = self.endpoint.directory
        try:
            return f"no daemon answers: {(folder / DOWN_FILE).read_text()}"
        except OSError:
            return f"no daemon answers at {folder / GRPC_SOCKET}; {START_HINT}"


@dataclass(frozen=True)
class RemoteDevice:
    """`address` is HOST:PORT."""

    address: str
    credentials: grpc.ChannelCredentials = field(repr=False)

    @property
    def device(self) -> str:
        return self.address

    def channel(self, timeout_s: float) -> grpc.Channel:
        return grpc.secure_channel(self.address, self.credentials, options=OPTIONS)

    def why_away(self, details: str) -> str:
        return (
            f"no daemon answers at {self.address} ({details}); look at its address, --tls-ca, and whether it "
            "wants a certificate (--tls-cert, --tls-key)"
        )


@dataclass(frozen=True)
class TlsWords:
    """Files of the command line; None where one is not named."""

    tls_ca: str | None
    tls_cert: str | None
    tls_key: str | None
    token_file: str | None

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises InvalidArgumentError on files that cannot be read."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidArgumentError("--tls-cert and --tls-key belong together; give both or neither")
        tls = grpc.ssl_channel_credentials(
            _read(self.tls_ca, "--tls-ca"),
            _read(self.tls_key, "--tls-key"),
            _read(self.tls_cert, "--tls-cert"),
        )
        secret = _read(self.token_file, "--token-file")
        if secret is None:
            return tls
        bearer = grpc.access_token_call_credentials(_token(secret))
        return grpc.composite_channel_credentials(tls, bearer)

    def refuse_without_endpoint(self) -> None:
        """Raises InvalidArgumentError if a word is given that is only for a daemon elsewhere."""
        if any((self.tls_ca, self.tls_cert, self.tls_key, self.token_file)):
            raise InvalidArgumentError("--tls-ca, --tls-cert, --tls-key and --token-file are for --endpoint")


def _read(path: str | None, option: str) -> bytes | None:
    if path is None:
        return None
    try:
        with Path(path).open("rb") as file:
            return file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise InvalidArgumentError(f"{option} {path}: {os.strerror(error.errno or 0)}") from None


def _token(content: bytes) -> str:
    """The first word of the file. Never quoted in an error."""
    words = content.decode("ascii", errors="replace").split()
    if not words or not words[0].isascii() or not words[0].isprintable():
        raise InvalidArgumentError(
            "--token-file holds no token; put there what `kvctl token new` printed first"
        )
    return words[0]


class _Details(NamedTuple):
    method: str
    timeout: float | None
    metadata: list[tuple[str, str | bytes]]
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: Any


class _WithTicket(grpc.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]  # generic only in the stubs
    """A new ticket for every call that needs one: each is good for one call only."""

    def __init__(self, attach_path: str, timeout_s: float) -> None:
        self._attach_path = attach_path
        self._timeout_s = timeout_s

    def intercept_unary_unary(
        self, continuation: Callable[[Any, Any], Any], details: Any, request: Any
    ) -> Any:
        """Raises DeadlineExceededError, PermissionDeniedError."""
        ticket = self._ticket() if details.method.startswith(PROVEN_PREFIX) else b""
        if not ticket:
            return continuation(details, request)
        proven = _Details(
            details.method,
            details.timeout,
            [*(details.metadata or ()), (TICKET_METADATA, ticket)],
            details.credentials,
            getattr(details, "wait_for_ready", None),
            getattr(details, "compression", None),
        )
        return continuation(proven, request)

    def _ticket(self) -> bytes:
        """Empty if there is none to be had: the call will tell why, or do without."""
        try:
            return ask_ticket(self._attach_path, self._timeout_s)
        except DeadlineExceededError:
            raise DeadlineExceededError(
                f"no answer within {self._timeout_s:g} s; look at its log, or raise --timeout"
            ) from None
        except (UnavailableError, UnauthenticatedError):
            return b""
