"""The driver layer on fake GPUs: finding them, sharing their memory, and errors with the way out."""

from pathlib import Path

import pytest
from tests.fakecuda import FakeGpus, fake_gpus

FIND = """
import sys
from kvd_cuda.driver import CudaError, gpu_of, gpus, load_driver
try:
    driver = load_driver()
    print(*[gpu.uuid for gpu in gpus(driver)] if len(sys.argv) == 1 else [gpu_of(driver, sys.argv[1]).uuid])
except CudaError as error:
    print(type(error).__name__, error)
"""
GPU0 = "GPU-a0fa4ec0-da00-0000-0000-000000000000"
GPU1 = "GPU-a1fa4ec0-da00-0000-0000-000000000001"
MIG = "MIG-a2fa4ec0-da00-0000-0000-000000000002"
PRELUDE = """
import ctypes, os, sys
import kvd_cuda.driver as d
def put(mapping, offset, data):
    buffer = ctypes.create_string_buffer(data)
    mapping.write(offset, ctypes.addressof(buffer), len(data))
def got(mapping, offset, count):
    buffer = ctypes.create_string_buffer(count)
    mapping.read(offset, ctypes.addressof(buffer), count)
    return buffer.raw
gpu = d.gpus(d.load_driver())[0]
MIB = 1 << 20
"""


@pytest.fixture(scope="module")
def machine():
    with fake_gpus(devices=3, mig=1, memory=64 << 20) as gpus:
        yield gpus


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        ("1,0", (GPU1, GPU0)),
        (f"{GPU1}", (GPU1,)),
        ("GPU-a1", (GPU1,)),
        (MIG, (MIG,)),
        ("MIG-GPU-a2fa4ec0-da00-0000-0000-000000000002/0/0", (MIG,)),
        ("0,7,1", (GPU0,)),
        ("1,-1,0", (GPU1,)),
    ],
)
def test_visible_devices_are_understood_in_every_spelling(
    machine: FakeGpus, visible: str, seen: tuple[str, ...]
) -> None:
    assert machine.run(FIND, CUDA_VISIBLE_DEVICES=visible) == " ".join(seen)


@pytest.mark.parametrize("visible", ["", "-1", "0,0", "GPU-", "nonsense"])
def test_a_process_that_sees_no_gpu_is_told_where_to_look(machine: FakeGpus, visible: str) -> None:
    told = machine.run(FIND, CUDA_VISIBLE_DEVICES=visible)
    assert told.startswith("DriverUnusableError")
    assert "CUDA_VISIBLE_DEVICES" in told


@pytest.mark.parametrize("name", [GPU1, GPU1.upper(), GPU1.removeprefix("GPU-"), "GPU-a1f", "a1fa4ec0"])
def test_a_gpu_is_found_by_its_uuid_however_it_is_written(machine: FakeGpus, name: str) -> None:
    assert machine.run(FIND, name) == GPU1


def test_a_mig_instance_is_a_gpu_with_a_uuid_of_its_own(machine: FakeGpus) -> None:
    assert machine.run(FIND, MIG) == MIG


def test_a_hidden_gpu_is_named_together_with_what_hides_it(machine: FakeGpus) -> None:
    told = machine.run(FIND, GPU1, CUDA_VISIBLE_DEVICES="0")
    assert told.startswith("DeviceNotVisibleError")
    assert all(word in told for word in (GPU1, "CUDA_VISIBLE_DEVICES='0'", GPU0))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"version": 11040}, "DriverTooOldError the CUDA driver is of version 11.4, 12.0 is needed"),
        ({"init": 803}, "DriverUnusableError the CUDA driver does not start (CUresult 803): kernel module"),
        ({"init": 100}, "DriverUnusableError the CUDA driver does not start (CUDA_ERROR_NO_DEVICE)"),
    ],
)
def test_a_driver_that_cannot_be_used_says_what_to_do(words: dict[str, int], told: str) -> None:
    with fake_gpus(**words) as gpus:
        assert gpus.run(FIND).startswith(told)


