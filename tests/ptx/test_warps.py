"""Warp exchanges, matrices and divergence."""

import numpy as np
import pytest

from .assembly import computed, run
from .interpreter.errors import PtxError

rng = np.random.default_rng(3)
U32 = rng.integers(0, 2**32, 32).astype(np.uint32)
LANES = np.arange(32)


@pytest.mark.parametrize(
    ("mode", "by", "bounds", "source"),
    [
        ("bfly", 5, 31, LANES ^ 5),
        ("up", 3, 0, np.where(LANES >= 3, LANES - 3, LANES)),
        ("down", 3, 31, np.where(LANES < 29, LANES + 3, LANES)),
        ("idx", 7, 31, np.full(32, 7)),
        ("down", 3, 0x181F, np.where(LANES % 8 < 5, LANES + 3, LANES)),
    ],
)
def test_shfl_fetches_from_other_lanes(mode, by, bounds, source) -> None:
    found = computed(f"shfl.sync.{mode}.b32 d|%p1, a, {by}, {bounds}, -1;", "b32", ("b32", U32))
    np.testing.assert_array_equal(found, U32[source])


def test_vote_collects_predicates() -> None:
    code = ".reg .pred q; setp.gt.u32 q, a, 2000000000; vote.sync.ballot.b32 d, q, -1;"
    expected = sum(1 << lane for lane in range(32) if U32[lane] > 2_000_000_000)
    assert computed(code, "b32", ("u32", U32)).tolist() == [expected] * 32


def test_match_finds_lanes_with_the_same_value() -> None:
    values = (LANES % 5).astype(np.uint32)
    expected = [sum(1 << lane for lane in range(32) if lane % 5 == value) for value in values]
    assert computed("match.any.sync.b32 d, a, -1;", "b32", ("b32", values)).tolist() == expected


def test_part_of_a_warp_at_a_sync_instruction_is_an_error() -> None:
    body = """setp.lt.u32 %p1, %r1, 7; @%p1 bra SKIP; shfl.sync.bfly.b32 %r2|%p2, %r1, 1, 31, -1;
    SKIP: mov.u32 %r3, 0;"""
    with pytest.raises(PtxError, match="part of the warp elsewhere"):
        run(body, [], np.zeros(1, np.uint32))


def test_lanes_that_meet_at_two_sync_instructions_do_not_meet() -> None:
    shuffle = "mov.u32 %r4, -1; shfl.sync.bfly.b32 %r2|%p2, %r1, 1, 31, %r4;"
    body = f"setp.lt.u32 %p1, %r1, 7; @%p1 bra OTHER; {shuffle} bra END; OTHER: {shuffle} END:"
    with pytest.raises(PtxError, match="part of the warp elsewhere"):
        run(body, [], np.zeros(1, np.uint32))


def test_threads_part_and_meet_again() -> None:
    body = """mov.u32 %r2, 0; mov.u32 %r3, 0;
    LOOP: add.u32 %r2, %r2, %r3; add.u32 %r3, %r3, 1; setp.le.u32 %p1, %r3, %r1; @%p1 bra LOOP;
    shfl.sync.idx.b32 %r4|%p2, %r2, 31, 31, -1; add.u32 %r2, %r2, %r4;
    mul.wide.u32 %rd5, %r1, 4; add.s64 %rd5, %rd5, %rd4; st.global.u32 [%rd5], %r2;"""
    found = run(body, [], np.zeros(32, np.uint32))
    np.testing.assert_array_equal(found, LANES * (LANES + 1) // 2 + 31 * 32 // 2)


FRAGMENTS = """
  shr.u32 %r2, %r1, 2; and.b32 %r3, %r1, 3;
  mad.lo.s32 %r4, %r2, 32, 0; mad.lo.s32 %r4, %r3, 4, %r4; cvt.u64.u32 %rd5, %r4;
  add.s64 %rd6, %rd5, %rd1; add.s64 %rd7, %rd5, %rd2;
  ld.global.u32 %r10, [%rd6]; ld.global.u32 %r11, [%rd6+256]; ld.global.u32 %r12, [%rd6+16];
  ld.global.u32 %r13, [%rd6+272]; ld.global.u32 %r14, [%rd7]; ld.global.u32 %r15, [%rd7+16];
  cvt.u64.u32 %rd8, %r1; mul.wide.u32 %rd8, %r1, 8; add.s64 %rd9, %rd8, %rd3; add.s64 %rd10, %rd8, %rd4;
  ld.global.v2.f32 {%f1, %f2}, [%rd9]; ld.global.v2.f32 {%f3, %f4}, [%rd9+256];
"""


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_mma_multiplies_sixteen_rows_with_eight_columns(kind) -> None:
    a = rng.standard_normal((16, 16)).astype(np.float16).astype(np.float32)
    b = rng.standard_normal((8, 16)).astype(np.float16).astype(np.float32)
    bits = [a.astype(np.float16), b.astype(np.float16)]
    if kind == "bf16":
        bits = [(matrix.view(np.uint32) >> 16).astype(np.uint16) for matrix in (a, b)]
        a, b = ((matrix.view(np.uint32) & 0xFFFF0000).view(np.float32) for matrix in (a, b))
    c = rng.standard_normal((16, 8)).astype(np.float32)
    body = (
        FRAGMENTS
        + f"""
    mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%f1, %f2, %f3, %f4}},
      {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{%f1, %f2, %f3, %f4}};
    st.global.v2.f32 [%rd10], {{%f1, %f2}}; st.global.v2.f32 [%rd10+256], {{%f3, %f4}};"""
    )
    found = run(body, [bits[0], bits[1], c], np.zeros((16, 8), np.float32))
    np.testing.assert_allclose(found, a.astype(np.float64) @ b.T + c, rtol=1e-5, atol=1e-5)


def test_ldmatrix_spreads_four_matrices_over_the_warp() -> None:
    rows = np.arange(32 * 8, dtype=np.uint16).reshape(32, 8)
    body = """mul.wide.u32 %rd5, %r1, 16; add.s64 %rd6, %rd5, %rd1; add.s64 %rd7, %rd5, %rd4;
    ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%rd6]; mov.u32 %r8, buffer; mad.lo.s32 %r8, %r1, 16, %r8;
    st.shared.v4.u32 [%r8], {%r4, %r5, %r6, %r7}; bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r8+0];
    st.global.v4.u32 [%rd7], {%r4, %r5, %r6, %r7};"""
    found = run(body, [rows], np.zeros((32, 4), np.uint32)).view(np.uint16).reshape(32, 4, 2)
    for lane in range(32):
        for matrix in range(4):
            row = rows[8 * matrix + lane // 4]
            assert found[lane, matrix].tolist() == row[lane % 4 * 2 : lane % 4 * 2 + 2].tolist()
