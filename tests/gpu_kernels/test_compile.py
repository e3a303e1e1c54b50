"""Kernels compile without a GPU and stay within their budgets. All of them: `make check-gpu-code`."""

import os
import subprocess
import sys

import pytest

from kvd_cuda.gpu import scores_mma, scores_scalar
from kvd_cuda.gpu.compile import ARCHITECTURES, compiled
from kvd_cuda.gpu.merge import merge_kernel

from .assembler import assembled, ptx_of
from .catalogue import check_budget, keydiffs, small_kernels

SCORING = [
    scores_mma.statistics_kernel("bfloat16", 64, 4),
    scores_mma.votes_kernel("bfloat16", 64, 4),
    scores_mma.votes_kernel("float16", 80, 8),
    scores_mma.votes_kernel("float8_e4m3fn", 128, 4),
    scores_scalar.statistics_kernel("float32", "float32"),
    scores_scalar.votes_kernel("float8_e4m3fn", "float16"),
]


@pytest.mark.parametrize("kernel", [*small_kernels(), *keydiffs()], ids=lambda kernel: kernel.name)
def test_small_kernels_fit_the_oldest_architecture(kernel) -> None:
    check_budget(kernel, assembled(ptx_of(kernel), ARCHITECTURES[0]))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("kernel", SCORING, ids=lambda kernel: kernel.name)
def test_scoring_kernels_fit(kernel, architecture) -> None:
    check_budget(kernel, assembled(ptx_of(kernel), architecture))


def test_tensor_core_kernels_use_tensor_cores_and_asynchronous_copies() -> None:
    text = ptx_of(SCORING[1]).text
    assert text.count("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32") >= 8
    assert "ldmatrix.sync" in text
    assert "cp.async.cg.shared.global" in text


def test_ptx_is_kept_for_the_next_process(tmp_path) -> None:
    first = compiled(merge_kernel(), tmp_path)
    (kept,) = tmp_path.iterdir()
    written = kept.stat().st_mtime_ns
    assert compiled(merge_kernel(), tmp_path) == first
    assert kept.stat().st_mtime_ns == written


DAMAGES = [lambda text: text[:-9], lambda text: text.replace("0", "1"), lambda _: ""]


@pytest.mark.parametrize("damage", DAMAGES, ids=["cut off", "changed", "empty"])
def test_a_damaged_file_is_made_anew(tmp_path, damage) -> None:
    compiled(merge_kernel(), tmp_path)
    (kept,) = tmp_path.iterdir()
    kept.write_text(damage(kept.read_text()))
    again = compiled(merge_kernel(), tmp_path)
    assert assembled(again, ARCHITECTURES[0]).registers > 0
    assert kept.read_text().endswith(again.text)


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path) -> None:
    (tmp_path / "file").touch()
    assert compiled(merge_kernel(), tmp_path / "file").text.startswith("//")


COMPILE = """
import sys
from pathlib import Path
from kvd_cuda.gpu.compile import compiled
from kvd_cuda.gpu.merge import merge_kernel
print(hash(compiled(merge_kernel(), Path(sys.argv[1])).text))
"""


def test_processes_that_compile_at_once_get_the_same(tmp_path) -> None:
    command, environment = (
        [sys.executable, "-c", COMPILE, str(tmp_path)],
        os.environ | {"PYTHONHASHSEED": "0"},
    )
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in range(3)]
    assert len({process.communicate()[0] for process in started}) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_drivers_of_cuda_12_0_can_read_it() -> None:
    assert ".version 8.0\n" in ptx_of(merge_kernel()).text


def test_the_host_backend_needs_no_gpu_compiler() -> None:
    code = "import sys, kvd_cuda.host, kvd_cuda.compress; sys.exit('numba.cuda' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
