"""The token file: one line per token with a name, a role and the token's SHA-256. Secrets are never in it."""

import re
from pathlib import Path

from kvd.credentials import TOKEN_NAME, token_hash
from kvd.errors import InvalidArgumentError, UnauthenticatedError

from .roles import Principal, Role
from .watched import read_bounded, refuse_if_others_may, stamp_of

MAX_TOKENS = 1000  # lines; a token per person and machine
MAX_TOKEN_CHARS = 256  # characters; kvd's own have 47
WRITABLE_BY_OTHERS = 0o022  # whoever may write the file may make an operator
ROLES = (Role.OPERATOR, Role.READ_ONLY)
HASH = re.compile(r"sha256:([0-9a-f]{64})")
LINE_HINT = "NAME ROLE sha256:HASH is needed, as `kvctl token new` prints it"


class Tokens:
    """The file as it was when it could last be read."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidArgumentError."""
        self._path = path
        self._stamp = stamp_of([path])
        self._by_hash = _read(path)

    def __len__(self) -> int:
        return len(self._by_hash)

    def refresh(self) -> bool:
        """True if the file changed and counts from now on.

        Raises InvalidArgumentError, once per change, if it cannot be used: the tokens before it still count.
        """
        stamp = stamp_of([self._path])
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        self._by_hash = _read(self._path)
        return True

    def of_token(self, token: str) -> Principal:
        """Raises UnauthenticatedError. What is compared are hashes: timing tells nothing about a token."""
        found = self._by_hash.get(token_hash(token)) if len(token) <= MAX_TOKEN_CHARS else None
        if found is None:
            raise UnauthenticatedError(
                "the token is unknown here, or was withdrawn; ask an operator for another"
            )
        return found


def _read(path: Path) -> dict[str, Principal]:
    refuse_if_others_may(path, WRITABLE_BY_OTHERS, "token file")
    try:
        lines = read_bounded(path, "token file").decode().splitlines()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"token file {path} is no text; {LINE_HINT}") from error
    by_hash: dict[str, Principal] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            digest, principal = _entry(words, f"token file {path}, line {number}")
            by_hash[digest] = principal
    if len(by_hash) > MAX_TOKENS:
        raise InvalidArgumentError(f"token file {path} has {len(by_hash)} tokens; {MAX_TOKENS} are allowed")
    return by_hash


def _entry(words: list[str], where: str) -> tuple[str, Principal]:
    """Never quotes the line: somebody may have put the token itself there."""
    if len(words) != 3 or not TOKEN_NAME.fullmatch(words[0]):
        raise InvalidArgumentError(f"{where}: {LINE_HINT}")
    if words[1] not in ROLES:
        raise InvalidArgumentError(
            f"{where}: the role must be {' or '.join(ROLES)}; a worker maps memory, which no network carries"
        )
    found = HASH.fullmatch(words[2])
    if found is None:
        raise InvalidArgumentError(f"{where}: the third word is no sha256: hash; {LINE_HINT}")
    return found[1], Principal(f"token:{words[0]}", frozenset((Role(words[1]),)), "")
