"""Pages of lists: a token is the last key of the page before."""

from collections.abc import Iterable
from typing import TypeVar

from kvd.errors import InvalidArgumentError

MAX_PAGE_SIZE = 1000  # items; a page stays below a megabyte
DEFAULT_PAGE_SIZE = 100  # items, when none is asked for
MAX_TOKEN_CHARS = 64  # characters; a lease id or a session id

Key = TypeVar("Key", int, str)


def page_size_of(asked: int) -> int:
    """Raises InvalidArgumentError above MAX_PAGE_SIZE."""
    if asked > MAX_PAGE_SIZE:
        raise InvalidArgumentError(f"page_size={asked}; {MAX_PAGE_SIZE} are allowed")
    return asked or DEFAULT_PAGE_SIZE


def check_token(token: str) -> str:
    if len(token) > MAX_TOKEN_CHARS:
        raise InvalidArgumentError("page_token is none of kvd's; start again with an empty one")
    return token


def page(keys: Iterable[Key], after: Key, size: int) -> tuple[list[Key], str]:
    """The next `size` keys behind `after` in order, and the token of the page behind them."""
    following = sorted(key for key in keys if key > after)
    shown = following[:size]
    return shown, str(shown[-1]) if len(following) > size else ""
