"""How long a kernel worker may be silent over a job: what its largest step needs on a very slow machine.

The worker says `Working` between steps, so a long job is healthy as long as its steps end.
"""

from kvd.spec import KVSpec
from kvd_daemon.kernel import messages as m

PATIENCE_S = 8.0  # seconds for the step itself; a step takes milliseconds
SLOWEST_BYTES_PER_S = 100e6  # a step's bytes, each read and written; memory does a hundred times that
DISK_S = 60.0  # seconds for a slot; disks stand still when they write back, and only who waits for it waits
START_S = 90.0  # seconds from one word to the next while a worker imports and compiles
GPU_CONTEXT_S = 60.0  # seconds for the driver and a context; many where no persistence daemon runs
SCRUB_STEP_BYTES = 64 << 20  # bytes zeroed from one word to the next


def silence_s(request: m.Request, spec: KVSpec | None) -> float:
    """Seconds of silence after which the worker is taken to hang. `spec` is the pool's, if it has one."""
    if isinstance(request, m.CopySlots | m.Punch):
        return DISK_S
    if isinstance(request, m.MapPool) and request.kind != "host":
        return GPU_CONTEXT_S
    return PATIENCE_S + _step_bytes(request, spec) / SLOWEST_BYTES_PER_S


def _step_bytes(request: m.Request, spec: KVSpec | None) -> int:
    """Bytes that the largest step moves: a layer's plane of the lease, or the queries that are read first."""
    match request:
        case m.Populate(byte_count=byte_count):
            return byte_count
        case m.Scrub():
            return SCRUB_STEP_BYTES
        case m.Stow() | m.Fetch():
            assert spec is not None, "a job of a pool that was mapped"
            return spec.block_bytes
        case m.Compress() | m.Observe():
            assert spec is not None, "a job of a pool that was mapped"
            plane_bytes = request.source.size * spec.block_bytes // spec.layers
            return max(plane_bytes, request.scratch.size * spec.block_bytes, SCRUB_STEP_BYTES)
        case _:
            return 0
