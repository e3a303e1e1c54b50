"""Nothing is lost on the wire, and what is nonsense there is refused here."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd import convert
from kvd.errors import InvalidArgumentError
from kvd.policy import H2O, Dense, Dual, ExpectedAttention, Keep, KeyDiff, SnapKV, Span, Streaming
from kvd.spec import DTYPE_BYTES, LAYOUTS, KVSpec
from kvd.v1 import kvd_pb2 as pb

counts = st.integers(0, 10_000)
windows = st.integers(1, 10_000)
kernels = st.integers(0, 127).map(lambda half: 2 * half + 1)
keeps = st.one_of(
    st.fractions("1/1000", 1, max_denominator=1_000_000).map(Keep.of),
    st.integers(2, 100_000).map(Keep.of),
)
policies = st.one_of(
    st.just(Dense()),
    st.builds(Streaming, counts, windows, st.sampled_from(["original", "cache"])),
    st.builds(SnapKV, windows, kernels, st.sampled_from(["avg", "max"]), keeps, counts),
    st.builds(H2O, counts, keeps, counts),
    st.builds(KeyDiff, counts, keeps, counts),
    st.builds(ExpectedAttention, counts, keeps, counts),
    st.builds(Span, windows, kernels, keeps, st.sampled_from(["token", "block"]), counts),
)
specs = st.builds(
    KVSpec,
    layers=st.integers(1, 1024),
    kv_heads=st.integers(1, 1024),
    head_dim_k=st.integers(1, 2048),
    head_dim_v=st.integers(1, 2048),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    block_size=st.integers(1, 1024),
    layout=st.sampled_from(LAYOUTS),
    backend=st.text(max_size=64),
)


def through_the_wire(message):
    return type(message).FromString(message.SerializeToString())


@given(policies)
def test_a_policy_comes_through_as_it_was(policy) -> None:
    assert convert.policy_from_proto(through_the_wire(convert.policy_to_proto(policy))) == policy


def test_dual_comes_through_as_snapkv_with_sinks() -> None:
    policy = convert.policy_from_proto(through_the_wire(convert.policy_to_proto(Dual(window=16))))
    assert policy == SnapKV(window=16, sinks=4)


def test_no_policy_means_dense() -> None:
    assert convert.policy_from_proto(pb.Policy()) == Dense()


@given(specs)
def test_a_geometry_comes_through_as_it_was(spec) -> None:
    assert convert.spec_from_proto(through_the_wire(convert.spec_to_proto(spec))) == spec


@given(st.lists(st.integers(0, 300), max_size=200))
def test_block_ids_come_through_in_order_as_few_runs(ids) -> None:
    runs = convert.runs_to_proto(np.array(ids, np.int32))
    assert convert.runs_from_proto(runs).tolist() == ids
    assert all(run.count >= 1 for run in runs)
    if ids:
        assert len(runs) == 1 + sum(after != before + 1 for before, after in pairwise(ids))


@pytest.mark.parametrize(
    "keep",
    [
        pb.Keep(),
        pb.Keep(tokens=0),
        pb.Keep(ratio=pb.Ratio(numerator=0, denominator=10)),
        pb.Keep(ratio=pb.Ratio(numerator=1, denominator=0)),
        pb.Keep(ratio=pb.Ratio(numerator=11, denominator=10)),
        pb.Keep(ratio=pb.Ratio(numerator=1, denominator=1_000_001)),
    ],
)
def test_an_amount_that_is_none_is_refused(keep) -> None:
    with pytest.raises(InvalidArgumentError):
        convert.keep_from_proto(keep)


def test_an_empty_geometry_is_refused() -> None:
    with pytest.raises(InvalidArgumentError):
        convert.spec_from_proto(pb.KVSpec())