def test_a_machine_without_a_driver_says_so(machine: FakeGpus, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").touch()  # what the loader finds first, and cannot load
    told = machine.run(FIND, LD_LIBRARY_PATH=str(tmp_path))
    assert told.startswith("DriverMissingError no CUDA driver here (libcuda.so.1)")


MAKER = """
import signal, socket
fd = d.create_shareable(gpu, 3 * MIB)
mapping = d.map_shared(gpu, fd, 3 * MIB)
put(mapping, 2 * MIB, b"hello")
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b"."], [fd])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_memory_outlives_its_maker_in_the_descriptor_and_in_every_mapping(machine: FakeGpus) -> None:
    told = machine.run(
        PRELUDE
        + """
import socket, subprocess
ours, theirs = socket.socketpair()
maker = subprocess.run([sys.executable, "-c", sys.argv[1], str(theirs.fileno())], pass_fds=[theirs.fileno()])
_, (fd,), _, _ = socket.recv_fds(ours, 1, 1)
mapping = d.map_shared(gpu, fd, 3 * MIB)
os.close(fd)
print(maker.returncode, got(mapping, 2 * MIB, 5), gpu.free_bytes() // MIB)
mapping.close()
print(gpu.free_bytes() // MIB)
""",
        PRELUDE + MAKER,
    )
    assert told.splitlines() == ["-9 b'hello' 60", "64"]


def test_memory_can_be_made_without_a_context(machine: FakeGpus) -> None:
    before = machine.context_pids()
    told = machine.run(PRELUDE + "d.create_shareable(gpu, MIB); print(gpu.driver.contexts)")
    assert (told, machine.context_pids()) == ("{}", before)


def test_memory_that_is_mapped_read_only_can_be_read_and_not_written(machine: FakeGpus) -> None:
    told = machine.run(
        PRELUDE
        + """
fd = d.create_shareable(gpu, MIB)
put(d.map_shared(gpu, fd, MIB), 0, b"hello")
reader = d.map_shared(gpu, fd, MIB, writable=False)
try:
    put(reader, 0, b"x")
except d.CudaError as error:
    print(type(error).__name__, got(reader, 0, 5))
"""
    )
    assert told == "CallFailedError b'hello'"


@pytest.mark.parametrize("rdma", [0, 1])
def test_memory_is_made_for_rdma_where_the_gpu_can(rdma: int) -> None:
    with fake_gpus(rdma=rdma) as gpus:
        gpus.run(PRELUDE + "d.create_shareable(gpu, MIB)")
        assert gpus.rdma_capable() == [bool(rdma)]


def test_too_little_memory_takes_nothing_and_a_killed_process_gives_its_own_back_late() -> None:
    with fake_gpus(memory=8 << 20, return_ms=300) as gpus:
        gpus.run(PRELUDE + "d.create_shareable(gpu, 6 * MIB)")
        told = gpus.run(
            PRELUDE
            + """
import time
refused = 0
while True:
    try:
        d.create_shareable(gpu, 6 * MIB)
        break
    except d.GpuMemoryFullError:
        refused += 1
        time.sleep(0.05)
print(refused > 0, gpu.free_bytes() // MIB)
"""
        )
        assert told == "True 2"


def test_a_descriptor_of_something_else_is_a_stale_handle(machine: FakeGpus) -> None:
    told = machine.run(
        PRELUDE
        + """
fd = os.memfd_create("no GPU memory")
try:
    d.map_shared(gpu, fd, MIB)
except d.StaleHandleError as error:
    print(error, d.is_shareable_of(gpu, fd))
"""
    )
    assert told == "this descriptor is none of GPU memory; attach again False"


def test_memory_of_one_gpu_is_not_taken_for_that_of_another(machine: FakeGpus) -> None:
    told = machine.run(
        PRELUDE + "fd = d.create_shareable(gpu, MIB)\n"
        "print([d.is_shareable_of(other, fd) for other in d.gpus(gpu.driver)])"
    )
    assert told == "[True, False, False]"


@pytest.mark.parametrize("words", [{"wsl": 1}, {"no_vmm": 1}])
def test_a_gpu_that_shares_no_descriptors_says_so(words: dict[str, int]) -> None:
    with fake_gpus(**words) as gpus:
        told = gpus.run(
            PRELUDE
            + """
try:
    d.create_shareable(gpu, MIB)
except d.SharingUnsupportedError as error:
    print(error)
"""
        )
        assert "WSL2, or a GPU older than Volta" in told


def test_a_forked_child_is_told_that_cuda_does_not_survive_fork(machine: FakeGpus) -> None:
    told = machine.run(
        PRELUDE
        + """
fd = d.create_shareable(gpu, MIB)
mapping = d.map_shared(gpu, fd, MIB)
if os.fork() == 0:
    try:
        d.create_shareable(gpu, MIB)
    except d.DriverUnusableError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""
    )
    assert "does not survive fork(); start this process with spawn" in told


def test_streams_and_events_order_and_time_work(machine: FakeGpus) -> None:
    told = machine.run(
        PRELUDE
        + """
stream, before, after = d.Stream(gpu), d.Event(gpu), d.Event(gpu)
before.record(stream.handle)
after.record(stream.handle)
stream.synchronize()
print(after.since_ms(before) >= 0)
for thing in (stream, before, after):
    thing.destroy()
"""
    )
    assert told == "True"


KERNELS = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry fill(.param .u64 at, .param .u32 value)
{
  .reg .b32 %r<8>; .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [at];
  ld.param.u32 %r1, [value];
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mad.lo.s32 %r5, %r2, %r3, %r4;
  mul.wide.u32 %rd2, %r5, 4;
  add.s64 %rd3, %rd1, %rd2;
  st.global.u32 [%rd3], %r1;
  ret;
}
"""
LAUNCHES = """
fd = d.create_shareable(gpu, MIB)
mapping, reader = d.map_shared(gpu, fd, MIB), d.map_shared(gpu, fd, MIB, writable=False)
mapping.zero(0, MIB)
module = d.Module(gpu, sys.argv[1].encode())
fill = module.function("fill", dynamic_shared_bytes=64 << 10)
fill.launch(d.Grid((3, 1, 1), (32, 1, 1)), [ctypes.c_uint64(mapping.address), ctypes.c_uint32(7)])
print(got(reader, 4 * 95, 4), got(reader, 4 * 96, 4))
def outside():
    fill.launch(d.Grid((1, 1, 1), (32, 1, 1)), [ctypes.c_uint64(mapping.address - 4), ctypes.c_uint32(7)])
for attempt in (lambda: d.Module(gpu, b"garbage"), lambda: module.function("none"), outside):
    try:
        attempt()
    except d.CallFailedError as error:
        print(error)
"""


def test_a_launch_runs_in_the_interpreter_on_memory_that_others_see(machine: FakeGpus) -> None:
    told = machine.run(PRELUDE + LAUNCHES, KERNELS)
    assert told.splitlines() == [
        "b'\\x07\\x00\\x00\\x00' b'\\x00\\x00\\x00\\x00'",
        "cuModuleLoadData failed: CUresult 200",
        "cuModuleGetFunction failed: CUresult 500",
        "cuLaunchKernel failed: CUresult 700",
    ]


COPY_BLOCKS = """
import numpy as np
from ctypes import c_int32, c_uint64
from kvd_cuda.gpu import blocks
from kvd_cuda.gpu.compile import compile_ptx

BLOCK, COUNT, TABLES = 4096, 8, 64 << 10
fd = d.create_shareable(gpu, MIB)
mapping, reader = d.map_shared(gpu, fd, MIB), d.map_shared(gpu, fd, MIB, writable=False)
pool = np.repeat(np.arange(COUNT, dtype=np.uint8), BLOCK)
mapping.write(0, pool.ctypes.data, pool.nbytes)

def table(offset, values):
    mapping.write(TABLES + offset, values.ctypes.data, values.nbytes)
    return c_uint64(mapping.address + TABLES + offset)

bases = table(0, np.array([mapping.address], np.uint64))
sources, goals = (table(at, np.array(ids, np.int32)) for at, ids in ((64, [1, 3]), (128, [6, 2])))
kernel = blocks.copy_kernel(16)
copy = d.Module(gpu, compile_ptx(kernel).text.encode()).function(kernel.name)
grid = d.Grid((2, 2, 1), (kernel.threads, 1, 1))
copy.launch(grid, [bases, sources, goals, c_int32(BLOCK), c_int32(BLOCK)])
print([sorted(set(got(reader, block * BLOCK, BLOCK))) for block in range(COUNT)])
"""


def test_a_kernel_of_ours_is_loaded_launched_and_seen_by_others(machine: FakeGpus) -> None:
    told = machine.run(PRELUDE + COPY_BLOCKS)
    assert told == "[[0], [1], [3], [3], [4], [5], [1], [7]]"
