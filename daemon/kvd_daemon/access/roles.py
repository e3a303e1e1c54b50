"""What a caller may be to kvd, and which call needs which role: the one table."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvd.errors import PermissionDeniedError


class Role(StrEnum):
    """An operator may also look. Worker is a right of its own: it comes with memory."""

    WORKER = "worker"
    OPERATOR = "operator"
    READ_ONLY = "read-only"


ROLE_NAMES = tuple(role.value for role in Role)

NEEDED: Mapping[str, Role | None] = {
    "/kvd.v1.SessionService/Connect": Role.WORKER,
    "/kvd.v1.PoolService/CreatePool": Role.WORKER,
    "/kvd.v1.PoolService/GetPool": None,
    "/kvd.v1.LeaseService/Lease": Role.WORKER,
    "/kvd.v1.LeaseService/Extend": Role.WORKER,
    "/kvd.v1.LeaseService/Compress": Role.WORKER,
    "/kvd.v1.LeaseService/Observe": Role.WORKER,
    "/kvd.v1.LeaseService/Seal": Role.WORKER,
    "/kvd.v1.LeaseService/ReleaseBlocks": Role.WORKER,
    "/kvd.v1.LeaseService/Release": Role.WORKER,
    "/kvd.v1.ShareService/Match": Role.WORKER,
    "/kvd.v1.ShareService/Pin": Role.WORKER,
    "/kvd.v1.ShareService/Unpin": Role.WORKER,
    "/kvd.v1.ShareService/Fork": Role.WORKER,
    "/kvd.v1.ShareService/Publish": Role.WORKER,
    "/kvd.v1.ShareService/Adopt": Role.WORKER,
    "/kvd.v1.ShareService/Rest": Role.WORKER,
    "/kvd.v1.ShareService/Wake": Role.WORKER,
    "/kvd.v1.ShareService/Suspend": Role.WORKER,
    "/kvd.v1.ShareService/Resume": Role.WORKER,
    "/kvd.v1.ShareService/Restore": Role.WORKER,
    "/kvd.v1.ShareService/DropCheckpoint": Role.WORKER,
    "/kvd.v1.AdminService/GetStatus": Role.READ_ONLY,
    "/kvd.v1.AdminService/ListLeases": Role.READ_ONLY,
    "/kvd.v1.AdminService/GetLease": Role.READ_ONLY,
    "/kvd.v1.AdminService/ListSessions": Role.READ_ONLY,
    "/kvd.v1.AdminService/ListTenants": Role.READ_ONLY,
    "/kvd.v1.AdminService/ListPins": Role.READ_ONLY,
    "/kvd.v1.AdminService/RevokeLease": Role.OPERATOR,
    "/kvd.v1.AdminService/AdminCreatePool": Role.OPERATOR,
    "/kvd.v1.AdminService/DropPool": Role.OPERATOR,
    "/kvd.v1.AdminService/DropPin": Role.OPERATOR,
    "/kvd.v1.AdminService/Drain": Role.OPERATOR,
    "/kvd.v1.AdminService/Restart": Role.OPERATOR,
    "/grpc.health.v1.Health/Check": None,
    "/grpc.health.v1.Health/List": None,
    "/grpc.health.v1.Health/Watch": None,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Role.READ_ONLY,
}
"""By full method name: the role a caller needs; None where any caller will do that its door lets in."""


@dataclass(frozen=True)
class Principal:
    """A caller kvd knows. `name` is for people and the audit log, `tenant` whose blocks it leases."""

    name: str
    roles: frozenset[Role]
    tenant: str

    def may(self, needed: Role | None) -> bool:
        if needed is None or needed in self.roles:
            return True
        return needed is Role.READ_ONLY and Role.OPERATOR in self.roles

    def require(self, needed: Role | None, method: str) -> None:
        """Raises PermissionDeniedError."""
        if not self.may(needed):
            assert needed is not None
            held = ", ".join(sorted(self.roles)) or "none"
            raise PermissionDeniedError(
                f"{method.rpartition('/')[2]} needs role {needed}; {self.name} has {held}: ask for a rule in "
                "[[access.rules]] of kvd.toml",
                role=held,
                needed=needed,
            )
