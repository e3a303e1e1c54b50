"""Sizes as people write and read them: 128k tokens, 80 GiB, 3m 12s."""

import re

from kvd.errors import InvalidArgumentError

BYTE_UNITS = {"": 1, "B": 1}  # "G" alone is GiB, as for `kvd --host-memory`
for _power, _letter in enumerate("KMGT", start=1):
    BYTE_UNITS |= {_letter: 1024**_power, f"{_letter}IB": 1024**_power, f"{_letter}B": 1000**_power}
TOKEN_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}  # a "128k" context is 131,072 tokens
SIZE_STEPS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
TIME_STEPS = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))
MAX_SIZE = 1 << 62  # bytes or tokens; a typing mistake beyond it

_NUMBER = re.compile(r"(\d[\d_,]*(?:\.\d+)?)\s*([A-Za-z]*)")


def _parse(text: str, units: dict[str, int], wanted: str) -> int:
    match = _NUMBER.fullmatch(text.strip())
    unit = units.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise InvalidArgumentError(f"{text!r}; {wanted} is needed")
    digits = re.sub("[_,]", "", match[1])
    value = int(digits) * unit if digits.isdecimal() else round(float(digits) * unit)
    if not 1 <= value <= MAX_SIZE:
        raise InvalidArgumentError(f"{text!r} is out of range; {wanted} is needed")
    return value


def parse_bytes(text: str) -> int:
    """'2GiB', '80 GB', '4096' -> bytes. Raises InvalidArgumentError."""
    return _parse(text, BYTE_UNITS, "a size such as 512MiB, 80GiB or 80GB")


def parse_tokens(text: str) -> int:
    """'128k' -> 131072, '1M', '4096' -> tokens. Raises InvalidArgumentError."""
    return _parse(text, TOKEN_UNITS, "a number of tokens such as 4096, 128k or 1M")


def parse_memory(text: str) -> tuple[int, int]:
    """'8x80GiB' -> (8 devices, bytes of each); '141GiB' is one device. Raises InvalidArgumentError."""
    count, times, each = text.lower().partition("x")
    if not times:
        return 1, parse_bytes(text)
    if not count.strip().isdecimal() or int(count) < 1:
        raise InvalidArgumentError(f"{text!r}; a memory such as 141GiB or 8x80GiB is needed")
    return int(count), parse_bytes(each)


def show_bytes(count: int) -> str:
    """1288490188 -> '1.2 GiB': three digits at least, whole numbers without a fraction."""
    for step, unit in SIZE_STEPS:
        if count >= step:
            value = count / step
            return f"{value:,.0f} {unit}" if value == int(value) or value >= 100 else f"{value:.1f} {unit}"
    return f"{count} B"


def show_percent(part: int, whole: int) -> str:
    """'23.4 %'. Never '0.0 %' for something and never '100.0 %' for less than all."""
    if part == 0 or whole == 0:
        return "0 %"
    if part == whole:
        return "100 %"
    return f"{min(max(100 * part / whole, 0.1), 99.9):.1f} %"


def show_seconds(seconds: float) -> str:
    """192.4 -> '3m 12s': the two largest units."""
    left, parts = max(0, int(seconds)), list[str]()
    for step, unit in TIME_STEPS:
        if left >= step or (step == 1 and not parts):
            parts.append(f"{left // step}{unit}")
        elif parts:
            break
        left %= step
    return " ".join(parts[:2])
