"""opcode -> what it does, filled by the modules of operations."""

from collections.abc import Callable

OPERATIONS: dict[str, Callable[..., None]] = {}


def operation(opcode: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function (threads, instruction, active) for `opcode`."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        assert opcode not in OPERATIONS, opcode
        OPERATIONS[opcode] = function
        return function

    return register
