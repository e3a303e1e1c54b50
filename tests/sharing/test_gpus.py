"""What only GPUs have: visibility, views of frameworks, streams, memory that is late, a GPU that fails."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.client.daemon import Daemon
from tests.fakecuda import fake_gpus
from tests.running_kvd import eventually, is_alive, running_kvd

import kvd_client.cli
from kvd_client import (
    GpuDriverError,
    GpuNotVisibleError,
    InvalidArgumentError,
    LeaseLostError,
)
from kvd_daemon.kernel.budgets import silence_s
from kvd_daemon.kernel.messages import MapPool

from .workers import Site, Worker

BLOCKS = 32
GPU0 = "GPU-a0fa4ec0-da00-0000-0000-000000000000"


def new_pool(worker: Worker, blocks: int = BLOCKS) -> str:
    name = f"pool-{uuid.uuid4().hex[:8]}"
    worker.pool(name=name, blocks=blocks)
    return name


@pytest.mark.parametrize("visible", ["0", "1,0", GPU0, "GPU-a0f"])
def test_a_worker_finds_the_pools_gpu_under_whatever_number_it_sees_it(on_gpu: Site, visible: str) -> None:
    worker = on_gpu.worker(CUDA_VISIBLE_DEVICES=visible)
    pool = new_pool(worker)
    worker.fill(pool=pool, lease="a", tokens=16, value=1.0)
    assert worker.numbers(lease="a")[0] == 1.0
    device = worker.hold_view(pool=pool)["device"]
    assert device == [2, 1 if visible == "1,0" else 0]


def test_a_worker_that_does_not_see_the_pools_gpu_is_told_what_hides_it(on_gpu: Site) -> None:
    worker = on_gpu.worker(CUDA_VISIBLE_DEVICES="1")
    with pytest.raises(GpuNotVisibleError, match=f"{GPU0} is not visible.*CUDA_VISIBLE_DEVICES='1'"):
        new_pool(worker)


def test_a_worker_without_a_driver_is_told_so(on_gpu: Site, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").touch()
    worker = on_gpu.worker(LD_LIBRARY_PATH=str(tmp_path))
    with pytest.raises(GpuDriverError, match="no CUDA driver here"):
        new_pool(worker)


def test_a_view_says_what_a_framework_must_know_and_keeps_the_memory(on_gpu: Site) -> None:
    worker = on_gpu.worker()
    pool = new_pool(worker)
    worker.fill(pool=pool, lease="a", tokens=16, value=7.0)
    view = worker.hold_view(pool=pool)
    # two layers of (K of 8, V of 16) x 2 heads x 16 tokens are a block
    assert view == {
        "shape": [BLOCKS + 1, 16, 2, 8],
        "strides": [2 * 16 * 2 * (8 + 16), 16, 8, 1],
        "dtype": [2, 32, 1],
        "device": [2, 0],
    }
    assert worker.look_at_held() == 1007.0
    worker.close(pool=pool)
    daemon = Daemon(on_gpu.kvd, on_gpu.device)
    daemon.drop_pool(pool)
    assert worker.look_at_held() == 1007.0


@pytest.mark.parametrize(
    ("name", "told"), [("numpy", "numpy cannot see"), ("torch", "this torch cannot use")]
)
def test_a_framework_that_cannot_see_the_memory_is_refused_with_another_way(
    on_gpu: Site, name: str, told: str
) -> None:
    worker = on_gpu.worker()
    with pytest.raises(InvalidArgumentError, match=told):
        worker.framework(pool=new_pool(worker), name=name)


def test_a_commit_waits_for_the_stream_that_it_names_and_for_no_other(on_gpu: Site) -> None:
    worker = on_gpu.worker()
    pool = new_pool(worker)
    worker.fill(pool=pool, lease="a", tokens=16, value=1.0)
    assert not on_gpu.gpus.synchronized(worker.process.pid)
    worker.fill(pool=pool, lease="a", tokens=16, value=1.0, stream=0)
    assert on_gpu.gpus.synchronized(worker.process.pid)


def test_bytes_that_a_worker_wrote_from_host_memory_have_arrived_when_it_goes_on(on_gpu: Site) -> None:
    worker = on_gpu.worker()
    worker.fill(pool=new_pool(worker), lease="a", tokens=16, value=1.0)
    assert on_gpu.gpus.synchronized(worker.process.pid, stream=1)


def test_the_control_process_has_no_context_and_the_kernel_worker_has_one(on_gpu: Site) -> None:
    worker = on_gpu.worker()
    worker.fill(pool=new_pool(worker), lease="a", tokens=160, value=1.0)
    worker.compress(lease="a", method="streaming")
    having = on_gpu.gpus.context_pids()
    assert on_gpu.kvd.daemon_pid(on_gpu.device) not in having
    assert {on_gpu.kernel_pid(), worker.process.pid} <= having


def test_new_memory_has_nothing_of_those_who_had_it_before(on_gpu: Site) -> None:
    worker = on_gpu.worker()
    pool = new_pool(worker)
    assert set(worker.peek(pool=pool, block_ids=list(range(BLOCKS + 1)))) == {0.0}


def test_a_gpu_that_cannot_zero_new_memory_gives_none(tmp_path: Path) -> None:
    with (
        fake_gpus(memory=64 << 20, no_context=1) as gpus,
        running_kvd(tmp_path, "--gpus", environment=gpus.full_environment()) as kvd,
    ):
        told = gpus.run(IMPATIENT.replace("DeviceFullError", "KvdError"), str(kvd.run_dir), "60")
        assert "new memory could not be zeroed" in told
        descriptors = Path(f"/proc/{kvd.daemon_pid('gpu0')}/fd").iterdir()
        assert not any("/memory-" in os.readlink(descriptor) for descriptor in descriptors)


@pytest.mark.parametrize("where", ["compact_1", "compact_sidecar"])
def test_a_kernel_worker_that_dies_in_a_kernel_loses_the_lease_that_it_moves_and_no_other(
    on_gpu: Site, where: str
) -> None:
    worker = on_gpu.worker()
    pool = new_pool(worker, blocks=22)  # two leases of 160 tokens fill it: bytes have to move in place
    for lease, value in (("a", 100.0), ("b", 300.0)):
        worker.fill(pool=pool, lease=lease, tokens=160, value=value)
    kernel_pid = on_gpu.kernel_pid()
    on_gpu.gpus.kill_in_kernel(kernel_pid, where)
    with pytest.raises(LeaseLostError):
        worker.compress(lease="a", method="streaming")
    assert not is_alive(kernel_pid)
    assert worker.numbers(lease="b") == [300.0 + t for t in range(160)]
    kept, positions = worker.compress(lease="b", method="streaming")
    assert worker.numbers(lease="b") == [300.0 + position for position in positions[:kept]]


def test_a_kernel_worker_that_dies_while_it_scores_costs_a_retry_that_the_library_makes(on_gpu: Site) -> None:
    worker = on_gpu.worker()
    pool = new_pool(worker)
    worker.fill(pool=pool, lease="a", tokens=160, value=100.0)
    kernel_pid = on_gpu.kernel_pid()
    on_gpu.gpus.kill_in_kernel(kernel_pid, "votes_")
    kept, positions = worker.compress(lease="a", method="snapkv")
    assert not is_alive(kernel_pid)
    assert worker.numbers(lease="a") == [100.0 + position for position in positions[:kept]]


def test_a_pool_whose_owner_has_died_is_lost_with_the_next_daemon(sites: Callable[[str], Site]) -> None:
    old = sites("cuda_legacy")
    worker = old.worker()
    pool = new_pool(worker)
    worker.fill(pool=pool, lease="a", tokens=16, value=1.0)
    daemon = old.kvd.daemon_pid(old.device)
    for pid in [*old.owners(), daemon]:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not is_alive(daemon), "the daemon's end")
    with pytest.raises(LeaseLostError):
        worker.fill(pool=pool, lease="a", tokens=160, value=1.0)
    worker.fill(pool=new_pool(worker), lease="b", tokens=16, value=1.0)
    old.clear()


def test_a_kernel_worker_gets_the_time_that_a_context_may_take() -> None:
    host, gpu = MapPool("pool", {}, BLOCKS), MapPool("pool", {}, BLOCKS, "cuda", GPU0)
    assert silence_s(gpu, None) > silence_s(host, None)


TAKE = """
import sys
import kvd_cuda.driver as d
gpu = d.gpus(d.load_driver())[0]
fd = d.create_shareable(gpu, 60 << 20)
print(flush=True)
sys.stdin.read()
"""


def test_memory_that_somebody_else_has_is_waited_for_within_the_workers_patience(tmp_path: Path) -> None:
    with (
        fake_gpus(memory=64 << 20, return_ms=400) as gpus,
        running_kvd(tmp_path, "--gpus", environment=gpus.full_environment()) as kvd,
    ):
        taking = subprocess.Popen(
            [sys.executable, "-c", TAKE], env=gpus.full_environment(), stdin=-1, stdout=-1, text=True
        )
        assert taking.stdout is not None
        taking.stdout.readline()
        environment = gpus.full_environment()
        told = gpus.run(IMPATIENT, str(kvd.run_dir), "1")
        assert told.startswith("DeviceFullError")
        assert "comes back in a moment" in told
        patient = Worker(kvd.run_dir, "gpu0", environment)
        taking.kill()
        taking.communicate()
        assert patient.pool(name="pool", blocks=2000)
        patient.kill()


IMPATIENT = """
import sys
import kvd_client
with kvd_client.connect(sys.argv[1], timeout=float(sys.argv[2])) as client:
    try:
        client.pool("pool", kvd_client.KVSpec(layers=2, kv_heads=2, head_dim=8, dtype="float32"), 2000)
    except kvd_client.DeviceFullError as error:
        print(type(error).__name__, error)
