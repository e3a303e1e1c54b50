"""Numbers as the wire takes them."""

import operator
from typing import SupportsIndex

from kvd.errors import InvalidArgumentError

MAX_TOKENS = (1 << 31) - 1  # of one lease; positions are int32
MAX_BLOCKS = (1 << 24) - 1  # of one pool; the daemon's own limit may be lower


def whole(name: str, value: SupportsIndex, high: int) -> int:
    """An integer from 0 to `high`, numpy's too. Raises InvalidArgumentError."""
    number = operator.index(value)
    if not 0 <= number <= high:
        raise InvalidArgumentError(f"{name}={number}; an integer from 0 to {high} is needed")
    return number
