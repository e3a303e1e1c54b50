"""Workers at work, and faults at random, for a while; then the count of what was lost.

python -m tests.chaos.run [--seconds 300] [--seed N] [--workers 5] [--json FILE]

Exit status 1 if anything was lost, leaked, owned twice, or hung.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import grpc

from .audit import findings
from .faults import FAULTS, Fault, fill_run_dir, mounted_tmpfs
from .report import Outcome
from .stage import PATIENCE_S, Stage
from .unmounting import unmounted
from .worker import POOL

AUDIT_EVERY = 4  # faults
CALM_S = (0.2, 1.2)  # between two faults: time to do something that can be lost
TMPFS_MIB = 96  # of the run dir: journal segments and their successors fit
MAX_SUPERVISOR_GROWTH_BYTES = 16 << 20  # of its memory over a whole run
POOL_DESCRIPTORS = 2  # that the supervisor keeps of a pool: its bytes, and the sidecar
CRASH_LOOPS = 50  # daemon kills in a row, after which nothing may have piled up


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--crash-loops", type=int, default=CRASH_LOOPS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    outcome = Outcome(seed, options.seconds)
    print(f"chaos: seed {seed}, {options.seconds:g} s, {options.workers} workers", flush=True)
    with tempfile.TemporaryDirectory(prefix="kvd-chaos-") as folder:
        run(Path(folder), outcome, options.workers, options.crash_loops)
    print("\n".join(outcome.lines()), flush=True)
    if options.json:
        options.json.write_text(json.dumps(outcome.as_dict(), indent=1) + "\n")
    sys.exit(1 if outcome.unexcused or outcome.wrong_bytes else 0)


def run(folder: Path, outcome: Outcome, workers: int, crash_loops: int) -> None:
    """Fill `outcome`. Nothing is left behind, whatever happens."""
    faults = dict(FAULTS)
    with unmounted(folder / "small"):
        if not mounted_tmpfs(folder / "small", TMPFS_MIB):
            del faults[fill_run_dir]
            outcome.left_out.append("fill_run_dir: no right to mount a small tmpfs here")
        stage = Stage(folder / "small", outcome.seed)
        try:
            stage.open()
            before = stage.supervisor_costs()
            for _ in range(workers):
                stage.start_worker()
            _inflict(stage, outcome, faults)
            _crash_loops(stage, outcome, crash_loops)
            _end(stage, outcome, before)
        except (AssertionError, grpc.RpcError) as error:
            outcome.unexcused.append(f"{error}\n{stage.last_words()}")
        finally:
            stage.close()


def _inflict(stage: Stage, outcome: Outcome, faults: dict[Fault, int]) -> None:
    rng = random.Random(outcome.seed)
    deadline = time.monotonic() + outcome.seconds
    count = 0
    while time.monotonic() < deadline:
        time.sleep(rng.uniform(*CALM_S))
        fault = rng.choices(list(faults), list(faults.values()))[0]
        took_s = fault(stage, rng)
        outcome.faults[fault.__name__] += 1
        if took_s is not None:
            outcome.recoveries_s[fault.__name__].append(took_s)
        count += 1
        if count % AUDIT_EVERY == 0:
            _audit(stage, outcome)


def _audit(stage: Stage, outcome: Outcome) -> None:
    states = stage.pause()
    stage.tidy({int(lease_id) for state in states for lease_id in state["leases"]})
    outcome.unexcused += findings(stage, states)
    on_disk = stage.status().disk_tier_used_bytes
    outcome.most_on_disk_bytes = max(outcome.most_on_disk_bytes, on_disk)
    outcome.audits += 1
    stage.resume()


def _crash_loops(stage: Stage, outcome: Outcome, count: int) -> None:
    """One daemon after the other, under workers at rest; then all they hold is still there."""
    kill_daemon = next(fault for fault in FAULTS if fault.__name__ == "kill_daemon")
    stage.pause()
    for _ in range(count):
        outcome.recoveries_s["crash_loop"].append(kill_daemon(stage, random.Random(0)) or 0.0)
        outcome.faults["crash_loop"] += 1
    stage.resume()
    _audit(stage, outcome)


def _end(stage: Stage, outcome: Outcome, before: tuple[int, int]) -> None:
    """All workers end in peace; nothing is leased, and nothing has grown."""
    for worker in stage.workers:
        worker.state_file.unlink(missing_ok=True)
        worker.process.send_signal(signal.SIGTERM)
    for worker in stage.workers:
        status = worker.process.wait(PATIENCE_S)
        if status != 0:
            log = (stage.folder / f"worker-{worker.number}.log").read_text()
            outcome.unexcused.append(f"worker {worker.number} ended with status {status}:\n{log}")
            continue
        outcome.add_worker(worker.state())
    stage.recovered_after(lambda: not stage.session_pids(), "all sessions to end")
    stage.tidy(set())
    pool = stage.status().pools[0]
    left = {
        "leased": pool.blocks_leased,
        "sealed": pool.blocks_sealed,
        "quarantined": pool.blocks_quarantined,
    }
    outcome.unexcused += [f"{count} blocks {state} at the end" for state, count in left.items() if count]
    stage.daemon.drop_pool(POOL)
    tiers = stage.status()
    if tiers.host_tier_used_bytes or tiers.disk_tier_used_bytes:
        outcome.unexcused.append(
            f"nobody's: {tiers.host_tier_used_bytes} bytes of the host tier, "
            f"{tiers.disk_tier_used_bytes} of the disk"
        )
    most = before[0] - POOL_DESCRIPTORS
    stage.recovered_after(
        lambda: stage.supervisor_costs()[0] <= most, f"the supervisor to keep no more than {most} descriptors"
    )
    resident = stage.supervisor_costs()[1]
    if resident > before[1] + MAX_SUPERVISOR_GROWTH_BYTES:
        outcome.unexcused.append(f"the supervisor grew from {before[1]} to {resident} bytes")
    stage.kvd.stop()


if __name__ == "__main__":
    main()
