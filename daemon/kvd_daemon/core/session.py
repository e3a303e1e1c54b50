"""A worker's connection."""

from dataclasses import dataclass, field
from enum import StrEnum

from .lease import Lease
from .pins import Pin


class SessionState(StrEnum):
    """DETACHED: the stream was lost but the process lives; its leases stay until the TTL."""

    ACTIVE = "active"
    DETACHED = "detached"
    EXPIRED = "expired"


@dataclass(frozen=True)
class SessionIdentity:
    """Whom the socket showed: the peer's process and user, and the tenant they map to.

    `token_hash` (SHA-256 of the session's secret token) finds the session again after a restart.
    """

    session_id: str
    tenant: str
    pid: int
    uid: int
    client_name: str = ""
    token_hash: bytes = b""


@dataclass(eq=False)
class Session:
    """Leases and soft pins belong to it, by id."""

    identity: SessionIdentity
    ttl_ns: int
    opened_ns: int
    renewed_ns: int
    state: SessionState = SessionState.ACTIVE
    leases: dict[int, Lease] = field(default_factory=dict)
    pins: dict[int, Pin] = field(default_factory=dict)

    @property
    def session_id(self) -> str:
        return self.identity.session_id

    @property
    def tenant(self) -> str:
        return self.identity.tenant

    @property
    def expires_ns(self) -> int:
        return self.renewed_ns + self.ttl_ns

    def is_over(self, now_ns: int) -> bool:
        return self.state is SessionState.EXPIRED or now_ns >= self.expires_ns
