"""What a kernel is before it is compiled: a function, the types of its arguments, the block it wants."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba.cuda import types

BYTES = types.uint64  # a device address without element type
INT32S = types.CPointer(types.int32)
FLOATS = types.CPointer(types.float32)
DOUBLES = types.CPointer(types.float64)
ADDRESSES = types.CPointer(types.uint64)
INT = types.int32
FLOAT = types.float32


@dataclass(frozen=True)
class Kernel:
    """One kernel, specialised.

    name        unique among all specialisations; the entry's name in PTX
    function    Numba device code with side effects only
    parameters  Numba types of the arguments: addresses, numbers, named tuples of them
    threads     per block, along x
    """

    name: str
    function: Callable[..., None]
    parameters: tuple[Any, ...]
    threads: int

    @property
    def flat_parameters(self) -> list[Any]:
        """As a launch passes them: the fields of a named tuple one by one."""
        return [
            part
            for kind in self.parameters
            for part in (kind.types if isinstance(kind, types.NamedTuple) else (kind,))
        ]


def fields_type(fields: type, kinds: tuple[Any, ...]) -> Any:
    """The Numba type of a NamedTuple whose fields are of `kinds`; a launch passes them one by one."""
    return types.NamedTuple(kinds, fields)
