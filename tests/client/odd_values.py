"""What a careless caller may pass, by name. Whoever accepts one of them says so."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch


class Foreign:
    """A tensor of another framework: it has a shape and a dtype, and is neither torch's nor numpy's."""

    def __init__(self, shape: tuple[int, ...], dtype: str = "float32") -> None:
        self.shape, self.dtype = shape, dtype


def _numbers() -> Iterator[int]:
    yield 1


def odd_values() -> dict[str, Any]:
    """By name; made anew, since a generator gives its values once."""
    return {
        "None": None,
        "True": True,
        "False": False,
        "0": 0,
        "-1": -1,
        "1.5": 1.5,
        "NaN": float("nan"),
        "infinity": float("inf"),
        "2**70": 2**70,
        "10**5000": 10**5000,
        "1j": 1j,
        "numpy NaN": np.float32("nan"),
        "numpy -1": np.int64(-1),
        "numpy 1.5": np.float64(1.5),
        "numpy True": np.True_,
        "numpy array": np.arange(3.0),
        "numpy scalar array": np.array(-1),
        "numpy objects": np.array([None, object()]),
        "a date": np.datetime64("2026-01-01"),
        "torch 1.5": torch.tensor(1.5),
        "torch tensor": torch.arange(3.0),
        "meta tensor": torch.empty(2, device="meta"),
        "sparse tensor": torch.eye(2).to_sparse(),
        "foreign tensor": Foreign((3,)),
        "empty text": "",
        "text": "x",
        "long text": "x" * 100_000,
        "no text": "\udc80",
        "text with zero": "a\0b",
        "bytes": b"x",
        "empty list": [],
        "list of text": ["x"],
        "list of None": [None],
        "list of -1": [-1],
        "ragged list": [[1], [1, 2]],
        "generator": _numbers(),
        "dict": {"x": 1},
        "object": object(),
        "class": int,
        "function": len,
    }


Call = Callable[..., object]
