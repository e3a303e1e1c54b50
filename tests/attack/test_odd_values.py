"""What a careless worker may pass, refused by one of kvd's errors that names it."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.running_kvd import RunningKvd

import kvd_client
from kvd.policy import Keep

from .geometry import SPEC

NO_NUMBERS_OF_TOKENS = (float("nan"), 1.5, "16", None, True, -1, 2**31)


@pytest.fixture
def lease(shared_kvd: RunningKvd) -> Any:
    with kvd_client.connect(shared_kvd.run_dir) as client:
        yield client.pool("odd", SPEC, 8).lease(tokens=16)


@pytest.mark.parametrize("tokens", NO_NUMBERS_OF_TOKENS, ids=repr)
@pytest.mark.parametrize(
    "call",
    [
        lambda lease, tokens: lease.pool.lease(tokens=tokens),
        lambda lease, tokens: lease.extend(tokens),
        lambda lease, tokens: lease.commit(tokens),
    ],
    ids=["lease", "extend", "commit"],
)
def test_what_is_no_number_of_tokens_is_refused_and_changes_nothing(
    lease: kvd_client.Lease, call: Callable[[kvd_client.Lease, Any], object], tokens: Any
) -> None:
    with pytest.raises(kvd_client.InvalidArgumentError, match="tokens="):
        call(lease, tokens)
    assert (lease.length, lease.position, lease.capacity) == (0, 0, 16)


def test_a_policy_that_is_none_is_refused(lease: kvd_client.Lease) -> None:
    with pytest.raises(kvd_client.InvalidArgumentError, match="'snapkv'"):
        lease.pool.lease(tokens=16, policy="snapkv")  # type: ignore[arg-type]


@pytest.mark.parametrize("amount", ["1/0", 2**70], ids=repr)
def test_an_amount_to_keep_that_is_none_is_refused(amount: Any) -> None:
    with pytest.raises(kvd_client.InvalidArgumentError, match="keep="):
        Keep.of(amount)


@pytest.mark.parametrize("name", ["x" * 300, "\udc80"], ids=["long", "no text"])
def test_a_name_the_daemon_will_never_take_is_refused_at_once(shared_kvd: RunningKvd, name: str) -> None:
    with pytest.raises(kvd_client.InvalidArgumentError, match="name"):
        kvd_client.connect(shared_kvd.run_dir, name=name, timeout=1e6)
