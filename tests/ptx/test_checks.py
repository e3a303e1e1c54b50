"""What the interpreter catches and a GPU would not: each mistake in the smallest kernel that makes it."""

import numpy as np
import pytest

from .assembly import run
from .interpreter.errors import PtxError

WORDS = np.arange(64, dtype=np.uint32)
MINE = "mov.u32 %r9, buffer; mad.lo.s32 %r8, %r1, 4, %r9;"
NEIGHBOUR = "xor.b32 %r7, %r1, 1; mad.lo.s32 %r7, %r7, 4, %r9;"
STORE, FETCH = "st.shared.u32 [%r8], %r1;", "ld.shared.u32 %r2, [%r7];"
OUT = "mul.wide.u32 %rd5, %r1, 4; add.s64 %rd5, %rd5, %rd4; st.global.u32 [%rd5], %r2;"
COPY = """mov.u32 %r9, buffer; mad.lo.s32 %r8, %r1, 16, %r9;
mul.wide.u32 %rd5, %r1, 16; add.s64 %rd6, %rd5, %rd1;
cp.async.cg.shared.global [%r8], [%rd6], 16, %r10; cp.async.commit_group;"""
READ_COPY = "ld.shared.u32 %r2, [%r8];"


def test_an_exchange_with_a_barrier_is_right() -> None:
    body = MINE + NEIGHBOUR + STORE + "bar.sync 0;" + FETCH + OUT
    np.testing.assert_array_equal(run(body, [], np.zeros(64, np.uint32), threads=64), np.arange(64) ^ 1)


def test_an_exchange_without_a_barrier_is_a_race() -> None:
    with pytest.raises(PtxError, match="race: read of what another thread wrote"):
        run(MINE + NEIGHBOUR + STORE + FETCH + OUT, [], np.zeros(64, np.uint32), threads=64)


def test_a_write_after_other_threads_reads_needs_a_barrier() -> None:
    body = MINE + NEIGHBOUR + STORE + "bar.sync 0;" + FETCH + STORE
    with pytest.raises(PtxError, match="race: write to what another thread read"):
        run(body, [], np.zeros(1, np.uint32), threads=64)
    run(body.replace(FETCH, FETCH + "bar.sync 0;"), [], np.zeros(1, np.uint32), threads=64)


def test_two_writers_of_one_word_are_a_race() -> None:
    with pytest.raises(PtxError, match="two threads write one byte"):
        run("st.global.u32 [%rd4], %r1;", [], np.zeros(1, np.uint32))


def test_blocks_race_in_global_memory_even_across_barriers() -> None:
    body = """mov.u32 %r2, %ctaid.x; setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r2, 0; and.pred %p3, %p1, %p2;
    @%p3 st.global.u32 [%rd4], %r1; bar.sync 0; setp.eq.u32 %p2, %r2, 1; and.pred %p3, %p1, %p2;
    @%p3 ld.global.u32 %r3, [%rd4];"""
    with pytest.raises(PtxError, match="race: read"):
        run(body, [], np.zeros(1, np.uint32), blocks=2)


def test_shared_memory_that_nobody_wrote_must_not_be_read() -> None:
    with pytest.raises(PtxError, match="nobody wrote"):
        run(MINE + "ld.shared.u32 %r2, [%r8];", [], np.zeros(1, np.uint32))


@pytest.mark.parametrize(
    ("access", "problem"),
    [
        ("ld.global.u32 %r2, [%rd1+256];", "global access out of bounds"),
        ("ld.global.u32 %r2, [%rd1+-4];", "global access out of bounds"),
        ("ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%rd1+8];", "misaligned"),
        ("ld.global.u32 %r2, [8];", "global access out of bounds"),
        ("ld.shared.u32 %r2, [buffer+4096];", "shared access out of bounds"),
        ("st.shared.u32 [buffer+2], %r2;", "misaligned"),
        ("ld.local.u32 %r2, [%rd1];", "only global and shared"),
    ],
)
def test_accesses_must_be_aligned_and_inside(access, problem) -> None:
    with pytest.raises(PtxError, match=problem):
        run(access, [WORDS], np.zeros(1, np.uint32))


