"""Moves, conversions, address spaces, memory of every width."""

import numpy as np
import pytest

from .assembly import computed, run
from .interpreter.errors import PtxError

rng = np.random.default_rng(2)
U32 = rng.integers(0, 2**32, 32).astype(np.uint32)
F32 = (rng.standard_normal(32) * 100).astype(np.float32)


@pytest.mark.parametrize(
    ("to", "come_from", "rounding"),
    [
        ("s64", "s32", ""),
        ("u64", "u32", ""),
        ("u32", "u64", ""),
        ("s32", "s64", ""),
        ("u32", "u16", ""),
        ("u16", "u32", ""),
        ("s32", "s16", ""),
        ("f64", "f32", ""),
        ("f32", "f64", ".rn"),
        ("f32", "f16", ""),
        ("f16", "f32", ".rn"),
        ("f64", "s64", ".rn"),
        ("f32", "s32", ".rn"),
        ("f32", "u32", ".rn"),
        ("f64", "s32", ".rn"),
        ("f64", "u64", ".rn"),
    ],
)
def test_cvt_is_numpys_astype(to, come_from, rounding) -> None:
    dtype = {"s": np.int64, "u": np.uint64, "f": np.float64}[come_from[0]]
    values = (U32.view(np.int32) if come_from[0] == "s" else U32).astype(dtype)
    values = F32.astype(np.float64) if come_from[0] == "f" else values
    kind = np.dtype(f"{ {'s': 'i'}.get(come_from[0], come_from[0]) }{int(come_from[1:]) // 8}")
    source = values.astype(kind)
    found = computed(f"cvt{rounding}.{to}.{come_from} d, a;", to, (come_from, source))
    np.testing.assert_array_equal(found, source.astype(found.dtype))


def test_cvt_to_an_integer_rounds_as_told_and_saturates() -> None:
    values = np.resize(np.array([1.5, -1.5, 2.5, 3e9, -3e9], np.float32), 32)
    toward_zero = computed("cvt.rzi.s32.f32 d, a;", "s32", ("f32", values))
    assert toward_zero[:5].tolist() == [1, -1, 2, 2147483647, -2147483648]
    assert computed("cvt.rni.s32.f32 d, a;", "s32", ("f32", values))[:3].tolist() == [2, -2, 2]


def test_mov_packs_and_unpacks() -> None:
    code = ".reg .b16 lo; .reg .b16 hi; mov.b32 {lo, hi}, a; mov.b32 d, {hi, lo};"
    np.testing.assert_array_equal(computed(code, "b32", ("b32", U32)), (U32 >> 16) | (U32 << 16))


def test_mov_takes_float_literals_and_bits() -> None:
    assert computed("mov.f32 d, 0fC0400000;", "f32", ("f32", F32))[0] == -3
    assert computed("mov.f64 d, 0dC008000000000000;", "f64", ("f32", F32))[0] == -3
    np.testing.assert_array_equal(computed("mov.b32 d, a;", "b32", ("f32", F32)), F32.view(np.uint32))


def test_special_registers_number_threads_and_blocks() -> None:
    body = """mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mad.lo.s32 %r4, %r2, %r3, %r1;
    mov.u32 %r5, %laneid; mov.u32 %r6, %nctaid.x; mad.lo.s32 %r7, %r6, 1000, %r5;
    mul.wide.u32 %rd5, %r4, 4; add.s64 %rd5, %rd5, %rd4;
    st.global.u32 [%rd5], %r7;"""
    found = run(body, [], np.zeros(192, np.uint32), threads=64, blocks=3)
    np.testing.assert_array_equal(found, 3000 + np.arange(192) % 32)


def test_vectors_and_generic_addresses_of_shared_memory() -> None:
    body = """mul.wide.u32 %rd5, %r1, 16; add.s64 %rd6, %rd5, %rd1; add.s64 %rd7, %rd5, %rd4;
    cvta.to.global.u64 %rd6, %rd6;
    ld.global.nc.v4.u32 {%r4, %r5, %r6, %r7}, [%rd6];
    mov.u64 %rd8, buffer; cvta.shared.u64 %rd9, %rd8;
    { .reg .u64 t; cvta.to.shared.u64 t, %rd9; cvt.u32.u64 %r8, t; }
    mad.lo.s32 %r8, %r1, 16, %r8;
    st.shared.v4.u32 [%r8], {%r7, %r6, %r5, %r4};
    ld.shared.v2.u32 {%r9, %r10}, [%r8+8];
    st.global.u32 [%rd7], %r9; st.global.u32 [%rd7+4], %r10; st.global.v2.u32 [%rd7+8], {%r4, %r7};"""
    values = rng.integers(0, 2**32, (32, 4)).astype(np.uint32)
    found = run(body, [values], np.zeros((32, 4), np.uint32))
    np.testing.assert_array_equal(found, values[:, [1, 0, 0, 3]])


@pytest.mark.parametrize("kind", ["u8", "u16", "u32", "u64", "s8", "s16"])
def test_narrow_loads_extend_as_their_type_says(kind) -> None:
    name = kind.replace("s", "int").replace("u", "uint")
    values = np.arange(100, 132).astype(name) * 3
    wide = "s64" if kind[0] == "s" else "u64"
    body = f"""mul.wide.u32 %rd5, %r1, {values.itemsize}; add.s64 %rd5, %rd5, %rd1;
    ld.global.{kind} %rd6, [%rd5];
    mul.wide.u32 %rd5, %r1, 8; add.s64 %rd5, %rd5, %rd4; st.global.{wide} [%rd5], %rd6;"""
    np.testing.assert_array_equal(run(body, [values], np.zeros(32, np.int64)), values.astype(np.int64))


def test_an_unknown_instruction_is_named() -> None:
    with pytest.raises(PtxError, match="tanh is not modelled"):
        run("tanh.approx.f32 %f1, %f1;", [], np.zeros(1, np.uint32))
