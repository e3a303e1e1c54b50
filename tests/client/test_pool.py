"""Pools: creating, attaching, and their memory as torch and numpy views."""

import gc
import subprocess
import sys

import numpy as np
import pytest
import torch

import kvd_client
from kvd_client import KVSpec

from .daemon import Daemon

LAYOUTS = ("block_outermost", "layer_outermost")
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn")


def test_who_comes_second_attaches_to_the_same_pool(daemon: Daemon, new_pool, spec) -> None:
    first = new_pool(spec, 32)
    with kvd_client.connect(daemon.run_dir) as other:
        assert other.pool(first.name, spec, 32).pool_id == first.pool_id
        attached = other.pool(first.name)
        assert (attached.blocks, attached.spec, attached.pool_id) == (32, spec, first.pool_id)


def test_another_geometry_under_that_name_is_refused_and_the_fields_are_named(client, new_pool, spec) -> None:
    pool = new_pool(spec)
    other = KVSpec(layers=3, kv_heads=2, head_dim=16, dtype="bfloat16")
    with pytest.raises(kvd_client.PoolMismatchError, match="layers") as caught:
        client.pool(pool.name, other, 64)
    assert "dtype" in str(caught.value)
    assert set(caught.value.metadata["fields"].replace(",", " ").split()) == {"layers", "dtype"}


def test_what_is_not_there_cannot_be_attached_to(client, spec) -> None:
    with pytest.raises(kvd_client.PoolNotFoundError, match="nowhere"):
        client.pool("nowhere")
    with pytest.raises(kvd_client.InvalidArgumentError, match="spec"):
        client.pool("nowhere", blocks=8)


@pytest.mark.parametrize("blocks", [-1, 1 << 40])
def test_a_number_of_blocks_outside_the_limits_is_refused_here(client, spec, blocks) -> None:
    with pytest.raises(kvd_client.InvalidArgumentError, match="blocks"):
        client.pool("any", spec, blocks)


def test_a_pool_larger_than_the_device_is_refused(client, spec) -> None:
    with pytest.raises(kvd_client.DeviceFullError):
        client.pool("giant", spec, 10_000_000)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_views_of_every_type_and_layout_have_the_shape_attention_kernels_take(
    new_pool, dtype, layout
) -> None:
    spec = KVSpec(3, 2, head_dim_k=24, head_dim_v=16, dtype=dtype, block_size=8, layout=layout)
    pool = new_pool(spec, 10)
    for index in range(spec.layers):
        k, v = pool.layer(index)
        assert (k.shape, v.shape) == ((11, 8, 2, 24), (11, 8, 2, 16))
        assert k.dtype == v.dtype == getattr(torch, dtype)
        assert k.stride()[1:] == (48, 24, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_and_numpy_see_the_same_bytes_and_no_plane_overlaps_another(new_pool, dtype, layout) -> None:
    spec = KVSpec(2, 2, head_dim_k=8, head_dim_v=4, dtype=dtype, block_size=4, layout=layout)
    pool = new_pool(spec, 5)
    planes = [plane for index in range(spec.layers) for plane in pool.layer(index)]
    arrays = [array for index in range(spec.layers) for array in pool.layer(index, "numpy")]
    for number, plane in enumerate(planes):
        plane.copy_(torch.full(plane.shape, float(number + 1)))
    for number, (plane, array) in enumerate(zip(planes, arrays, strict=True)):
        assert plane.data_ptr() == array.ctypes.data
        assert (plane.float() == number + 1).all()
        expected = torch.full((1,), float(number + 1)).to(plane.dtype).view(torch.uint8).numpy()
        assert (np.ascontiguousarray(array).view(np.uint8).reshape(-1, expected.size) == expected).all()


def test_two_views_of_a_layer_are_one_memory(new_pool, spec) -> None:
    pool = new_pool(spec)
    (k, _), (again, _) = pool.layer(1), pool.layer(1)
    assert k.data_ptr() == again.data_ptr()
    k[3] = 7.0
    assert (again[3] == 7.0).all()


def test_a_second_mapping_shows_the_same_bytes(daemon: Daemon, new_pool, spec) -> None:
    pool = new_pool(spec)
    with kvd_client.connect(daemon.run_dir) as other:
        theirs, _ = other.pool(pool.name).layer(0)
        mine, _ = pool.layer(0)
        assert mine.data_ptr() != theirs.data_ptr()
        mine[5] = torch.randn(mine.shape[1:])
        assert torch.equal(mine[5], theirs[5])


def test_two_processes_see_the_same_bytes(daemon: Daemon, new_pool, spec) -> None:
    pool = new_pool(spec)
    program = f"""
import kvd_client
with kvd_client.connect({str(daemon.run_dir)!r}) as client:
    k, v = client.pool({pool.name!r}).layer(1, "numpy")
    with client.pool({pool.name!r}).lease(tokens=16) as lease:
        block = lease.block_table[0]
        k[block], v[block] = 1.5, -2.5
        print(block)
"""
    said = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True
    )
    assert said.stderr == ""
    k, v = pool.layer(1)
    assert (k[int(said.stdout)] == 1.5).all()
    assert (v[int(said.stdout)] == -2.5).all()


