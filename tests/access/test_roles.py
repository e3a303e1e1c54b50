"""The table of roles: it knows every call there is, and every call is what this page says it is."""

import pytest

from kvd.errors import PermissionDeniedError
from kvd_daemon.access.roles import NEEDED, Principal, Role

from .calls import ANYBODY, LOOKING, STEERING, WORKING, everything_served


def test_every_call_that_is_served_has_a_role_and_no_other_has() -> None:
    assert set(NEEDED) == everything_served()


def test_this_page_knows_every_call() -> None:
    assert everything_served() == ANYBODY | LOOKING | STEERING | WORKING


@pytest.mark.parametrize(
    ("calls", "needed"),
    [(WORKING, Role.WORKER), (STEERING, Role.OPERATOR), (LOOKING, Role.READ_ONLY), (ANYBODY, None)],
    ids=["working", "steering", "looking", "anybody"],
)
def test_the_table_says_the_same_as_this_page(calls: frozenset[str], needed: Role | None) -> None:
    assert {call for call, role in NEEDED.items() if role is needed} == calls


def test_calls_that_change_anything_are_not_for_lookers() -> None:
    changing = ("Create", "Drop", "Revoke", "Drain", "Restart", "Lease", "Extend", "Seal", "Release")
    for call in LOOKING | ANYBODY:
        name = call.rpartition("/")[2]
        assert not name.startswith(changing), call


def test_an_operator_may_look_a_looker_may_not_steer_and_neither_may_work() -> None:
    operator = Principal("o", frozenset((Role.OPERATOR,)), "")
    looker = Principal("r", frozenset((Role.READ_ONLY,)), "")
    assert operator.may(Role.READ_ONLY)
    assert not looker.may(Role.OPERATOR)
    assert not operator.may(Role.WORKER)
    assert not looker.may(Role.WORKER)
    with pytest.raises(PermissionDeniedError, match="DropPool needs role operator; r has read-only") as told:
        looker.require(Role.OPERATOR, "/kvd.v1.AdminService/DropPool")
    assert told.value.metadata == {"role": "read-only", "needed": "operator"}
