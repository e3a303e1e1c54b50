"""Which kind of memory a pool has."""

from kvd.errors import InvalidArgumentError
from kvd.spec import KVSpec
from kvd_client._attach import Descriptors
from kvd_client._host_memory import HostPoolMemory
from kvd_client._memory import PoolMemory

GPU_KINDS = ("cuda", "cuda_legacy")


def map_pool(descriptors: Descriptors, spec: KVSpec, blocks_total: int, writable: bool) -> PoolMemory:
    """The pool's memory in this process; the descriptors stay the caller's. Raises GpuError."""
    if descriptors.device_kind == "host":
        return HostPoolMemory(descriptors, spec, blocks_total, writable)
    if descriptors.device_kind not in GPU_KINDS:
        raise InvalidArgumentError(
            f"memory of a {descriptors.device_kind!r} device: this kvd_client is too old for it; install the "
            "daemon's version"
        )
    from kvd_client._cuda_memory import CudaPoolMemory

    return CudaPoolMemory(descriptors, spec, blocks_total, writable)