def test_a_view_outlives_pool_and_client(daemon: Daemon, new_pool, spec) -> None:
    name = new_pool(spec).name
    client = kvd_client.connect(daemon.run_dir)
    k, _ = client.pool(name).layer(0)
    client.close()
    del client
    gc.collect()
    k[2] = 3.0
    assert float(k.sum()) == 3.0 * k[2].numel()


def test_a_closed_pool_releases_its_leases_and_says_that_it_is_closed(daemon: Daemon, new_pool, spec) -> None:
    with new_pool(spec) as pool:
        lease = pool.lease(tokens=64)
        assert daemon.pool_status(pool.name).leases == 1
    assert daemon.pool_status(pool.name).leases == 0
    with pytest.raises(kvd_client.ClosedError, match="released"):
        lease.extend(1)
    with pytest.raises(kvd_client.ClosedError, match=r"client\.pool"):
        pool.layer(0)
    pool.close()


@pytest.mark.parametrize(("index", "framework"), [(2, "torch"), (-1, "numpy"), (0, "jax")])
def test_a_layer_or_framework_that_is_not_there_is_refused(new_pool, spec, index, framework) -> None:
    with pytest.raises(kvd_client.InvalidArgumentError):
        new_pool(spec).layer(index, framework)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_to_slots_is_gathered_from_them(new_pool, dtype) -> None:
    pool = new_pool(KVSpec(2, 2, head_dim_k=8, head_dim_v=4, dtype=dtype, block_size=4))
    slots = np.array([9, 4, 30, 11], np.int64)
    k, v = torch.randn(4, 2, 8), torch.randn(4, 2, 4)
    pool.write(1, slots, k, v)
    k_back, v_back = pool.gather(1, slots)
    assert torch.equal(k_back.float(), k.to(k_back.dtype).float())
    assert torch.equal(v_back.float(), v.to(v_back.dtype).float())
    k_bits, v_bits = pool.gather(1, slots, "numpy")
    pool.write(0, slots, k_bits, v_bits)
    assert torch.equal(pool.gather(0, slots)[0].float(), k_back.float())


def test_writing_what_does_not_fit_is_refused_and_changes_nothing(new_pool, spec) -> None:
    pool = new_pool(spec)
    slots, k = np.arange(16, 20), torch.ones(4, 2, 16)
    for bad in (torch.ones(3, 2, 16), np.ones((4, 2, 16), np.float64)):
        with pytest.raises(kvd_client.InvalidArgumentError, match=r"needed|takes"):
            pool.write(0, slots, k, bad)
    with pytest.raises(kvd_client.InvalidArgumentError, match="slots"):
        pool.write(0, slots - 17, k, k)
    assert not pool.layer(0)[0].any()


def test_a_pool_keeps_its_size_and_who_asked_for_another_is_told(new_pool, client, spec) -> None:
    pool = new_pool(spec, 10)
    for blocks in (10, 0):
        assert client.pool(pool.name, spec, blocks).blocks == 10
    for blocks in (9, 2048):
        text = f"is there with 10 blocks, not {blocks}; it stays as it is until it is dropped"
        with pytest.warns(kvd_client.KvdWarning, match=text) as told:
            attached = client.pool(pool.name, spec, blocks=blocks)
        assert told[0].filename == __file__
        assert (attached.blocks, attached.pool_id) == (10, pool.pool_id)
        assert attached.lease(16).extend(16).size == 16
