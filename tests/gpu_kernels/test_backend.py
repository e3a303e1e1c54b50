"""CudaBackend keeps and moves what HostBackend does: over the fake driver, and on a GPU (`make test-gpu`)."""

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from tests.fakecuda import fake_gpus
from tests.kernels.leases import Shape, make_lease

from kvd_cuda.backend import NAN_KEYS, NAN_SCORES, WRONG_LSE
from kvd_cuda.gpu.device_lease import Columns
from kvd_cuda.gpu.placing import Needs, column_groups

from .assembler import ROOT
from .twin_cases import PARTED, PLANS

RUN = "from tests.gpu_kernels.twin_cases import main; main()"
OUT_OF_PLACE = [f"{name}, out of place" for name, (_, plan) in PLANS.items() if plan.method != "span_block"]
IN_PARTS = [f"{name}, in parts" for name in PARTED]


SANITIZER = ("compute-sanitizer", "--error-exitcode", "9")  # part of NVIDIA's toolkit; used where it is there


def on_a_real_gpu() -> str:
    """What the cases print there."""
    prefix = SANITIZER if shutil.which(SANITIZER[0]) else ()
    command = [*prefix, sys.executable, "-c", RUN]
    ran = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return next(line for line in ran.stdout.splitlines() if line.startswith("{"))


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=pytest.mark.gpu)])
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "real":
        outcomes: dict[str, Any] = json.loads(on_a_real_gpu())
        return outcomes
    with fake_gpus(memory=64 << 20) as gpus:
        outcomes = json.loads(gpus.run(RUN))
    return outcomes


@pytest.mark.parametrize("case", [*PLANS, *OUT_OF_PLACE, *IN_PARTS, "with log-sum-exps"])
def test_bytes_positions_and_attention_are_the_host_backends(found: dict[str, Any], case: str) -> None:
    outcome = found[case]
    assert outcome["same"]
    assert outcome["kept"][0] == outcome["kept"][1]
    assert outcome["blocks"][0] == outcome["blocks"][1]
    assert outcome["mass_error"] < 1e-6
    assert outcome["score_error"] < 1e-5


@pytest.mark.parametrize("case", ["a key that is NaN", "a query that is NaN"])
def test_nan_is_refused(found: dict[str, Any], case: str) -> None:
    assert found[case] == NAN_SCORES


def test_nan_keys_are_refused_by_keydiff(found: dict[str, Any]) -> None:
    assert found["a key that is NaN, to keydiff"] == NAN_KEYS


def test_a_wrong_log_sum_exp_is_refused(found: dict[str, Any]) -> None:
    assert found["a wrong log-sum-exp"] == WRONG_LSE


def test_blocks_that_kernels_cannot_count_are_refused(found: dict[str, Any]) -> None:
    assert "use smaller blocks" in found["blocks of 2 GiB"]


def test_a_lease_that_not_even_one_column_of_fits_is_refused_with_the_way_out(found: dict[str, Any]) -> None:
    assert "compress it earlier" in found["no room"]


@pytest.mark.parametrize(
    ("room_bytes", "groups"),
    [
        (1 << 20, [Columns(0, 3, 0, 4)]),
        (15_000, [Columns(0, 2, 0, 4), Columns(2, 1, 0, 4)]),
        (12_000, [Columns(layer, 1, 0, 4) for layer in range(3)]),
        (8_000, [Columns(layer, 1, head, 3 - head // 3 * 2) for layer in range(3) for head in (0, 3)]),
    ],
)
def test_as_many_columns_go_together_as_fit(room_bytes: int, groups: list[Columns]) -> None:
    planes = make_lease(np.random.default_rng(1), Shape(layers=3, kv_heads=4, length=20)).planes
    assert list(column_groups(room_bytes, planes, Needs(column=1_000, layer=500))) == groups
