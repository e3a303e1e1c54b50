"""SnapKV on the GPU: scoring and choosing, beside what memory and tensor cores could do at best."""

from dataclasses import dataclass

import numpy as np
from gpu_bench.card import milliseconds
from gpu_bench.lease import BenchLease, Case

from kvd_cuda.gpu.device import KernelDevice
from kvd_cuda.gpu.device_lease import Columns
from kvd_cuda.gpu.launch_moves import Compaction, compact
from kvd_cuda.gpu.placing import DeviceSidecar, place
from kvd_cuda.gpu.voting import Electorate
from kvd_cuda.plan import CompressPlan

KEEP_PERCENT = 15
PASSES = 2  # over the keys: each row's log-sum-exp, then the votes


@dataclass(frozen=True)
class Ceiling:
    """What this card does in this run: copies (read plus written) and bf16 matmul, None without torch."""

    gb_per_s: float
    tflops: float | None

    def best_ms(self, case: Case) -> float:
        """Both passes of one layer, whichever bounds."""
        by_memory = PASSES * case.key_bytes / self.gb_per_s / 1e6
        by_matmul = 0.0 if self.tflops is None else PASSES * case.flop / self.tflops / 1e9
        return max(by_memory, by_matmul)


@dataclass(frozen=True)
class Timing:
    """One layer, milliseconds. `choose_ms` has scoring, pooling, selection and the kept slots' way out."""

    case: Case
    score_ms: float
    choose_ms: float
    best_ms: float
    compact_gb_per_s: float

    @property
    def of_roofline(self) -> float:
        """Of the scoring kernels."""
        return self.best_ms / self.score_ms


def kept_tokens(case: Case) -> int:
    """15 %, whole blocks, and never less than the window."""
    return max(-(-case.tokens * KEEP_PERCENT // 100 // 16) * 16, case.window + 16)


def measured(device: KernelDevice, case: Case, ceiling: Ceiling, rounds: int) -> Timing:
    """Times of one case; its lease is gone afterwards."""
    lease = BenchLease(device, case)
    plan = CompressPlan(method="snapkv", target_tokens=kept_tokens(case), window=case.window)
    choose_ms = milliseconds(
        device, lambda: lease.backend.top_tokens(lease.planes, plan, lease.queries), rounds
    )
    score_ms = scoring_ms(device, lease, rounds)
    moved_gb_per_s = compaction_gb_per_s(device, lease, plan.target_tokens, rounds)
    lease.close()
    return Timing(case, score_ms, choose_ms, ceiling.best_ms(case), moved_gb_per_s)


def scoring_ms(device: KernelDevice, lease: BenchLease, rounds: int) -> float:
    """The kernels from queries to attention by slot, all kv heads at once."""
    device.rewind()
    placed = place(device, lease.planes, DeviceSidecar(0, 0))
    voters = Electorate(device, placed, lease.queries, lease.planes.length)
    mark = device.mark()

    def score() -> None:
        device.rewind(mark)
        voters.attention(placed.columns)

    return milliseconds(device, score, rounds)


def compaction_gb_per_s(device: KernelDevice, lease: BenchLease, count: int, rounds: int) -> float:
    """K and V of the kept slots, read plus written, in place; what they hold does not matter here."""
    planes, heads = lease.planes, lease.planes.kv_heads
    device.rewind()
    placed = place(device, planes, lease.backend.sidecar)
    kept = np.linspace(0, planes.length - 1, count).astype(np.int32)
    move = Compaction(
        columns=Columns(0, 1, 0, heads),
        goal=device.put(planes.block_table[: -(-count // planes.block_size)]),
        kept=device.put(np.tile(kept, heads)),
        count=count,
        in_place=True,
    )
    took_ms = milliseconds(device, lambda: device.run(compact(placed, move)), rounds)
    head_bytes = (planes.k[0].shape[3] + planes.v[0].shape[3]) * planes.k[0].itemsize
    return float(2 * count * heads * head_bytes / took_ms / 1e6)
