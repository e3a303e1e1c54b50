"""Single PTX instructions that Numba has no name for, as functions of device code.

Addresses are uint64 (global memory) or uint32 (shared memory), in bytes. Source: PTX ISA 8.8.
"""

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any, TypeVar, cast

from llvmlite import ir
from numba import cuda
from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic

Value = Any
"""A Numba value inside a kernel: Python's annotations say nothing about it, the docstrings do."""

MEMORY = "~{memory}"
_F = TypeVar("_F", bound=Callable[..., Any])
_LLVM = {
    types.uint8: ir.IntType(8),
    types.uint16: ir.IntType(16),
    types.uint32: ir.IntType(32),
    types.uint64: ir.IntType(64),
    types.int32: ir.IntType(32),
    types.float32: ir.FloatType(),
}
_CONSTRAINT = {
    types.uint16: "h",
    types.uint32: "r",
    types.uint64: "l",
    types.int32: "r",
    types.float32: "f",
}


def inlined(function: _F) -> _F:
    """`function` as device code, inlined into each kernel that calls it."""
    return cast(_F, cuda.jit(device=True, inline="always")(function))


def _instruction(result: Any, operands: tuple[Any, ...], text: str, *, pure: bool = False) -> Value:
    """`text` as a function; $0.. are the results, then the operands. `pure`: may be moved and merged."""
    results = (
        tuple(result) if isinstance(result, types.UniTuple) else () if result == types.void else (result,)
    )
    constraints = ["=" + _CONSTRAINT[kind] for kind in results] + [_CONSTRAINT[kind] for kind in operands]
    returned = ir.VoidType() if not results else _LLVM[results[0]]
    if len(results) > 1:
        returned = ir.LiteralStructType([_LLVM[kind] for kind in results])
    joined = ",".join(constraints if pure else [*constraints, MEMORY])

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = assembly(builder, returned, list(arguments), text, joined)
        if result == types.void:
            return context.get_dummy_value()
        if len(results) == 1:
            return value
        return cgutils.pack_array(builder, [builder.extract_value(value, i) for i in range(len(results))])

    return declared(generate, result, operands)


def assembly(builder: Any, returned: Any, arguments: list[Any], text: str, constraints: str) -> Any:
    """A call of inline PTX in LLVM's spelling; with MEMORY among the constraints it stays where it is.

    All lanes of a warp must meet at one .sync instruction, so it must not be copied into branches.
    """
    function_type = ir.FunctionType(returned, [argument.type for argument in arguments])
    code = ir.InlineAsm(function_type, text, constraints, side_effect=MEMORY in constraints)
    return builder.call(code, arguments, attrs=("convergent",) if ".sync" in text else ())


def declared(generate: Callable[..., Any], result: Any, operands: tuple[Any, ...]) -> Value:
    """Numba's intrinsic of fixed types; it wants as many parameters by name as there are operands."""

    def declare(typing_context: Any, *operand_types: Any) -> Any:
        return result(*operands), generate

    names = ["typing_context", *(f"operand{i}" for i in range(len(operands)))]
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    declare.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return intrinsic(declare)


QUAD = types.UniTuple(types.uint32, 4)
_U16, _U32, _U64, _F32 = types.uint16, types.uint32, types.uint64, types.float32

load_u32 = _instruction(_U32, (_U64,), "ld.global.u32 $0, [$1];")
load_u16 = _instruction(_U16, (_U64,), "ld.global.u16 $0, [$1];")
load_u8 = _instruction(_U16, (_U64,), "ld.global.u8 $0, [$1];")
load_f32 = _instruction(_F32, (_U64,), "ld.global.f32 $0, [$1];")
load_quad = _instruction(QUAD, (_U64,), "ld.global.v4.u32 {$0, $1, $2, $3}, [$4];")

