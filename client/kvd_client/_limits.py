"""Numbers as the wire takes them."""

import operator
from typing import SupportsIndex

from kvd.errors import InvalidArgumentError

MAX_TOKENS = (1 << 31) - 1  # of one lease; positions are int32
MAX_CLIENT_NAME_CHARS = 256  # characters; the daemon takes no longer one
MAX_BLOCKS = (1 << 24) - 1  # of one pool; the daemon's own limit may be lower


def whole(name: str, value: SupportsIndex, high: int) -> int:
    """An integer from 0 to `high`, numpy's too. Raises InvalidArgumentError."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= high:
        raise InvalidArgumentError(f"{name}={value!r}; an integer from 0 to {high} is needed")
    return number


def client_name(name: str) -> str:
    """`name`, if a daemon takes it. Raises InvalidArgumentError."""
    is_text = name.encode(errors="ignore").decode() == name  # no lone surrogates, as in odd file names
    if not is_text or len(name) > MAX_CLIENT_NAME_CHARS:
        raise InvalidArgumentError(
            f"name={name[:MAX_CLIENT_NAME_CHARS]!r} of {len(name)} characters; "
            f"valid Unicode of at most {MAX_CLIENT_NAME_CHARS} is needed"
        )
    return name
