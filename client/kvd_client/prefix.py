"""Names of prefixes: one hash per full block of a sequence, chained, so that it covers all tokens before it.

    hashes = kvd_client.prefix.hashes(token_ids, pool.spec.block_size, "llama3-8b@rev-3")

Root: SHA-256 of ROOT_TAG and the namespace. Each block: SHA-256 of the hash before it and its token ids as
little-endian uint32. Equal in every process and on every machine. An engine with block hashes of its own may
use those: kvd asks only for 32 bytes that differ where anything before differs.
"""

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from kvd.arguments import text, whole
from kvd.errors import InvalidArgumentError
from kvd.spec import MAX_BLOCK_SIZE
from kvd_client._checked import number_row

ROOT_TAG = b"kvd prefix 1\0"
MAX_NAMESPACE_CHARS = 1024  # characters; model, revision and adapter fit
MAX_TOKEN_ID = (1 << 32) - 1  # ids are uint32 here
TOKEN_BYTES = 4  # uint32


def hashes(tokens: Any, block_size: int, namespace: str = "") -> list[bytes]:
    """The hash of every full block of `tokens`, 32 bytes each; what does not fill a block has none.

    tokens     ids as a list, an array or a torch tensor, one axis
    namespace  whatever makes the same tokens another sequence of keys and values: model revision, adapter,
               system of rotation. Tenants and pools need not be named: the daemon keeps those apart itself.

    SHA-256, about 24 M tokens a second at 16 tokens a block: blake2b takes as long there and longer beyond.
    Raises InvalidArgumentError.
    """
    step = TOKEN_BYTES * whole("block_size", block_size, 1, MAX_BLOCK_SIZE)
    root = text("namespace", namespace, MAX_NAMESPACE_CHARS)
    raw = token_ids(tokens).tobytes()
    sha256, before = hashlib.sha256, hashlib.sha256(ROOT_TAG + root.encode()).digest()
    chain: list[bytes] = []
    for at in range(0, len(raw) - step + 1, step):
        before = sha256(before + raw[at : at + step]).digest()
        chain.append(before)
    return chain


def token_ids(tokens: Any) -> "npt.NDArray[np.uint32]":
    """As little-endian uint32 [n]. Raises InvalidArgumentError."""
    row = number_row("tokens", tokens, "iu", "a row of token ids, integers from 0 on,")
    if row.size and not 0 <= row.min() <= row.max() <= MAX_TOKEN_ID:
        raise InvalidArgumentError(
            f"token ids from {row.min()} to {row.max()}; integers from 0 to {MAX_TOKEN_ID} are needed"
        )
    return row.astype("<u4", copy=False)
