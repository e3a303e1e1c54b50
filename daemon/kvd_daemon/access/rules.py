"""[[access.rules]] of kvd.toml: users, groups and certificates, what they may be, and for which tenant.

The first rule that fits decides. kvd's own user and root come last: operators and workers, unless a rule
above says otherwise. Everybody else is refused.
"""

import grp
import pwd
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvd.errors import InvalidArgumentError, PermissionDeniedError
from kvd_daemon.unknown_keys import refuse_unknown

from .roles import ROLE_NAMES, Principal, Role

MAX_RULES = 1000  # rules; each is looked at for every new session
MAX_CERTIFICATE_CHARS = 256  # characters of a certificate's name; a DNS name has at most 253
MAX_ID = (1 << 32) - 2  # uid_t and gid_t; the last one means none
KEYS = ("uid", "gid", "certificate", "roles", "tenant")
SUBJECTS = ("uid", "gid", "certificate")
TENANT = re.compile(r"[A-Za-z0-9._:@/-]{1,64}")
OWN_ROLES = frozenset((Role.OPERATOR, Role.WORKER))


@dataclass(frozen=True)
class Rule:
    """Fits one user, group or certificate name. No roles: whoever it fits is refused.

    Without a tenant every user, and every certificate, is one of its own.
    """

    roles: frozenset[Role]
    uid: int | None = None
    gid: int | None = None
    certificate: str | None = None
    tenant: str = ""

    def principal(self, name: str) -> Principal:
        return Principal(name, self.roles, self.tenant or name)

    def to_table(self) -> dict[str, Any]:
        """As it stands in kvd.toml."""
        given = {key: getattr(self, key) for key in SUBJECTS if getattr(self, key) is not None}
        return given | {"roles": sorted(self.roles)} | ({"tenant": self.tenant} if self.tenant else {})


class Rules:
    """Rules in order, and what comes after the last one."""

    def __init__(self, rules: Sequence[Rule], own_uid: int) -> None:
        self._rules = rules
        self._own_uid = own_uid

    @property
    def judge_users(self) -> bool:
        """Whether the kernel's file permissions say less than the rules do."""
        return any(rule.certificate is None for rule in self._rules)

    def of_user(self, uid: int, gids: Iterable[int]) -> Principal:
        """Raises PermissionDeniedError if no rule lets this user in."""
        groups, name = frozenset(gids), f"uid:{uid}"
        for rule in self._rules:
            if (rule.uid is not None and rule.uid == uid) or (rule.gid is not None and rule.gid in groups):
                return _let_in(rule.principal(name))
        if uid in (self._own_uid, 0):
            return Principal(name, OWN_ROLES, name)
        return _let_in(Principal(name, frozenset(), name))

    def of_certificate(self, names: Sequence[str]) -> Principal:
        """`names`: subject and alternative names of a verified certificate. Raises PermissionDeniedError."""
        for rule in self._rules:
            if rule.certificate is not None and rule.certificate in names:
                return _let_in(rule.principal(f"certificate:{rule.certificate}"))
        return _let_in(Principal(f"certificate:{names[0] if names else ''}", frozenset(), ""))


def _let_in(principal: Principal) -> Principal:
    if not principal.roles:
        raise PermissionDeniedError(
            f"{principal.name} has no role here; an operator grants one in [[access.rules]] of kvd.toml",
            role="none",
            needed="any",
        )
    return principal


def rules_of(table: object) -> tuple[Rule, ...]:
    """The [access] table of a kvd.toml. Raises InvalidArgumentError naming the rule and the way out."""
    if not isinstance(table, Mapping):
        raise InvalidArgumentError(f"access is {table!r}; a table with [[access.rules]] is needed")
    refuse_unknown(table, ("rules",), "key in [access]")
    entries = table.get("rules", [])
    if not isinstance(entries, list) or len(entries) > MAX_RULES:
        raise InvalidArgumentError(f"access.rules: at most {MAX_RULES} tables [[access.rules]] are needed")
    return tuple(
        _rule(entry, f"rule {number} of [[access.rules]]") for number, entry in enumerate(entries, 1)
    )


def rules_table(rules: Sequence[Rule]) -> dict[str, object]:
    """The [access] table that `rules_of` reads these from."""
    return {"rules": [rule.to_table() for rule in rules]}


def _rule(entry: object, where: str) -> Rule:
    if not isinstance(entry, Mapping):
        raise InvalidArgumentError(f"{where} is {entry!r}; a table is needed")
    refuse_unknown(entry, KEYS, f"key in {where}")
    if sum(subject in entry for subject in SUBJECTS) != 1:
        raise InvalidArgumentError(f"{where}: exactly one of {', '.join(SUBJECTS)} is needed")
    roles = _roles(entry.get("roles"), where)
    if "certificate" in entry and Role.WORKER in roles:
        raise InvalidArgumentError(
            f"{where}: a worker maps memory, which no network carries; roles of a certificate are operator "
            "and read-only"
        )
    return Rule(
        roles=roles,
        uid=_uid(entry["uid"], where) if "uid" in entry else None,
        gid=gid_of(entry["gid"], where) if "gid" in entry else None,
        certificate=_certificate(entry["certificate"], where) if "certificate" in entry else None,
        tenant=_tenant(entry["tenant"], where) if "tenant" in entry else "",
    )


def _roles(value: object, where: str) -> frozenset[Role]:
    if not isinstance(value, list):
        raise InvalidArgumentError(f'{where}: a list is needed, e.g. roles = ["worker"] ([] refuses)')
    refuse_unknown(map(str, value), ROLE_NAMES, f"role in {where}")
    return frozenset(map(Role, value))


def _uid(value: object, where: str) -> int:
    try:
        return pwd.getpwnam(value).pw_uid if isinstance(value, str) else _id(value, f"{where}: uid")
    except (KeyError, ValueError):
        raise InvalidArgumentError(f"{where}: no user {value!r} on this machine; give its number") from None


def gid_of(value: object, where: str) -> int:
    """A group by name or number. Raises InvalidArgumentError."""
    try:
        return grp.getgrnam(value).gr_gid if isinstance(value, str) else _id(value, f"{where}: gid")
    except (KeyError, ValueError):
        raise InvalidArgumentError(f"{where}: no group {value!r} on this machine; give its number") from None


def _id(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_ID:
        raise InvalidArgumentError(f"{where} is {value!r}; a name or a number from 0 to {MAX_ID} is needed")
    return value


def _certificate(value: object, where: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_CERTIFICATE_CHARS:
        raise InvalidArgumentError(
            f"{where}: certificate is {value!r}; its common name or an alternative name is needed"
        )
    return value


def _tenant(value: object, where: str) -> str:
    if not isinstance(value, str) or not TENANT.fullmatch(value):
        raise InvalidArgumentError(f"{where}: tenant is {value!r}; 1 to 64 of [A-Za-z0-9._:@/-] are needed")
    return value