def test_a_copy_that_was_waited_for_has_arrived() -> None:
    body = "mov.u32 %r10, 16;" + COPY + "cp.async.wait_group 0;" + READ_COPY + OUT
    values = np.arange(128, dtype=np.uint32)
    np.testing.assert_array_equal(run(body, [values], np.zeros(32, np.uint32)), values[::4])


def test_a_copy_of_nothing_gives_zeros_and_reads_nothing() -> None:
    body = "mov.u32 %r10, 0;" + COPY + "cp.async.wait_group 0;" + READ_COPY + OUT
    assert not run(body, [WORDS[:1]], np.ones(32, np.uint32)).any()


@pytest.mark.parametrize("wait", ["", "cp.async.wait_group 1;"])
def test_a_copy_not_waited_for_must_not_be_read(wait) -> None:
    body = "mov.u32 %r10, 16;" + COPY + wait + READ_COPY
    with pytest.raises(PtxError, match="not waited for"):
        run(body, [np.arange(128, dtype=np.uint32)], np.zeros(1, np.uint32))


def test_the_older_of_two_copies_arrives_first() -> None:
    second = COPY.replace("buffer;", "buffer; add.u32 %r9, %r9, 512;")
    body = "mov.u32 %r10, 16;" + COPY + "mov.u32 %r12, %r8;" + second + "cp.async.wait_group 1;"
    values = np.arange(128, dtype=np.uint32)
    found = run(body + "ld.shared.u32 %r2, [%r12];" + OUT, [values], np.zeros(32, np.uint32))
    np.testing.assert_array_equal(found, values[::4])
    with pytest.raises(PtxError, match="not waited for"):
        run(body + READ_COPY, [values], np.zeros(1, np.uint32))


def test_another_threads_copy_needs_a_barrier_after_its_wait() -> None:
    body = "mov.u32 %r10, 16;" + COPY + "cp.async.wait_group 0; xor.b32 %r7, %r8, 16;" + FETCH
    with pytest.raises(PtxError, match="race: read"):
        run(body, [np.arange(128, dtype=np.uint32)], np.zeros(1, np.uint32))
    run(body.replace(FETCH, "bar.sync 0;" + FETCH), [np.arange(128, dtype=np.uint32)], np.zeros(1, np.uint32))


def test_a_barrier_that_some_threads_never_reach_is_found() -> None:
    with pytest.raises(PtxError, match="barrier"):
        run(
            "setp.lt.u32 %p1, %r1, 7; @%p1 bra END; bar.sync 0; END: mov.u32 %r2, 0;",
            [],
            np.zeros(1, np.uint32),
        )


def test_lanes_that_wait_at_two_barriers_do_not_meet() -> None:
    body = """setp.lt.u32 %p1, %r1, 7; @%p1 bra OTHER; bar.sync 0; bra END;
    OTHER: mov.u32 %r2, 0; bar.sync 0; END: mov.u32 %r3, 0;"""
    with pytest.raises(PtxError, match="different barriers"):
        run(body, [], np.zeros(1, np.uint32), threads=64)
    run(body.replace("7;", "32;"), [], np.zeros(1, np.uint32), threads=64)


@pytest.mark.parametrize(
    "opcode", ["red.shared.add.u32 [buffer], 3;", "atom.shared.add.u32 %r2, [buffer], 3;"]
)
def test_threads_may_add_to_one_shared_word(opcode) -> None:
    first = "setp.eq.u32 %p1, %r1, 0; mov.u32 %r3, 5; @%p1 st.shared.u32 [buffer], %r3;"
    body = first + "bar.sync 0;" + opcode + "bar.sync 0; ld.shared.u32 %r2, [buffer];" + OUT
    assert run(body, [], np.zeros(64, np.uint32), threads=64).tolist() == [5 + 3 * 64] * 64
    with pytest.raises(PtxError, match="race: atomic"):
        run(body.replace("bar.sync 0;", "", 1), [], np.zeros(64, np.uint32), threads=64)


def test_registers_of_inner_scopes_are_their_own() -> None:
    scope = "{ .reg .u32 t; mov.u32 t, %r1; add.u32 %r2, t, %r2; }"
    found = run("mov.u32 %r2, 1;" + scope + scope + OUT, [], np.zeros(32, np.uint32))
    np.testing.assert_array_equal(found, 1 + 2 * np.arange(32))
