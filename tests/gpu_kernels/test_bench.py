"""`make bench-gpu` runs, on tiny shapes over the fake driver; what it would measure there is no figure."""

import os
import subprocess
import sys
from pathlib import Path

from tests.fakecuda import fake_gpus

BENCH = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_gpu.py"


def said(environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, str(BENCH), *arguments]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_without_a_gpu_it_says_so_in_one_line_and_measures_nothing(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").touch()
    told = said(os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}, "--json", str(tmp_path / "gpu.json"))
    assert told.startswith("bench-gpu: nothing was measured; no CUDA driver here")
    assert told.count("\n") == 1
    assert not (tmp_path / "gpu.json").exists()


def test_every_measurement_runs() -> None:
    with fake_gpus(memory=2 << 30) as gpus:
        told = said(gpus.full_environment(), "--check")
    assert told == "bench-gpu: 2 cases ran on NVIDIA Fake; tiny shapes, so no figures\n"
