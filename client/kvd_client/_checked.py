"""What users pass to the client, as the wire takes it. See `kvd.arguments` for the rule."""

from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from kvd.arguments import listed, real, refused, shown, text, whole
from kvd.errors import InvalidArgumentError
from kvd.limits import (
    HASH_BYTES,
    MAX_CLIENT_NAME_CHARS,
    MAX_HASHES_PER_CALL,
    MAX_POOL_NAME_CHARS,
    MAX_TOKENS_PER_LEASE,
)

MIN_TIMEOUT_S = 0.001  # seconds; no answer comes earlier
MAX_TIMEOUT_S = 1e7  # seconds; four months, and the clocks of gRPC and of threads take it


def token_count(value: SupportsIndex) -> int:
    """A number of tokens, from 0 on."""
    return whole("tokens", value, 0, MAX_TOKENS_PER_LEASE)


def seconds(name: str, value: object, least_s: float = MIN_TIMEOUT_S) -> float:
    """A time in which an answer is needed; or one to wait, from `least_s` on."""
    return real(name, value, least_s, MAX_TIMEOUT_S)


def client_name(name: object) -> str:
    """What a daemon takes as a client's name."""
    return text("name", name, MAX_CLIENT_NAME_CHARS)


def pool_name(name: object) -> str:
    """Of a length that a daemon looks at; it says which characters it takes."""
    return text("name", name, MAX_POOL_NAME_CHARS)


def prefix_hashes(name: str, values: Any) -> list[bytes]:
    """A list of hashes, each 32 bytes."""
    needed = f"a list of hashes, {HASH_BYTES} bytes each,"
    hashes = listed(name, values, needed)
    for one in hashes:
        if not isinstance(one, bytes) or len(one) != HASH_BYTES:
            raise refused(name, [one], needed)
    if len(hashes) > MAX_HASHES_PER_CALL:
        raise InvalidArgumentError(f"{name}: {len(hashes)} hashes; {MAX_HASHES_PER_CALL} are allowed at once")
    return hashes


def number_row(name: str, values: Any, kinds: str, needed: str) -> npt.NDArray[Any]:
    """A row of numbers as an array: of a list, an array, or a torch tensor in this memory.

    `kinds` are numpy's letters: "iu" integers, "fiu" any. Raises InvalidArgumentError that says what is
    `needed`.
    """
    try:
        row = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):  # ragged, or a tensor elsewhere than in this memory
        raise refused(name, values, needed) from None
    if row.ndim != 1 or (row.size and row.dtype.kind not in kinds):
        raise refused(name, values, needed)
    return row


def slot_array(slots: Any, slot_count: int) -> npt.NDArray[np.int64]:
    """Pool slots as int64 [n], each below `slot_count`."""
    row = number_row("slots", slots, "iu", "a row of pool slots, integers as `extend` gives them,")
    if row.size and not 0 <= row.min() <= row.max() < slot_count:
        raise InvalidArgumentError(f"slots={shown(row)}; the pool has slots 0 to {slot_count - 1}")
    return row.astype(np.int64, copy=False)
