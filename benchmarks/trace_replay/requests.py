"""Requests of a trace: JSON lines with timestamp (ms), input_length, output_length and hash_ids.

The format is that of the traces published with Mooncake (FAST'25): an id stands for 512 tokens and all before
them, so equal ids are reusable prefixes, usable only as an unbroken run from a request's first block.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BLOCK_TOKENS = 512  # of a trace's block


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt: when it came, how long it and its answer are in tokens, its blocks."""

    time_ms: int
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


def read(path: Path) -> list[Request]:
    """The trace in a file, in its order. Raises OSError, ValueError if it is none."""
    requests = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            told = json.loads(line)
            values = told["timestamp"], told["input_length"], told["output_length"]
            requests.append(Request(*values, tuple(told["hash_ids"])))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number} is no request: {error!r}") from error
    return requests


def accesses(requests: Sequence[Request]) -> int:
    """Blocks of all requests."""
    return sum(len(request.blocks) for request in requests)


def bound(requests: Sequence[Request]) -> float:
    """Share of blocks that were there before, in a leading run: what a cache without end would find."""
    seen: set[int] = set()
    found = 0
    for request in requests:
        for block in request.blocks:
            if block not in seen:
                break
            found += 1
        seen.update(request.blocks)
    return found / accesses(requests)
