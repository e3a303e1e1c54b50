"""Leases with bytes that say whose they are."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from tests.running_kvd import eventually

import kvd_client

Answer = TypeVar("Answer")


def fill(lease: kvd_client.Lease, tokens: int, value: float) -> None:
    """`tokens` more, keys and values all `value`."""
    rows = np.full((tokens, 1, 8), value, np.float32)
    lease.write(0, lease.extend(tokens), rows, rows)
    lease.commit(tokens)


def values(lease: kvd_client.Lease) -> set[float]:
    """All that its visible slots hold."""
    k, v = lease.gather(0, "numpy")
    return set(np.unique(k).tolist()) | set(np.unique(v).tolist())


def patiently(call: Callable[[], Answer]) -> Answer:
    """Repeat what a loaded machine may not answer within a short deadline."""
    answers: list[Answer] = []

    def attempt() -> bool:
        try:
            answers.append(call())
        except (kvd_client.DeadlineExceededError, kvd_client.DeviceUnavailableError):
            return False
        return True

    eventually(attempt, "an answer")
    return answers[0]