store_u32 = _instruction(types.void, (_U64, _U32), "st.global.u32 [$0], $1;")
store_u16 = _instruction(types.void, (_U64, _U16), "st.global.u16 [$0], $1;")
store_u8 = _instruction(types.void, (_U64, _U16), "st.global.u8 [$0], $1;")
store_f32 = _instruction(types.void, (_U64, _F32), "st.global.f32 [$0], $1;")
store_quad = _instruction(
    types.void, (_U64, _U32, _U32, _U32, _U32), "st.global.v4.u32 [$0], {$1, $2, $3, $4};"
)

load_shared_u32 = _instruction(_U32, (_U32,), "ld.shared.u32 $0, [$1];")
store_shared_pair = _instruction(types.void, (_U32, _U32, _U32), "st.shared.v2.u32 [$0], {$1, $2};")

copy_async = _instruction(types.void, (_U32, _U64, _U32), "cp.async.cg.shared.global [$0], [$1], 16, $2;")
"""(shared, global, count): 16 bytes on their way; of them `count` (0 or 16) are read, the rest are zero."""
commit_copies = _instruction(types.void, (), "cp.async.commit_group;")
wait_for_all_copies = _instruction(types.void, (), "cp.async.wait_group 0;")
wait_for_all_but_newest = _instruction(types.void, (), "cp.async.wait_group 1;")

exp2 = _instruction(_F32, (_F32,), "ex2.approx.ftz.f32 $0, $1;", pure=True)
"""2 ** x to 2 units in the last place; 0 below -126."""
fma = _instruction(_F32, (_F32, _F32, _F32), "fma.rn.f32 $0, $1, $2, $3;", pure=True)
bits_of = _instruction(_U32, (_F32,), "mov.b32 $0, $1;", pure=True)
from_bits = _instruction(_F32, (_U32,), "mov.b32 $0, $1;", pure=True)
from_float16 = _instruction(_F32, (_U16,), "cvt.f32.f16 $0, $1;", pure=True)
to_float16 = _instruction(_U16, (_F32,), "cvt.rn.f16.f32 $0, $1;", pure=True)
add = _instruction(_U32, (_U32, _U32), "add.u32 $0, $1, $2;", pure=True)
"""32-bit, where Numba would widen the sum to 64."""
multiply = _instruction(_U32, (_U32, _U32), "mul.lo.u32 $0, $1, $2;", pure=True)
quotient = _instruction(_U32, (_U32, _U32), "div.u32 $0, $1, $2;", pure=True)
"""Unsigned and unchecked: no divisor here is ever zero."""

match_lanes = _instruction(_U32, (_U32,), "match.any.sync.b32 $0, $1, 0xffffffff;")
"""Mask of the lanes that hold the same value."""
_ballot = _instruction(
    _U32, (_U32,), "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
)
_shuffle_xor = _instruction(_U32, (_U32, _U32), "shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;")
shuffle_up = _instruction(_U32, (_U32, _U32), "shfl.sync.up.b32 $0, $1, $2, 0, 0xffffffff;")
"""The value of the lane so many below; its own where there is none."""
shuffle_from = _instruction(_U32, (_U32, _U32), "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;")
"""The value of one lane. Numba's own shuffles are not marked convergent: NVVM copies them into branches."""


@inlined
def shuffle_xor(value: Value, step: Value) -> Value:
    """float32: the value of the lane whose number differs by `step`."""
    return from_bits(_shuffle_xor(bits_of(value), step))


@inlined
def ballot(predicate: Value) -> Value:
    """uint32 mask of the lanes where `predicate` holds."""
    return _ballot(types.uint32(1) if predicate else types.uint32(0))


def _shared_address(typing_context: Any, array: Any) -> Any:
    """uint32 address of a shared array's first element."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
        generic = builder.ptrtoint(data, _LLVM[_U64])
        text = "{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }"
        return assembly(builder, _LLVM[_U32], [generic], text, "=r,l")

    return types.uint32(array), generate


shared_address = intrinsic(_shared_address)
