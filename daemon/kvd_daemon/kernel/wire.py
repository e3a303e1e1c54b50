"""Frames between daemon and kernel worker: a JSON header, then raw arrays. No pickle, bounded sizes.

frame   u32 header bytes | u32 body bytes | header | body
header  {"kind": class name, "fields": {...}, "arrays": [[name, dtype, shape], ...]}
body    the arrays' bytes one after the other, C-contiguous
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from kvd_daemon.kernel.messages import BY_KIND, Message

PREFIX = struct.Struct("<II")
MAX_HEADER_BYTES = 64 << 10  # bytes; names, numbers and a geometry
MAX_BODY_BYTES = 128 << 20  # bytes; a block table of the largest pool, twice
ARRAY_DTYPES = {"int32": np.int32, "uint32": np.uint32, "float32": np.float32, "float64": np.float64}


class WireError(Exception):
    """Bytes that no side of this package writes; the connection ends."""


def encode(message: Message) -> bytes:
    """The whole frame."""
    values = {field.name: getattr(message, field.name) for field in fields(message)}
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    header = json.dumps(
        {
            "kind": type(message).__name__,
            "fields": {name: value for name, value in values.items() if name not in arrays},
            "arrays": [[name, array.dtype.name, array.shape] for name, array in arrays.items()],
        }
    ).encode()
    body = b"".join(array.tobytes() for array in arrays.values())
    assert len(header) <= MAX_HEADER_BYTES, "a header beyond its limit"
    assert len(body) <= MAX_BODY_BYTES, "a body beyond its limit"
    return PREFIX.pack(len(header), len(body)) + header + body


def sizes(prefix: bytes) -> tuple[int, int]:
    """Bytes of header and body. Raises WireError beyond the limits."""
    header_bytes, body_bytes = PREFIX.unpack(prefix)
    if header_bytes > MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
        raise WireError(f"a frame of {header_bytes} + {body_bytes} bytes")
    return header_bytes, body_bytes


def decode(header: bytes, body: bytes) -> Message:
    """The message of a frame. Raises WireError."""
    try:
        parsed = json.loads(header)
        kind = BY_KIND[parsed["kind"]]
        return kind(**parsed["fields"], **_arrays(parsed["arrays"], body))
    except (ValueError, KeyError, TypeError) as error:
        raise WireError(f"a frame that makes no sense: {error!r}") from error


def _arrays(layout: list[tuple[str, str, list[int]]], body: bytes) -> Mapping[str, Any]:
    arrays, offset = {}, 0
    for name, dtype, shape in layout:
        array = np.frombuffer(body, ARRAY_DTYPES[dtype], int(np.prod(shape)), offset).reshape(shape)
        arrays[name], offset = array, offset + array.nbytes
    return arrays
