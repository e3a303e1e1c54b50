"""What would apply, in the words of kvd.toml: `kvd --check-config` prints it."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from kvd_daemon.settings import TABLES, Settings

BARE = re.compile(r"[A-Za-z0-9_-]+")  # a key that TOML takes without quotes
QUANTITIES: Mapping[str, tuple[str, Callable[[int], object]]] = {
    "host_memory_bytes": ("host_memory", int),
    "host_tier_bytes": ("host_tier", int),
    "spill_size_bytes": ("spill_size", int),
    "session_ttl_ns": ("session_ttl", lambda ns: f"{ns / 1e9:g}s"),
    "drain_timeout_ns": ("drain_timeout", lambda ns: f"{ns / 1e9:g}s"),
}


def page(settings: Settings) -> str:
    """A kvd.toml that says all of it."""
    lines = [_line(field.name, getattr(settings, field.name)) for field in fields(settings)]
    for name, (_, show) in TABLES.items():
        lines += _table(f"[{name}]", name, show(getattr(settings, name)))
    return "\n".join(line for line in lines if line) + "\n"


def _line(name: str, value: Any) -> str:
    """Empty for a table: those come last. Numbers, texts and lists are the same in TOML and JSON."""
    if name in TABLES:
        return ""
    key, show = QUANTITIES.get(name, (name, lambda same: same))
    return f"{key} = {json.dumps(show(value))}"


def _table(heading: str, path: str, table: Any) -> Iterator[str]:
    """A table with the tables in it."""
    nested = {key: value for key, value in table.items() if _is_nested(value)}
    plain = {key: value for key, value in table.items() if key not in nested}
    if plain:
        yield f"\n{heading}"
        yield from (f"{key} = {json.dumps(value)}" for key, value in plain.items())
    for key, value in nested.items():
        inner = f"{path}.{key if BARE.fullmatch(key) else json.dumps(key)}"
        for entry in value if isinstance(value, list) else [value]:
            yield from _table(f"[[{inner}]]" if isinstance(value, list) else f"[{inner}]", inner, entry)


def _is_nested(value: object) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list) and all(isinstance(e, Mapping) for e in value)
    )
