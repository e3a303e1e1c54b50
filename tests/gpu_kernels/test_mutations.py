"""The tests would notice: a kernel with one thing wrong is refused by the interpreter or miscounts."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from tests.kernels.leases import Shape, make_lease
from tests.ptx.interpreter.errors import PtxError

from kvd_cuda.dtypes import Array
from kvd_cuda.gpu import merge, selection
from kvd_cuda.gpu.compaction import compact_kernel, sidecar_kernel
from kvd_cuda.gpu.kernel import Kernel
from kvd_cuda.gpu.launch_choice import select
from kvd_cuda.gpu.launch_moves import Compaction, compact
from kvd_cuda.gpu.launch_scores import Scratch, score

from .assembler import ptx_of
from .simulated import SimulatedDevice, ids, whole_window
from .test_scores import Case, make_case

BARRIER = re.compile(r"bar\.sync\s+0;")
WAIT = re.compile(r"cp\.async\.wait_group (\d);")

MMA = Shape(layers=1, head_dim_k=64, group=4, block_size=4, length=203, dtype="bfloat16")
SCALAR = Shape(layers=1, group=3, head_dim_k=48, block_size=4, length=75)
WINDOW = 7  # with the groups above, more than one row tile on ordinary cores


def without_barriers(text: str) -> Iterator[str]:
    """One barrier removed, each in turn."""
    return (text[: found.start()] + text[found.end() :] for found in BARRIER.finditer(text))


def waiting_too_little(text: str) -> Iterator[str]:
    """One wait that lets one more group of copies be under way."""
    for found in WAIT.finditer(text):
        yield text[: found.start(1)] + str(int(found[1]) + 1) + text[found.end(1) :]


def off_by_one(text: str, table: int) -> str:
    """The block table, parameter number `table`, read one entry further on."""
    loaded = re.compile(rf"ld\.param\.u64\s+(%rd\d+), \[\w+_param_{table}\];")
    assert loaded.search(text)
    return loaded.sub(r"\g<0> add.s64 \1, \1, 4;", text)


def is_caught(run: Callable[[], object]) -> bool:
    """Whether `run` stops, or its numbers are wrong."""
    try:
        run()
    except (PtxError, AssertionError):
        return True
    return False


def scoring_kernel(case: Case, prefix: str) -> Kernel:
    nowhere = Scratch(parts=0, bases=0, sums=0, peaks=0, row_sums=0, errors=0)
    launches = score(whole_window(case.device_lease, case.device_queries), nowhere)
    return next(launch.kernel for launch in launches if launch.kernel.name.startswith(prefix))


@pytest.mark.parametrize("prefix", ["statistics", "votes"])
@pytest.mark.parametrize("shape", [MMA, SCALAR], ids=["tensor cores", "ordinary cores"])
def test_every_mutant_of_the_scoring_kernels_is_caught(shape, prefix) -> None:
    case = make_case(shape, WINDOW)
    right = case.scored()
    kernel = scoring_kernel(case, prefix)
    text = ptx_of(kernel).text
    made = [*without_barriers(text), *waiting_too_little(text), off_by_one(text, table=2)]
    assert len(made) >= (5 if shape is MMA else 3)
    for number, mutant in enumerate(made):
        case = make_case(shape, WINDOW)
        case.device.changed[kernel.name] = mutant
        assert is_caught(lambda: same(case.scored(), right)), f"mutant {number} of {len(made)}"  # noqa: B023


def same(found: tuple[Array, ...], right: tuple[Array, ...]) -> None:
    for mine, theirs in zip(found, right, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(("kernel", "tables"), [(compact_kernel(16), (1, 2)), (sidecar_kernel(), (2, 3))])
def test_every_mutant_of_in_place_compaction_is_caught(kernel, tables) -> None:
    right = compacted({})
    text = ptx_of(kernel).text
    made = [*without_barriers(text), *(off_by_one(text, table) for table in tables)]
    assert len(made) >= 3
    for number, mutant in enumerate(made):
        assert is_caught(lambda: same(compacted({kernel.name: mutant}), right)), number  # noqa: B023


def compacted(changed: dict[str, str]) -> tuple[Array, ...]:
    """K, V, positions and scores after keeping 1,100 of 1,130 slots: every tile reads what it writes."""
    rng = np.random.default_rng(9)
    shape = Shape(layers=1, kv_heads=1, head_dim_k=16, head_dim_v=16, length=1130, dtype="float16")
    lease = make_lease(rng, shape)
    planes = replace(lease.planes, compressed_length=1130, observed_length=1130)
    planes.positions[...] = rng.permutation(planes.positions.size).reshape(planes.positions.shape)
    planes.scores[...] = planes.positions
    kept = ids(np.sort(rng.permutation(1130)[:1100])).reshape(1, 1, 1100)
    device = SimulatedDevice()
    device.changed.update(changed)
    goal = planes.block_table[:69]
    device_lease = device.put_lease(planes)
    places = {"goal": device.put(goal), "kept": device.put(kept)}
    move = Compaction(columns=device_lease.columns, count=1100, in_place=True, **places)
    device.run(compact(device_lease, move))
    device.fetch()
    moved = (lease.stored_keys(planes, 0), lease.stored_values(planes, 0))
    return *moved, planes.positions, planes.scores


def test_every_barrier_of_the_selection_is_needed() -> None:
    scores = np.random.default_rng(3).integers(0, 500, (1, 2500)).astype(np.float32)
    shape = selection.SelectShape(2500, 3, 2400, 2500, 900)

    def chosen(changed: dict[str, str]) -> tuple[Array, ...]:
        device = SimulatedDevice()
        device.changed.update(changed)
        kept = device.room(900, np.int32)
        device.run(select(1, shape, device.put(scores), kept))
        return (device.get(kept, (900,), np.int32),)

    right = chosen({})
    for number, mutant in enumerate(without_barriers(ptx_of(selection.select_kernel()).text)):
        assert is_caught(lambda: same(chosen({"select": mutant}), right)), number  # noqa: B023


def test_the_barrier_of_the_check_is_needed() -> None:
    case = make_case(SCALAR, WINDOW)
    (mutant,) = without_barriers(ptx_of(merge.check_kernel()).text)
    case.device.changed["check"] = mutant
    assert is_caught(case.scored)
