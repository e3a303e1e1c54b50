"""Values that users pass, checked where they are passed.

The rule: a value of a wrong type, or out of range, is an InvalidArgumentError that names the argument, shows
the value and says what is needed. Nothing was changed then. Numbers may be numpy's; True is no number.
"""

import operator
import reprlib
from collections.abc import Iterable
from numbers import Real
from typing import Any, SupportsIndex

from kvd.errors import InvalidArgumentError

MAX_SHOWN_CHARS = 80  # characters of a value in an error's text; a tensor's repr has thousands
MAX_SHOWN_BITS = 256  # bits of an integer that is shown by its digits; Python refuses those of huge ones


class _Shown(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = MAX_SHOWN_CHARS

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()
        return super().repr_int(x, level) if bits <= MAX_SHOWN_BITS else f"<an int of {bits} bits>"


_SHOWN = _Shown()


def shown(value: object) -> str:
    """`repr(value)` in one line of bounded length."""
    return " ".join(_SHOWN.repr(value).split())


def refused(name: str, value: object, needed: str) -> InvalidArgumentError:
    """The error for an argument: "tokens=-1; an integer from 0 to 9 is needed"."""
    return InvalidArgumentError(f"{name}={shown(value)}; {needed} is needed")


def whole(name: str, value: SupportsIndex, low: int, high: int) -> int:
    """An integer from `low` to `high`, numpy's too."""
    number = low - 1
    if not isinstance(value, bool):
        try:
            number = operator.index(value)
        except (TypeError, ValueError, RuntimeError):  # a tensor of several elements, or without memory
            number = low - 1
    if not low <= number <= high:
        raise refused(name, value, f"an integer from {low} to {high}")
    return number


def real(name: str, value: object, low: float, high: float) -> float:
    """A number from `low` to `high`, numpy's too; not NaN."""
    number: Any = value if isinstance(value, Real) and not isinstance(value, bool) else low - 1.0
    if not low <= number <= high:
        raise refused(name, value, f"a number from {low:g} to {high:g}")
    return float(number)


def text(name: str, value: object, max_chars: int) -> str:
    """A string of valid Unicode (odd file names may be none) with at most `max_chars` characters."""
    is_text = isinstance(value, str) and value.encode(errors="ignore").decode() == value
    if not is_text or len(str(value)) > max_chars:
        raise refused(name, value, f"a string of valid Unicode of at most {max_chars} characters")
    return str(value)


def one_of(name: str, value: object, allowed: Iterable[str]) -> str:
    """One of the allowed words."""
    words = tuple(allowed)
    if not isinstance(value, str) or value not in words:
        raise refused(name, value, f"one of {', '.join(words)}")
    return value


def listed(name: str, values: Any, needed: str) -> list[Any]:
    """`values` as a list: of a list, a tuple, an array or a generator, but not of one string or bytes."""
    if isinstance(values, str | bytes | bytearray | memoryview | dict):
        raise refused(name, values, needed)
    try:
        return list(values)
    except TypeError:
        raise refused(name, values, needed) from None
