"""Expected Attention on its own: what the matrix of all methods cannot see."""

from dataclasses import replace

import numpy as np
import pytest

from kvd_cuda import host_expected, reference
from kvd_cuda.compress import CompressPlan, compress
from kvd_cuda.errors import KernelInputError
from kvd_cuda.host import HostBackend
from kvd_cuda.queries import WindowQueries

from .leases import Shape, make_lease, make_queries, query_values

PLAN = CompressPlan(method="expected", target_tokens=48, window=16, sinks=4)


def test_the_attention_expected_is_that_of_mean_and_covariance_whatever_the_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng, shape = np.random.default_rng(0), Shape(layers=1, head_dim_k=24, group=3, length=301)
    lease, queries = make_lease(rng, shape), make_queries(rng, shape, 70)
    expected = reference.expected_attention(query_values(queries, 0), lease.keys[0], 4)
    for tile, rows in ((2048, 256), (300, 7), (64, 1)):
        monkeypatch.setattr(host_expected, "TILE", tile)
        monkeypatch.setattr(host_expected, "ROWS", rows)
        for head in range(shape.kv_heads):
            found = host_expected.expected_attention(lease.planes, queries, (0, head), 4)
            np.testing.assert_allclose(found, expected[head], rtol=1e-9)
            assert found.sum() == pytest.approx(1)


def test_the_closed_form_is_what_very_many_such_queries_attend_to_on_average() -> None:
    rng = np.random.default_rng(1)
    keys = rng.standard_normal((40, 1, 8))
    asked = rng.standard_normal((200_000, 8)) * 0.7 + 0.3
    scores = np.exp(asked @ keys[:, 0].T / np.sqrt(8)).mean(axis=0)
    expected = reference.expected_attention(asked[:, None], keys, 0)[0]
    np.testing.assert_allclose(expected, scores / scores.sum(), rtol=0.05)


def test_a_value_without_length_goes_first_though_much_attention_is_expected() -> None:
    rng, shape = np.random.default_rng(2), Shape(layers=1, kv_heads=1, group=1, length=160)
    lease, queries = make_lease(rng, shape), make_queries(rng, shape, 16)
    kept = compress(HostBackend(), lease.planes, PLAN, queries).planes.slot_positions(0, 0).tolist()
    best = next(slot for slot in kept if 4 <= slot < 144)
    again = make_lease(np.random.default_rng(2), shape)
    planes = again.planes
    planes.v[0][planes.block_table[best // 16], best % 16] = 0
    less = compress(HostBackend(), planes, PLAN, queries).planes.slot_positions(0, 0).tolist()
    assert best not in less
    assert less[:4] == [0, 1, 2, 3]
    assert less[-16:] == list(range(144, 160))


def test_one_query_expects_what_it_attends_to() -> None:
    rng, shape = np.random.default_rng(3), Shape(layers=1, kv_heads=1, group=1, length=100)
    lease, queries = make_lease(rng, shape), make_queries(rng, shape, 1)
    found = host_expected.expected_attention(lease.planes, queries, (0, 0), 0)
    exact = reference.attention_weights(query_values(queries, 0), lease.keys[0])[0, 0]
    np.testing.assert_allclose(found, exact, rtol=1e-9)


def test_it_says_what_it_needs() -> None:
    lease = make_lease(np.random.default_rng(4), Shape())
    with pytest.raises(KernelInputError, match="expected needs queries"):
        compress(HostBackend(), lease.planes, PLAN)
    queries = make_queries(np.random.default_rng(5), Shape(), 16)
    with pytest.raises(KernelInputError, match="keep at least"):
        compress(HostBackend(), lease.planes, replace(PLAN, target_tokens=16), queries)


@pytest.mark.parametrize(("plane", "what"), [("k", "attention scores are NaN"), ("v", "values are NaN")])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_is_refused_and_nothing_moves(plane: str, what: str, bad: float) -> None:
    rng, shape = np.random.default_rng(6), Shape(length=100)
    lease = make_lease(rng, shape)
    queries: WindowQueries = make_queries(rng, shape, 16)
    getattr(lease.planes, plane)[1][lease.planes.block_table[2], 3, 1, 0] = bad
    before = [each.copy() for each in (*lease.planes.k, *lease.planes.v)]
    with pytest.raises(KernelInputError, match=what):
        compress(HostBackend(), lease.planes, PLAN, queries)
    for each, old in zip((*lease.planes.k, *lease.planes.v), before, strict=True):
        np.testing.assert_array_equal(each, old)
