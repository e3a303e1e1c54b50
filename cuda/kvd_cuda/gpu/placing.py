"""From a lease as policies know it to addresses; and how many of its columns fit scratch memory at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvd_cuda.dtypes import Array
from kvd_cuda.errors import KernelInputError
from kvd_cuda.gpu.device import ALIGNMENT, KernelDevice, rounded
from kvd_cuda.gpu.device_lease import MAX_INT, Columns, DeviceLease, Plane
from kvd_cuda.planes import KVPlanes

MAX_BUFFERS = 16  # allocations of scratch memory at once; each may waste nearly ALIGNMENT bytes


@dataclass(frozen=True)
class DeviceSidecar:
    """Where the GPU finds a pool's positions and scores."""

    positions: int
    scores: int


def place(device: KernelDevice, planes: KVPlanes, sidecar: DeviceSidecar) -> DeviceLease:
    """`planes.k` and `.v` lie in the GPU's memory: their elements must not be looked at here.

    Takes scratch memory for the table and the planes' bases.
    """
    return DeviceLease(
        k=_plane(device, planes.k),
        v=_plane(device, planes.v),
        dtype=planes.dtype,
        layers=planes.layers,
        kv_heads=planes.kv_heads,
        block_size=planes.block_size,
        table=device.put(planes.used_table),
        length=planes.length,
        position=planes.position,
        positions=sidecar.positions,
        scores=sidecar.scores,
        compressed_length=planes.compressed_length,
        observed_length=planes.observed_length,
    )


def _plane(device: KernelDevice, layers: Sequence[Array]) -> Plane:
    bases = [int(plane.__array_interface__["data"][0]) for plane in layers]
    stride = layers[0].strides[0]
    if stride > MAX_INT:
        raise KernelInputError(f"blocks of {stride} bytes; kernels count with 31 bits: use smaller blocks")
    alignment = next(n for n in (16, 8, 4, 2, 1) if all(value % n == 0 for value in (*bases, stride)))
    return Plane(
        bases=device.put(np.array(bases, np.uint64)),
        head_dim=layers[0].shape[3],
        block_bytes=stride,
        alignment=alignment,
    )


@dataclass(frozen=True)
class Needs:
    """Bytes of scratch memory of an operation: for each column, and for each layer of which there is one."""

    column: int
    layer: int = 0


def column_groups(room_bytes: int, planes: KVPlanes, needs: Needs) -> Iterator[Columns]:
    """All columns in order, whole layers if one fits that much scratch memory, else a few kv heads at once.

    Raises KernelInputError if not even one column fits.
    """
    left = room_bytes - MAX_BUFFERS * ALIGNMENT
    layers = left // (rounded(needs.column * planes.kv_heads) + needs.layer)
    heads = min((left - needs.layer) // needs.column, planes.kv_heads)
    if heads < 1:
        raise KernelInputError(
            f"a lease of {planes.length} slots needs more than the {room_bytes} bytes of "
            "scratch memory that kernels have; compress it earlier, or with a smaller window"
        )
    if layers:
        for layer in range(0, planes.layers, layers):
            yield Columns(layer, min(layers, planes.layers - layer), 0, planes.kv_heads)
        return
    for layer in range(planes.layers):
        for head in range(0, planes.kv_heads, heads):
            yield Columns(layer, 1, head, min(heads, planes.kv_heads - head))
