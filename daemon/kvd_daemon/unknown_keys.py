"""A word in kvd.toml that nobody knows is a mistake; the close one that is known is the way out."""

import difflib
from collections.abc import Iterable, Sequence

from kvd.errors import InvalidArgumentError


def refuse_unknown(given: Iterable[str], known: Sequence[str], what: str) -> None:
    """Raises InvalidArgumentError: `what` is "setting", "key in [limits]" or the like."""
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            raise InvalidArgumentError(f"unknown {what} {key!r}; {hint}")
