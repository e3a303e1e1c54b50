"""Small hand-written kernels for the interpreter's own tests."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .interpreter.machine import Machine
from .interpreter.operands import numpy_type
from .interpreter.program import parse

Array = NDArray[Any]
WIDTH = {"pred": "pred", "u8": "b16", "s8": "b16"}

HEADER = """
.version 8.8
.target sm_80
.address_size 64
.visible .shared .align 16 .b8 buffer[4096];
.visible .entry probe(.param .u64 first, .param .u64 second, .param .u64 third, .param .u64 out)
{
  .reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<32>; .reg .f32 %f<32>; .reg .b64 %rd<16>; .reg .f64 %fd<8>;
  ld.param.u64 %rd1, [first];
  ld.param.u64 %rd2, [second];
  ld.param.u64 %rd3, [third];
  ld.param.u64 %rd4, [out];
  mov.u32 %r1, %tid.x;
"""


def run(body: str, arrays: list[Array], out: Array, threads: int = 32, blocks: int = 1) -> Array:
    """What `body` leaves in `out`. It finds addresses in %rd1.. (arrays), %rd4 (out) and tid.x in %r1.

    A launch of 1-D blocks; `ret` is added.
    """
    machine = Machine(1 << 18)
    addresses = [machine.memory.put(array) for array in arrays]
    addresses += [0] * (3 - len(addresses)) + [machine.memory.put(out)]
    program = parse(HEADER + body + "\n  ret;\n}")
    machine.launch(program, "probe", (blocks, 1, 1), threads, tuple(addresses))
    return machine.memory.get(addresses[3], out)


def computed(instruction: str, out_type: str, *columns: tuple[str, Array]) -> Array:
    """`instruction` over columns (PTX type, 32 values): reads registers a, b, c and writes d."""
    lines = []
    names = "abc"
    for index, (kind, values) in enumerate(columns):
        size = values.dtype.itemsize
        lines += [f".reg .{WIDTH.get(kind, kind)} {names[index]};", f"mul.wide.u32 %rd5, %r1, {size};"]
        lines += [f"add.s64 %rd5, %rd5, %rd{index + 1};", f"ld.global.{kind} {names[index]}, [%rd5];"]
    size = numpy_type(out_type).itemsize
    lines += [f".reg .{out_type} d;", instruction, f"mul.wide.u32 %rd5, %r1, {size};"]
    lines += ["add.s64 %rd5, %rd5, %rd4;", f"st.global.{out_type} [%rd5], d;"]
    return run("\n".join(lines), [values for _, values in columns], np.zeros(32, numpy_type(out_type)))
