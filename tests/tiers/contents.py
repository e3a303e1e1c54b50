"""Leases with bytes of their own, to be found again."""

from pathlib import Path

import numpy as np
import torch
from tests.running_kvd import RunningKvd

import kvd_client
from kvd_client import KVSpec

Contents = list[tuple[np.ndarray, np.ndarray]]


def spec(layout: str = "block_outermost", dtype: str = "float32") -> KVSpec:
    return KVSpec(2, 2, head_dim_k=16, head_dim_v=24, dtype=dtype, block_size=16, layout=layout)


def prefill(lease: kvd_client.Lease, tokens: int, seed: int = 0) -> Contents:
    """Random keys and values in every layer; what the lease holds now."""
    random, geometry = torch.Generator().manual_seed(seed), lease.pool.spec
    slots = lease.extend(tokens)
    for layer in range(geometry.layers):
        k = torch.randn(tokens, geometry.kv_heads, geometry.head_dim_k, generator=random)
        v = torch.randn(tokens, geometry.kv_heads, geometry.head_dim_v, generator=random)
        lease.pool.write(layer, slots, k, v)
    lease.commit(tokens)
    return contents(lease)


def contents(lease: kvd_client.Lease) -> Contents:
    return [lease.gather(layer, "numpy") for layer in range(lease.pool.spec.layers)]


def assert_same(lease: kvd_client.Lease, before: Contents) -> None:
    for (k, v), (k_before, v_before) in zip(contents(lease), before, strict=True):
        np.testing.assert_array_equal(k, k_before)
        np.testing.assert_array_equal(v, v_before)


def overwrite(pool: kvd_client.Pool, blocks: int) -> None:
    """Somebody else uses so many blocks meanwhile."""
    with pool.lease() as other:
        prefill(other, blocks * pool.spec.block_size, seed=99)


def arena_of(kvd: RunningKvd, pool: kvd_client.Pool) -> Path:
    """The memory file in which what is parked of a pool lies, as its operator can open it."""
    folder = Path(f"/proc/{kvd.daemon_pid()}/fd")
    return next(fd for fd in folder.iterdir() if f"kvd-tier.{pool.pool_id}" in str(fd.readlink()))


def flip_byte(file: Path, offset: int) -> None:
    with file.open("r+b") as memory:
        memory.seek(offset)
        byte = memory.read(1)[0]
        memory.seek(offset)
        memory.write(bytes([byte ^ 0xFF]))