"""


def test_a_gpu_that_fails_leaves_the_others_serving_and_comes_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_gpus(devices=2, memory=64 << 20, no_vmm=2) as gpus:
        arguments = ("--gpus", "0-1", "--gpu-sharing", "descriptors")
        with running_kvd(tmp_path, *arguments, environment=gpus.full_environment()) as kvd:
            assert "gpu0 0.85 of its memory, gpu1 does not serve" in kvd.ready_line
            assert "gpu1: NVIDIA Fake" in kvd.log.read_text()
            worker = Worker(kvd.run_dir, "gpu0", gpus.full_environment())
            worker.fill(pool=new_pool(worker), lease="a", tokens=16, value=1.0)
            gpus.lose(0)
            kvd_pid = kvd.daemon_pid("gpu0")
            subprocess.run(["kill", "-9", str(kvd_pid)], check=True)
            eventually(lambda: (kvd.run_dir / "gpu0/down").exists(), "a sign that gpu0 is down")
            assert kvd_client.cli.main(["--run-dir", str(kvd.run_dir), "status"]) == 1
            assert "gpu0  unreachable" in capsys.readouterr().out
            gpus.find(0)
            eventually(lambda: not (kvd.run_dir / "gpu0/down").exists(), "gpu0 to come back")
            assert worker.numbers(lease="a")[0] == 1.0
            worker.kill()


def test_one_command_shows_the_pools_of_all_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (
        fake_gpus(devices=2, memory=64 << 20) as gpus,
        running_kvd(tmp_path, "--gpus", "0-1", environment=gpus.full_environment()) as kvd,
    ):
        for device in ("gpu0", "gpu1"):
            worker = Worker(kvd.run_dir, device, gpus.full_environment())
            worker.pool(name=f"of-{device}", blocks=BLOCKS)
            worker.kill()
        page = ["--run-dir", str(kvd.run_dir), "pool", "status"]
        eventually(lambda: kvd_client.cli.main(page) == 0, "both kernel workers")
        capsys.readouterr()
        assert kvd_client.cli.main(page) == 0
        shown = capsys.readouterr().out
    assert all(name in shown for name in ("gpu0  serving", "of-gpu0", "gpu1  serving", "of-gpu1"))


def test_a_policy_that_has_no_kernels_is_refused_and_the_lease_is_as_it_was(on_gpu: Site) -> None:
    worker = on_gpu.worker()
    worker.fill(pool=new_pool(worker), lease="a", tokens=160, value=1.0)
    with pytest.raises(InvalidArgumentError, match="on the host only"):
        worker.compress(lease="a", method="expected")
    assert worker.numbers(lease="a") == [1.0 + t for t in range(160)]


def refusal(folder: Path, environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-m", "kvd_daemon.cli", "--run-dir", str(folder / "run"), *arguments]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (2, "")
    return ran.stderr


def test_without_a_driver_kvd_says_so_in_one_line_and_names_host_memory(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").touch()
    with fake_gpus() as gpus:
        environment = gpus.full_environment({"LD_LIBRARY_PATH": str(tmp_path)})
        told = refusal(tmp_path, environment, "--gpus", "0")
    assert told.count("\n") == 1
    assert "no CUDA driver here" in told
    assert "--host-memory" in told


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with fake_gpus(devices=2) as gpus:
        assert f"there is no GPU 7 here; there are 0={GPU0}" in refusal(
            tmp_path, gpus.full_environment(), "--gpus", "0,7"
        )


def test_more_memory_than_a_gpu_has_is_refused(tmp_path: Path) -> None:
    with fake_gpus(memory=1 << 30) as gpus:
        told = refusal(tmp_path, gpus.full_environment(), "--gpus", "0", "--memory", "60GiB")
    assert "has 1.0 GiB; ask for less" in told


def test_where_nothing_can_be_shared_the_only_gpu_ends_kvd_with_the_way_out(tmp_path: Path) -> None:
    with fake_gpus(wsl=1) as gpus:
        told = refusal(tmp_path, gpus.full_environment(), "--gpus", "0", "--gpu-sharing", "descriptors")
    assert "cannot share memory as descriptors" in told
    assert "--host-memory SIZE" in told


def test_on_wsl_a_pool_is_refused_since_neither_way_of_sharing_works(tmp_path: Path) -> None:
    with (
        fake_gpus(wsl=1) as gpus,
        running_kvd(tmp_path, "--gpus", environment=gpus.full_environment()) as kvd,
    ):
        told = gpus.run(IMPATIENT.replace("DeviceFullError", "KvdError"), str(kvd.run_dir), "60")
    assert "WSL2 never does" in told
