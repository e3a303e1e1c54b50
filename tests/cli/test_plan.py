"""The memory formula, against numbers worked out by hand and against its own laws."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.errors import InvalidArgumentError
from kvd.policy import Dense, Keep, SnapKV, Streaming
from kvd.spec import KVSpec
from kvd_client.cli.plan import POLICY_KINDS, Demand, Memory, make_policy, plan_policy

GIB = 1 << 30
CONTEXT_128K = 131_072
LLAMA_70B = KVSpec(80, 8, 128, 128, dtype="bfloat16", block_size=16)


def demand(spec: KVSpec = LLAMA_70B, context: int = CONTEXT_128K, sessions: int = 16) -> Demand:
    return Demand(spec, query_heads=64, context_tokens=context, sessions=sessions)


def session_bytes(kind: str, wanted: Demand) -> int:
    return plan_policy(kind, make_policy(kind, None, None, None), wanted, None).session_bytes


def test_a_128k_session_of_a_70b_model_takes_40_gib_in_bfloat16_and_20_in_fp8() -> None:
    assert session_bytes("dense", demand()) == 40 * GIB
    assert session_bytes("dense", demand(replace(LLAMA_70B, dtype="fp8"))) == 20 * GIB


def test_sixteen_of_them_take_640_and_320_gib() -> None:
    rows = [
        plan_policy("dense", Dense(), demand(replace(LLAMA_70B, dtype=dtype)), None)
        for dtype in ("bfloat16", "fp8")
    ]
    assert [row.total_bytes for row in rows] == [640 * GIB, 320 * GIB]


def test_counting_all_64_query_heads_is_8_times_too_much() -> None:
    assert demand().query_head_factor == 8


def test_keys_and_values_may_differ_in_width() -> None:
    spec = KVSpec(layers=2, kv_heads=3, head_dim_k=192, head_dim_v=128, dtype="float32", block_size=16)
    assert session_bytes("dense", demand(spec, context=16)) == 16 * 2 * 3 * (192 + 128) * 4


def test_a_session_takes_whole_blocks() -> None:
    assert session_bytes("dense", demand(context=17)) == 2 * LLAMA_70B.block_bytes


def test_snapkv_at_15_percent_keeps_1229_of_8192_blocks() -> None:
    row = plan_policy("snapkv", SnapKV(keep=0.15), demand(), None)
    assert (row.tokens_kept, row.session_blocks) == (19_664, 1_229)  # ceil(19,660.8 / 16) blocks


def test_streaming_takes_one_sink_block_a_full_window_and_one_that_fills() -> None:
    row = plan_policy("streaming", Streaming(sinks=4, window=1020), demand(), None)
    assert row.session_blocks == 1 + 64 + 1


def test_a_policy_that_cannot_keep_so_little_says_so_instead_of_a_number() -> None:
    row = plan_policy("snapkv", SnapKV(window=64, keep=0.15), demand(context=256), None)
    assert "keep more, or use a smaller window" in row.refused


def test_8_devices_hold_one_kv_head_each_and_15_dense_sessions_of_40_gib() -> None:
    memory = Memory(devices=8, device_bytes=80 * GIB)
    assert memory.device_spec(LLAMA_70B).kv_heads == 1
    # 80 GiB are exactly 16 sessions' blocks; the null block and the reserve take from the last one.
    assert plan_policy("dense", Dense(), demand(), memory).sessions_fit == 15


def test_compressed_sessions_fit_while_the_newest_is_still_dense() -> None:
    spec = KVSpec(1, 1, 8, 8, dtype="float32", block_size=16)
    memory = Memory(devices=1, device_bytes=29 * spec.block_bytes)  # 28 to lease, no reserve
    half = SnapKV(window=4, keep=0.5)
    wanted = demand(spec, context=16 * 10)
    assert plan_policy("snapkv", half, wanted, memory).sessions_fit == 1 + (28 - 10) // 5
    less = replace(memory, device_bytes=10 * spec.block_bytes)
    assert plan_policy("snapkv", half, wanted, less).sessions_fit == 0


def test_options_reach_the_policies_that_have_them() -> None:
    assert make_policy("h2o", Keep.of(0.3), 64, 8).__dict__ == {
        "recent": 64,
        "keep": Keep.of(0.3),
        "sinks": 8,
    }
    assert make_policy("dense", Keep.of(0.3), 64, 8) == Dense()
    assert make_policy("streaming", None, 256, None) == Streaming(window=256)


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match="one of dense, streaming"):
        make_policy("lru", None, None, None)


SPECS = st.builds(
    KVSpec,
    layers=st.integers(1, 128),
    kv_heads=st.integers(1, 64),
    head_dim_k=st.integers(1, 256),
    head_dim_v=st.integers(1, 256),
    dtype=st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]),
    block_size=st.sampled_from([1, 8, 16, 128]),
)
CONTEXTS = st.integers(1, 1 << 20)
KINDS = st.sampled_from(sorted(POLICY_KINDS))


@settings(max_examples=200)
@given(SPECS, CONTEXTS)
def test_a_dense_session_is_the_formula_rounded_up_to_a_block(spec: KVSpec, context: int) -> None:
    per_token = spec.layers * spec.kv_heads * (spec.head_dim_k + spec.head_dim_v) * spec.element_bytes
    exact = per_token * context
    assert exact <= session_bytes("dense", demand(spec, context)) < exact + spec.block_bytes


@settings(max_examples=200)
@given(SPECS, CONTEXTS, KINDS, st.integers(1, 100))
def test_no_policy_takes_more_for_a_shorter_context(
    spec: KVSpec, context: int, kind: str, fewer: int
) -> None:
    shorter = max(1, context - fewer)
    policy = make_policy(kind, None, None, None)
    long, short = (plan_policy(kind, policy, demand(spec, n), None) for n in (context, shorter))
    # Below its least length a policy refuses, and the sequence stays whole.
    assert short.session_blocks <= long.session_blocks or short.refused or long.refused


@settings(max_examples=200)
@given(SPECS, CONTEXTS, KINDS, st.integers(1, 1000))
def test_the_total_is_the_session_times_the_sessions(
    spec: KVSpec, context: int, kind: str, count: int
) -> None:
    row = plan_policy(kind, make_policy(kind, None, None, None), demand(spec, context, count), None)
    assert row.total_bytes == row.session_bytes * count == row.session_blocks * spec.block_bytes * count


@settings(max_examples=200)
@given(SPECS, CONTEXTS, KINDS, st.integers(1, 8), st.integers(1 << 20, 1 << 40))
def test_the_sessions_that_fit_do_fit_and_one_more_does_not(
    spec: KVSpec, context: int, kind: str, devices: int, device_bytes: int
) -> None:
    memory = Memory(devices, device_bytes)
    row = plan_policy(kind, make_policy(kind, None, None, None), demand(spec, context), memory)
    newest = row.session_blocks if kind == "streaming" else demand(spec, context).session_blocks
    leasable = memory.leasable_blocks(spec)
    fit = row.sessions_fit
    assert fit is not None
    assert fit == 0 or (fit - 1) * row.session_blocks + newest <= leasable
    assert fit * row.session_blocks + newest > leasable


@settings(max_examples=100)
@given(SPECS, CONTEXTS, KINDS, st.integers(1 << 20, 1 << 40))
def test_more_memory_never_fits_fewer_sessions(
    spec: KVSpec, context: int, kind: str, device_bytes: int
) -> None:
    policy = make_policy(kind, None, None, None)
    fits = [
        plan_policy(kind, policy, demand(spec, context), Memory(1, size)).sessions_fit
        for size in (device_bytes, device_bytes + (1 << 30))
    ]
    assert fits[0] <= fits[1]
