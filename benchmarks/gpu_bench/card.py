"""The GPU under test, and time on it."""

import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvd_cuda.driver import CudaError, Event, Gpu, OwnedMemory, gpus, load_driver
from kvd_cuda.gpu.device import KernelDevice


def first_gpu() -> Gpu | str:
    """The first one this process sees, or why there is none."""
    try:
        return gpus(load_driver())[0]
    except CudaError as error:
        return str(error)


def device_of(gpu: Gpu) -> KernelDevice:
    """Compiled kernels are kept where `make` keeps such things; every timing comes after a first round."""
    return KernelDevice(gpu, Path(os.environ.get("KVD_CACHE", tempfile.gettempdir())) / "ptx")


def milliseconds(device: KernelDevice, work: Callable[[], object], rounds: int) -> float:
    """Of `work`, which starts things in the device's stream: median of `rounds` after one to warm up."""
    begin, end = Event(device.gpu), Event(device.gpu)
    times = []
    for _ in range(rounds + 1):
        begin.record(device.stream.handle)
        work()
        end.record(device.stream.handle)
        times.append(end.since_ms(begin))
    return statistics.median(times[1:])


def copy_gb_per_s(device: KernelDevice, byte_count: int, rounds: int) -> float:
    """Bytes read plus bytes written by a copy within the GPU."""
    source, target = OwnedMemory(device.gpu, byte_count), OwnedMemory(device.gpu, byte_count)
    took_ms = milliseconds(device, lambda: device.copy(target.address, source.address, byte_count), rounds)
    for memory in (source, target):
        memory.free()
    return 2 * byte_count / took_ms / 1e6


def matmul_tflops(size: int, rounds: int) -> float | None:
    """torch's bf16 matmul of square matrices; None without a torch for CUDA."""
    import torch

    if not torch.cuda.is_available():
        return None
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    times: list[float] = []
    for _ in range(rounds + 1):
        begin.record()
        a @ b
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 2 * size**3 / statistics.median(times[1:]) / 1e9
