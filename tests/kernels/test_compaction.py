"""Moving kept slots to the front: in place over many random cases, out of place, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from kvd_cuda import reference
from kvd_cuda.errors import KernelInputError
from kvd_cuda.host import HostBackend

from .leases import DTYPES, LAYOUTS, Lease, Shape, make_lease

BACKEND = HostBackend()


def random_kept(rng: np.random.Generator, lease: Lease, count: int) -> np.ndarray:
    rows = [
        np.sort(rng.choice(lease.planes.length, count, replace=False))
        for _ in range(lease.planes.layers * lease.planes.kv_heads)
    ]
    return np.array(rows, np.int32).reshape(lease.planes.layers, lease.planes.kv_heads, count)


def fill_sidecar(rng: np.random.Generator, lease: Lease) -> Lease:
    planes = lease.planes
    planes.scores[:] = rng.random(planes.scores.shape, dtype=np.float32)
    planes.positions[:] = rng.integers(0, 10_000, planes.positions.shape)
    compressed = int(rng.integers(0, planes.length + 1))
    observed = int(rng.integers(1, planes.length + 1))
    position = planes.length + int(rng.integers(0, 500))
    return lease.with_planes(
        replace(planes, compressed_length=compressed, observed_length=observed, position=position)
    )


def check_case(rng: np.random.Generator, shape: Shape, in_place: bool) -> None:
    lease = fill_sidecar(rng, make_lease(rng, shape, spare_blocks=int(rng.integers(0, 3))))
    count = int(rng.integers(1, shape.length + 1))
    kept = random_kept(rng, lease, count)
    needed = -(-count // shape.block_size)
    destination = lease.planes.block_table[:needed] if in_place else lease.free[:needed]
    columns = [(layer, head) for layer in range(shape.layers) for head in range(shape.kv_heads)]
    positions = {c: lease.planes.slot_positions(*c) for c in columns}
    scores = {c: lease.planes.slot_scores(*c) for c in columns}
    BACKEND.compact(lease.planes, kept, destination)
    after = lease.planes.after(count, destination)
    for layer in range(shape.layers):
        expected = reference.compacted(lease.keys[layer], kept[layer])
        np.testing.assert_array_equal(lease.stored_keys(after, layer), expected)
        expected = reference.compacted(lease.values[layer], kept[layer])
        np.testing.assert_array_equal(lease.stored_values(after, layer), expected)
    for column in columns:
        np.testing.assert_array_equal(after.slot_positions(*column), positions[column][kept[column]])
        np.testing.assert_array_equal(after.slot_scores(*column), scores[column][kept[column]])


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "out of place"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_k_v_positions_and_scores_move_together(dtype: str, layout: str, in_place: bool) -> None:
    rng = np.random.default_rng(0)
    for _ in range(25):
        shape = Shape(
            layers=int(rng.integers(1, 4)),
            kv_heads=int(rng.integers(1, 5)),
            head_dim_k=int(rng.choice([4, 16, 33])),
            head_dim_v=int(rng.choice([4, 8, 20])),
            block_size=int(rng.choice([1, 4, 16])),
            length=int(rng.integers(1, 120)),
            dtype=dtype,
            layout=layout,
        )
        check_case(rng, shape, in_place)


def test_scores_never_observed_move_as_zero() -> None:
    rng = np.random.default_rng(1)
    lease = make_lease(rng, Shape(length=64))
    kept = random_kept(rng, lease, 32)
    BACKEND.compact(lease.planes, kept, lease.planes.block_table[:2])
    assert (lease.planes.after(32, lease.planes.block_table[:2]).slot_scores(0, 0) == 0).all()


@pytest.mark.parametrize(
    "wrong", ["one block short", "one twice", "reordered source", "source tail", "outside"]
)
def test_a_destination_that_would_corrupt_the_lease_is_refused_and_nothing_moves(wrong: str) -> None:
    rng = np.random.default_rng(2)
    lease = make_lease(rng, Shape(length=64))
    table, free = lease.planes.block_table, lease.free
    destination = {
        "one block short": table[:1],
        "one twice": free[[0, 0]],
        "reordered source": table[[1, 0]],
        "source tail": table[2:],
        "outside": np.array([1, lease.planes.blocks], np.int32),
    }[wrong]
    with pytest.raises(KernelInputError, match="destination must be 2 distinct blocks"):
        BACKEND.compact(lease.planes, random_kept(rng, lease, 32), destination)
    for layer in range(2):
        np.testing.assert_array_equal(lease.stored_keys(lease.planes, layer), lease.keys[layer])


def test_kept_slots_out_of_order_or_out_of_range_are_our_bug() -> None:
    lease = make_lease(np.random.default_rng(3), Shape(length=64))
    for slots in ([3, 2], [2, 2], [5, 64], [-1, 5]):
        kept = np.broadcast_to(np.array(slots, np.int32), (2, 2, 2))
        with pytest.raises(AssertionError):
            BACKEND.compact(lease.planes, kept, lease.planes.block_table[:1])
