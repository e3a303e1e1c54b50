"""Sixteen query rows times sixteen keys on the tensor cores, as intrinsics for a fixed head_dim.

Fragments are those of `mma.m16n8k16` (PTX ISA 8.8, 9.7.14.5): lane l holds, of a 16 x 16 tile of queries, the
elements [l / 4 (+ 8), 2 * (l % 4) + {0, 1} (+ 8)], and of a 16 x 8 tile of products the elements
[l / 4 (+ 8), 2 * (l % 4) + {0, 1}]. A sum has float32 precision, in an order the hardware chooses but always
the same.
"""

from functools import cache
from typing import Any

from llvmlite import ir
from numba.cuda import cgutils, types

from kvd_cuda.gpu.intrinsics import MEMORY, Value, assembly, declared

KEYS_AT_ONCE = 16
MMA_DEPTH = 16  # elements of head_dim one mma multiplies
MMA_BYTES = 2 * MMA_DEPTH
_U32, _F32 = ir.IntType(32), ir.FloatType()
_MMA_NAME = {"bfloat16": "bf16", "float16": "f16"}


@cache
def query_fragments(head_dim: int) -> Value:
    """(upper, lower) -> all of a lane's query elements, 4 uint32 for each 16 of head_dim.

    upper, lower  uint64 addresses of elements 2 * (l % 4) of rows l / 4 and l / 4 + 8, in global memory that
                  nobody writes
    """
    steps = head_dim // MMA_DEPTH
    result = types.UniTuple(types.uint32, 4 * steps)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = []
        for step in range(steps):
            for offset in (step * MMA_BYTES, step * MMA_BYTES + MMA_BYTES // 2):
                for row in arguments:
                    text = f"ld.global.nc.u32 $0, [$1+{offset}];"
                    values.append(assembly(builder, _U32, [row], text, "=r,l"))
        return cgutils.pack_array(builder, values)

    return declared(generate, result, (types.uint64, types.uint64))


@cache
def score_keys(dtype: str, head_dim: int) -> Value:
    """(fragments, keys) -> 8 float32: products of 16 rows with 16 keys; 0-3 are keys 0-7, 4-7 keys 8-15.

    fragments  of `query_fragments`
    keys       uint32 shared address of the row this lane fetches for ldmatrix: key l % 8 + 8 * (l / 16),
               element 8 * (l / 8 % 2)
    """
    steps = head_dim // MMA_DEPTH
    operands = (types.UniTuple(types.uint32, 4 * steps), types.uint32)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        fragments, keys = arguments
        low = high = [ir.Constant(_F32, 0.0)] * 4
        for step in range(steps):
            rows = [builder.extract_value(fragments, 4 * step + i) for i in range(4)]
            columns = _fetch_keys(builder, keys, step * MMA_BYTES)
            low = _multiply(builder, dtype, rows + columns[:2], low)
            high = _multiply(builder, dtype, rows + columns[2:], high)
        return cgutils.pack_array(builder, low + high)

    return declared(generate, types.UniTuple(types.float32, 8), operands)


def _fetch_keys(builder: Any, address: Any, offset: int) -> list[Any]:
    text = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0, $1, $2, $3}}, [$4+{offset}];"
    four = ir.LiteralStructType([_U32] * 4)
    fetched = assembly(builder, four, [address], text, f"=r,=r,=r,=r,r,{MEMORY}")
    return [builder.extract_value(fetched, i) for i in range(4)]


def _multiply(builder: Any, dtype: str, factors: list[Any], sums: list[Any]) -> list[Any]:
    name = _MMA_NAME[dtype]
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    four = ir.LiteralStructType([_F32] * 4)
    product = assembly(builder, four, factors + sums, text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f")
    return [builder.extract_value(product, i) for i in range(4)]
