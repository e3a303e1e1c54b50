"""Every arithmetic opcode against numpy."""

import numpy as np
import pytest

from .assembly import computed
from .interpreter.errors import PtxError

rng = np.random.default_rng(1)
S32 = rng.integers(-(2**31), 2**31, 32).astype(np.int32)
T32 = rng.integers(-(2**31), 2**31, 32).astype(np.int32)
U32, V32 = S32.view(np.uint32), T32.view(np.uint32)
S64 = rng.integers(-(2**62), 2**62, 32)
T64 = rng.integers(-(2**62), 2**62, 32)
F32 = (rng.standard_normal(32) * 10).astype(np.float32)
G32 = rng.standard_normal(32).astype(np.float32)
H32 = rng.standard_normal(32).astype(np.float32)
F64, G64, H64 = (values.astype(np.float64) * 1.1 for values in (F32, G32, H32))
SMALL = rng.integers(0, 40, 32).astype(np.uint32)


@pytest.mark.parametrize(
    ("instruction", "kind", "x", "y", "expected"),
    [
        ("add.s32", "s32", S32, T32, S32 + T32),
        ("add.u32", "u32", U32, V32, U32 + V32),
        ("add.s64", "s64", S64, T64, S64 + T64),
        ("add.f32", "f32", F32, G32, F32 + G32),
        ("add.f64", "f64", F64, G64, F64 + G64),
        ("sub.s32", "s32", S32, T32, S32 - T32),
        ("sub.s64", "s64", S64, T64, S64 - T64),
        ("sub.f32", "f32", F32, G32, F32 - G32),
        ("sub.f64", "f64", F64, G64, F64 - G64),
        ("mul.lo.s32", "s32", S32, T32, S32 * T32),
        ("mul.lo.s64", "s64", S64, T64, S64 * T64),
        ("mul.f32", "f32", F32, G32, F32 * G32),
        ("mul.f64", "f64", F64, G64, F64 * G64),
        ("mul.hi.u32", "u32", U32, V32, (U32.astype(np.uint64) * V32 >> 32).astype(np.uint32)),
        ("max.s32", "s32", S32, T32, np.maximum(S32, T32)),
        ("max.s64", "s64", S64, T64, np.maximum(S64, T64)),
        ("max.f32", "f32", F32, G32, np.maximum(F32, G32)),
        ("min.s32", "s32", S32, T32, np.minimum(S32, T32)),
        ("min.s64", "s64", S64, T64, np.minimum(S64, T64)),
        ("min.f32", "f32", F32, G32, np.minimum(F32, G32)),
        ("and.b32", "b32", U32, V32, U32 & V32),
        ("or.b32", "b32", U32, V32, U32 | V32),
        ("xor.b32", "b32", U32, V32, U32 ^ V32),
        ("div.u32", "u32", U32, SMALL + 1, U32 // (SMALL + 1)),
        ("div.s64", "s64", S64, T64 >> 40, np.trunc(S64 / (T64 >> 40)).astype(np.int64)),
        ("div.rn.f64", "f64", F64, G64, F64 / G64),
        ("div.rn.f32", "f32", F32, G32, F32 / G32),
        ("rem.u32", "u32", U32, SMALL + 1, U32 % (SMALL + 1)),
        ("rem.s32", "s32", S32, T32, np.fmod(S32, T32)),
    ],
)
def test_binary_operations_are_numpys(instruction, kind, x, y, expected) -> None:
    found = computed(f"{instruction} d, a, b;", kind, (kind, x), (kind, y))
    tolerance = 1e-9 if instruction == "div.s64" else 0  # the expected value went through a float
    np.testing.assert_allclose(found, expected, rtol=tolerance)


@pytest.mark.parametrize(
    ("instruction", "kind", "x", "expected"),
    [
        ("not.b32", "b32", U32, ~U32),
        ("not.b64", "b64", S64.view(np.uint64), ~S64.view(np.uint64)),
        ("neg.s32", "s32", S32, -S32),
        ("neg.f32", "f32", F32, -F32),
        ("abs.f32", "f32", F32, np.abs(F32)),
        ("rcp.rn.f32", "f32", F32, 1 / F32),
        ("sqrt.rn.f32", "f32", np.abs(F32), np.sqrt(np.abs(F32))),
    ],
)
def test_unary_operations_are_numpys(instruction, kind, x, expected) -> None:
    np.testing.assert_array_equal(computed(f"{instruction} d, a;", kind, (kind, x)), expected)


def test_popc_counts_ones() -> None:
    assert computed("popc.b32 d, a;", "u32", ("b32", U32)).tolist() == [bin(x).count("1") for x in U32]


@pytest.mark.parametrize(("kind", "x", "y"), [("b32", U32, V32), ("b64", S64, T64)])
def test_bfi_puts_low_bits_into_their_place(kind, x, y) -> None:
    bits, base = (values.view(f"u{values.itemsize}") for values in (x, y))
    found = computed(f"bfi.{kind} d, a, b, 10, 17;", kind, (kind, bits), (kind, base))
    mask = ((1 << 17) - 1) << 10
    right = [int(b) & ~mask | int(a) << 10 & mask for a, b in zip(bits, base, strict=True)]
    assert found.tolist() == right


def test_fma_rounds_once() -> None:
    one = np.full(32, 1 + 2**-12, np.float32)
    found = computed("fma.rn.f32 d, a, b, c;", "f32", ("f32", one), ("f32", one), ("f32", -one * one))
    assert found[0] == np.float32(float(one[0]) ** 2 - float(one[0] * one[0])) != 0
    wide = computed("fma.rn.f64 d, a, b, c;", "f64", ("f64", F64), ("f64", G64), ("f64", H64))
    np.testing.assert_allclose(wide, F64 * G64 + H64, rtol=1e-13)


def test_wide_products_do_not_wrap() -> None:
    signed = computed("mul.wide.s32 d, a, b;", "s64", ("s32", S32), ("s32", T32))
    np.testing.assert_array_equal(signed, S32.astype(np.int64) * T32)
    unsigned = computed("mul.wide.u32 d, a, b;", "u64", ("u32", U32), ("u32", V32))
    np.testing.assert_array_equal(unsigned, U32.astype(np.uint64) * V32)


def test_mad_adds_to_the_product() -> None:
    low = computed("mad.lo.s32 d, a, b, c;", "s32", ("s32", S32), ("s32", T32), ("s32", S32))
    np.testing.assert_array_equal(low, S32 * T32 + S32)
    wide = computed("mad.wide.s32 d, a, b, c;", "s64", ("s32", S32), ("s32", T32), ("s64", S64))
    np.testing.assert_array_equal(wide, S32.astype(np.int64) * T32 + S64)


def test_shifts_by_more_than_the_width_leave_nothing_but_the_sign() -> None:
    by = np.arange(32, dtype=np.uint32) * 2
    left = computed("shl.b32 d, a, b;", "b32", ("b32", U32), ("u32", by))
    np.testing.assert_array_equal(left, [int(x) << int(n) & 0xFFFFFFFF for x, n in zip(U32, by, strict=True)])
    right = computed("shr.u32 d, a, b;", "u32", ("u32", U32), ("u32", by))
    np.testing.assert_array_equal(right, [int(x) >> int(n) for x, n in zip(U32, by, strict=True)])
    signed = computed("shr.s32 d, a, b;", "s32", ("s32", S32), ("u32", by))
    np.testing.assert_array_equal(signed, [int(x) >> int(n) for x, n in zip(S32, by, strict=True)])


def test_ex2_is_right_to_its_documented_precision_and_flushes() -> None:
    found = computed("ex2.approx.ftz.f32 d, a;", "f32", ("f32", F32))
    np.testing.assert_allclose(found, np.exp2(F32.astype(np.float64)), rtol=2.0**-21)
    tiny = computed("ex2.approx.ftz.f32 d, a;", "f32", ("f32", np.full(32, -127, np.float32)))
    assert not tiny.any()


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64", "s16", "f32"])
def test_setp_and_selp_choose_by_comparison(name, kind) -> None:
    x, y = np.arange(32) % 3 - 1, np.arange(32) // 3 % 3 - 1
    dtype = {
        "f32": np.float32,
        "s32": np.int32,
        "u32": np.uint32,
        "s64": np.int64,
        "u64": np.uint64,
        "s16": np.int16,
    }
    a, b = x.astype(dtype[kind]), y.astype(dtype[kind])
    code = f".reg .pred q; setp.{name}.{kind} q, a, b; selp.b32 d, 1, 0, q;"
    operator = {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal"}.get(name)
    expected = getattr(np, operator or {"gt": "greater", "ge": "greater_equal"}[name])(a, b)
    np.testing.assert_array_equal(computed(code, "b32", (kind, a), (kind, b)), expected)


def test_comparisons_with_nan_are_false_unless_they_end_in_u() -> None:
    nan, one = np.full(32, np.nan, np.float32), np.ones(32, np.float32)
    for name, expected in (("lt", 0), ("ne", 0), ("ltu", 1), ("neu", 1), ("nan", 1), ("num", 0)):
        code = f".reg .pred q; setp.{name}.f32 q, a, b; selp.b32 d, 1, 0, q;"
        assert computed(code, "b32", ("f32", nan), ("f32", one)).tolist() == [expected] * 32


def test_predicates_are_combined() -> None:
    code = """.reg .pred q; .reg .pred s; .reg .pred t; setp.lt.s32 q, a, 0; setp.lt.s32 s, b, 0;
    and.pred t, q, s; or.pred q, q, s; not.pred q, q; or.pred q, q, t; selp.b32 d, 1, 0, q;"""
    found = computed(code, "b32", ("s32", S32), ("s32", T32))
    np.testing.assert_array_equal(found, (S32 < 0) == (T32 < 0))


def test_a_zero_divisor_is_an_error() -> None:
    with pytest.raises(PtxError, match="division by zero"):
        computed("div.u32 d, a, b;", "u32", ("u32", U32), ("u32", SMALL * 0))
