"""One reason, one class, one status."""

import re

import pytest

from kvd import errors
from kvd.errors import BY_REASON, KvdError, PoolExhaustedError

GRPC_STATUSES = {
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "NOT_FOUND",
    "FAILED_PRECONDITION",
    "ABORTED",
    "ALREADY_EXISTS",
    "DATA_LOSS",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "INTERNAL",
}


def every_error() -> list[type[KvdError]]:
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, KvdError)]


def test_every_class_has_a_reason_of_its_own() -> None:
    reasons = [kind.reason for kind in every_error()]
    assert len(set(reasons)) == len(reasons)
    assert {reason: BY_REASON[reason] for reason in reasons} == {kind.reason: kind for kind in every_error()}


@pytest.mark.parametrize("kind", every_error())
def test_a_reason_is_in_capitals_and_a_status_is_one_of_grpcs(kind) -> None:
    assert re.fullmatch("[A-Z]+(_[A-Z]+)*", kind.reason)
    assert kind.status in GRPC_STATUSES
    assert kind.__doc__


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^([|` -]*)([A-Z]\w+Error)\b", line)
        if found:
            drawn.append((len(found[1]) // 4, found[2]))
    path: list[str] = []
    for depth, name in drawn:
        path[depth:] = [name]
        parent = getattr(errors, name).__base__.__name__
        assert depth == 0 or parent == path[depth - 1], name
    assert sorted(name for _, name in drawn) == sorted(kind.__name__ for kind in every_error())


def test_an_error_carries_its_numbers_by_name_and_when_to_come_back() -> None:
    error = PoolExhaustedError("2 blocks wanted", retry_after_ns=40, wanted_blocks=2, pool="a")
    assert str(error) == "2 blocks wanted"
    assert error.retry_after_ns == 40
    assert error.metadata == {"wanted_blocks": "2", "pool": "a"}
