"""H2O: attention accumulated as tokens come."""

from dataclasses import replace

import numpy as np
import pytest

from kvd_cuda import reference
from kvd_cuda.compress import CompressPlan, compress
from kvd_cuda.errors import KernelInputError
from kvd_cuda.host import HostBackend
from kvd_cuda.planes import KVPlanes

from .leases import DTYPES, Lease, Shape, make_lease, make_queries, query_values

BACKEND = HostBackend()


def shortened(planes: KVPlanes, length: int, observed: int) -> KVPlanes:
    """The same lease when only `length` tokens had come."""
    return replace(planes, length=length, position=length, observed_length=observed)


def scores_of(planes: KVPlanes) -> np.ndarray:
    whole = replace(planes, observed_length=planes.length)
    return np.array(
        [[whole.slot_scores(la, h) for h in range(planes.kv_heads)] for la in range(planes.layers)]
    )


def oracle(lease: Lease, queries: np.ndarray, layer: int) -> np.ndarray:
    return reference.accumulate(queries, lease.keys[layer])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 4])
def test_a_whole_prompt_is_the_full_causal_sum(group: int, dtype: str) -> None:
    rng = np.random.default_rng(0)
    shape = Shape(length=150, group=group, dtype=dtype)
    lease, queries = make_lease(rng, shape), make_queries(rng, shape, 150)
    BACKEND.observe(lease.planes, queries)
    for layer in range(shape.layers):
        expected = oracle(lease, query_values(queries, layer), layer)
        np.testing.assert_allclose(scores_of(lease.planes)[layer], expected, rtol=1e-5)


@pytest.mark.parametrize("step", [1, 7, 64])
def test_observing_piece_by_piece_adds_up_to_the_full_causal_sum(step: int) -> None:
    rng = np.random.default_rng(1)
    shape = Shape(length=130, group=2)
    lease, queries = make_lease(rng, shape), make_queries(rng, shape, 130)
    for start in range(0, 130, step):
        stop = min(start + step, 130)
        BACKEND.observe(shortened(lease.planes, stop, observed=start), queries.part(start, stop))
    for layer in range(shape.layers):
        expected = oracle(lease, query_values(queries, layer), layer)
        np.testing.assert_allclose(scores_of(lease.planes)[layer], expected, rtol=1e-5)


def test_each_head_gains_one_unit_of_attention_per_query_and_group_head() -> None:
    rng = np.random.default_rng(2)
    shape = Shape(length=700, group=3)
    lease = make_lease(rng, shape)
    BACKEND.observe(lease.planes, make_queries(rng, shape, 5))
    np.testing.assert_allclose(scores_of(lease.planes).sum(axis=2), 15, rtol=1e-5)


def test_scores_of_slots_not_observed_before_start_at_zero() -> None:
    rng = np.random.default_rng(3)
    shape = Shape(length=40)
    lease = make_lease(rng, shape)
    lease.planes.scores[:] = 1e6
    BACKEND.observe(replace(lease.planes, observed_length=8), make_queries(rng, shape, 4))
    scores = scores_of(lease.planes)
    assert (scores[:, :, :8] >= 1e6).all()
    assert (scores[:, :, 8:] < 100).all()


def test_a_lease_never_observed_is_refused() -> None:
    lease = make_lease(np.random.default_rng(4), Shape(length=100))
    with pytest.raises(KernelInputError, match="observe its queries first"):
        compress(BACKEND, lease.planes, CompressPlan(method="h2o", target_tokens=64, window=16))


def test_nan_accumulators_are_refused() -> None:
    lease = make_lease(np.random.default_rng(4), Shape(length=100))
    planes = replace(lease.planes, observed_length=100)
    with pytest.raises(KernelInputError, match="observe the lease again"):
        compress(BACKEND, planes, CompressPlan(method="h2o", target_tokens=64, window=16))


def test_accumulators_follow_their_tokens_through_a_compression() -> None:
    rng = np.random.default_rng(5)
    shape = Shape(length=128)
    lease = make_lease(rng, shape)
    BACKEND.observe(lease.planes, make_queries(rng, shape, 32))
    before = scores_of(lease.planes)
    planes = replace(lease.planes, observed_length=128)
    result = compress(BACKEND, planes, CompressPlan(method="h2o", target_tokens=48, window=8, sinks=2))
    assert result.planes.observed_length == 48
    for layer, head in np.ndindex(2, 2):
        kept = result.planes.slot_positions(layer, head)
        np.testing.assert_array_equal(result.planes.slot_scores(layer, head), before[layer, head, kept])


def test_queries_that_cannot_vote_leave_the_running_scores_as_they_were() -> None:
    rng = np.random.default_rng(8)
    shape = Shape(length=64)
    lease, queries = make_lease(rng, shape), make_queries(rng, shape, 8)
    queries.values[-1, -1, -1, -1] = np.nan  # the last head that would be added to
    before = lease.planes.scores.copy()
    with pytest.raises(KernelInputError, match="queries hold NaN or infinity"):
        HostBackend().observe(lease.planes, queries)
    np.testing.assert_array_equal(lease.planes.scores, before)
