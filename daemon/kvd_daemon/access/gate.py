"""Everything that decides who gets in, as one thing: it changes as a whole when kvd.toml is read again."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kvd.errors import UnauthenticatedError

from .audit import AuditLog
from .pool_tenants import PoolTenants
from .roles import NEEDED, Principal
from .rules import OWN_ROLES, Rule, Rules
from .serving_limits import ServingLimits

CONNECT = "/kvd.v1.SessionService/Connect"


@dataclass(frozen=True)
class Guarding:
    """What an operator decided. `shared`: a group may open the sockets, not only kvd's user and root."""

    rules: tuple[Rule, ...] = ()
    pools: PoolTenants = field(default_factory=PoolTenants)
    limits: ServingLimits = field(default_factory=ServingLimits)
    shared: bool = False
    audit_path: Path = Path(os.devnull)


class Gate:
    """Of one device."""

    def __init__(self, guarding: Guarding, device: str) -> None:
        self.audit = AuditLog(guarding.audit_path, device)
        self._shared = guarding.shared
        self.apply(guarding)

    def apply(self, guarding: Guarding) -> None:
        """From now on these rules, tenants of pools and limits count; the sockets stay as they are."""
        self.rules = Rules(guarding.rules, os.geteuid())
        self.pools = guarding.pools
        self.limits = guarding.limits

    def worker_of(self, uid: int, gids: Iterable[int]) -> Principal:
        """The user as a worker, with its tenant. Raises PermissionDeniedError if it may not be one."""
        principal = self.rules.of_user(uid, gids)
        principal.require(NEEDED[CONNECT], CONNECT)
        return principal

    def unproven(self) -> Principal:
        """Whoever opened the Unix socket and shows no ticket.

        As long as file permissions let in nobody but kvd's user and root, and no rule says otherwise of
        these two, having opened the socket proves as much as a ticket. Raises UnauthenticatedError if not.
        """
        if self._shared or self.rules.judge_users:
            raise UnauthenticatedError(
                "this socket is open to more than one user: show who you are with a ticket of the attach "
                "socket (kvctl does)"
            )
        return Principal("owner or root", OWN_ROLES, "")

    def close(self) -> None:
        self.audit.close()
