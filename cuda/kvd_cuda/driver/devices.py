"""The GPUs that this process may see. They are known by UUID: indexes differ from process to process."""

import os
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ctypes import c_int, c_size_t, c_ubyte, c_void_p, create_string_buffer
from dataclasses import dataclass
from enum import IntEnum

from kvd_cuda.driver.errors import DeviceNotVisibleError
from kvd_cuda.driver.library import Driver

VARIABLE = "CUDA_VISIBLE_DEVICES"
MIN_UUID_DIGITS = 3  # of an abbreviated UUID; fewer name a GPU by accident
MAX_NAME_BYTES = 256  # bytes; "NVIDIA H200 NVL" has 15, and the driver cuts what is longer


class Attribute(IntEnum):
    """CUdevice_attribute of cuda.h, those that are asked for."""

    MULTIPROCESSORS = 16
    CAPABILITY_MAJOR = 75
    CAPABILITY_MINOR = 76
    SHARED_BYTES_PER_BLOCK_OPTIN = 97
    VIRTUAL_MEMORY = 102
    POSIX_FD = 103
    RDMA_WITH_VIRTUAL_MEMORY = 110


@dataclass(frozen=True)
class Gpu:
    """`ordinal` is good in this process only. A MIG instance is a GPU of its own."""

    driver: Driver
    ordinal: int
    uuid: str
    name: str
    total_bytes: int

    def attribute(self, attribute: Attribute) -> int:
        value = c_int()
        self.driver.call("cuDeviceGetAttribute", value, attribute, self.ordinal)
        return value.value

    @property
    def capability(self) -> tuple[int, int]:
        """Major and minor compute capability."""
        return self.attribute(Attribute.CAPABILITY_MAJOR), self.attribute(Attribute.CAPABILITY_MINOR)

    @property
    def shares_descriptors(self) -> bool:
        """Whether its memory can be a file descriptor. Not on WSL2, nor before Volta."""
        return bool(self.attribute(Attribute.VIRTUAL_MEMORY) and self.attribute(Attribute.POSIX_FD))

    @property
    def has_rdma(self) -> bool:
        """Whether network cards may read and write memory that was made for it."""
        return bool(self.attribute(Attribute.RDMA_WITH_VIRTUAL_MEMORY))

    @contextmanager
    def context(self) -> Iterator[None]:
        """The primary context, which torch and cupy use too, is current; it stays until the process ends."""
        self.driver.call("cuCtxPushCurrent_v2", self._primary())
        try:
            yield
        finally:
            self.driver.call("cuCtxPopCurrent_v2", c_void_p())

    def _primary(self) -> c_void_p:
        """Retained once: a context costs hundreds of MB and a second."""
        retained = self.driver.contexts
        if self.ordinal not in retained:
            context = c_void_p()
            self.driver.call("cuDevicePrimaryCtxRetain", context, self.ordinal)
            retained[self.ordinal] = context
        return retained[self.ordinal]

    def free_bytes(self) -> int:
        """What nobody on the machine has taken. Makes a context."""
        free, total = c_size_t(), c_size_t()
        with self.context():
            self.driver.call("cuMemGetInfo_v2", free, total)
        return free.value


def gpus(driver: Driver) -> list[Gpu]:
    """In the order of their ordinals; empty where all are hidden."""
    count = c_int()
    driver.call("cuDeviceGetCount", count)
    return [_gpu(driver, index) for index in range(count.value)]


def _gpu(driver: Driver, index: int) -> Gpu:
    ordinal, digits, total = c_int(), (c_ubyte * 16)(), c_size_t()
    name = create_string_buffer(MAX_NAME_BYTES)
    driver.call("cuDeviceGet", ordinal, index)
    driver.call("cuDeviceGetUuid_v2", digits, ordinal)
    driver.call("cuDeviceGetName", name, MAX_NAME_BYTES, ordinal)
    driver.call("cuDeviceTotalMem_v2", total, ordinal)
    shown = name.value.decode(errors="replace")
    kind = "MIG" if re.search(r"\bMIG\b", shown) else "GPU"  # the driver gives no other sign of it
    return Gpu(driver, ordinal.value, f"{kind}-{uuid.UUID(bytes=bytes(digits))}", shown, total.value)


def gpu_of(driver: Driver, name: str, environ: Mapping[str, str] = os.environ) -> Gpu:
    """The GPU of a UUID, which may be abbreviated, in any case, with or without "GPU-" or "MIG-" and dashes.

    Raises DeviceNotVisibleError, which tells what hides it.
    """
    there, wanted = gpus(driver), _digits(name)
    found = [gpu for gpu in there if len(wanted) >= MIN_UUID_DIGITS and _digits(gpu.uuid).startswith(wanted)]
    if len(found) == 1:
        return found[0]
    if found:
        raise DeviceNotVisibleError(
            f"{name} may be {' or '.join(gpu.uuid for gpu in found)}; write more of it"
        )
    raise DeviceNotVisibleError(f"GPU {name} is not visible to this process: {_why(there, environ)}")


def _digits(name: str) -> str:
    return re.sub(r"^(mig-gpu-|mig-|gpu-)", "", name.strip().lower().split("/")[0]).replace("-", "")


def _why(there: list[Gpu], environ: Mapping[str, str]) -> str:
    seen = ", ".join(gpu.uuid for gpu in there) or "none"
    if VARIABLE not in environ:
        return f"it sees {seen}; is the GPU passed into this container?"
    hidden = f"{VARIABLE}={environ[VARIABLE]!r} lets it see {seen}"
    return f"{hidden}; add the GPU's UUID there, or leave {VARIABLE} away"
