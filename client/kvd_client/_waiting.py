"""Waiting in the daemon's line for blocks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from kvd.v1 import kvd_pb2 as pb
from kvd_client._checked import seconds

Waiting = TypeVar(
    "Waiting",
    bound=pb.LeaseRequest | pb.ExtendRequest | pb.AdoptRequest | pb.ResumeRequest | pb.RestoreRequest,
)
"""A request that may wait."""


def wait_seconds(wait: object) -> float:
    """How long a call would stand in line. Raises InvalidArgumentError."""
    return seconds("wait", wait, 0.0)


@contextmanager
def waiting(request: Waiting, wait_s: float) -> Iterator[Waiting]:
    """The request waits for so many seconds; repeated later it does not: then only its reply counts."""
    if wait_s:
        request.max_wait.FromNanoseconds(int(wait_s * 1e9))
    try:
        yield request
    finally:
        request.ClearField("max_wait")
