"""How a caller proves who it is: the words that both sides of the wire must agree on."""

import hashlib
import re
import secrets

TICKET_METADATA = "kvd-ticket-bin"
"""Metadata of a call on the Unix socket: a single-use ticket of the attach socket (32 bytes)."""

TOKEN_METADATA = "authorization"
"""Metadata of a call over TLS: TOKEN_SCHEME and a token."""

TOKEN_SCHEME = "Bearer "
TOKEN_PREFIX = "kvd_"  # so that scanners for leaked secrets can know it
TOKEN_BYTES = 32  # 256 bits; nobody guesses one
TOKEN_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")


def new_token() -> str:
    """A secret that only its bearer ever holds; the daemon's file has its hash."""
    return TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def token_hash(token: str) -> str:
    """SHA-256 in hex. A token has 256 bits of its own, so it needs no salt and no slow hash."""
    return hashlib.sha256(token.encode()).hexdigest()


def token_line(name: str, role: str, token: str) -> str:
    """The token's line in the file that `kvd --token-file` reads: name, role, hash."""
    return f"{name} {role} sha256:{token_hash(token)}"
