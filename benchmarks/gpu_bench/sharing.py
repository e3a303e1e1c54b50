"""A large pool made, zeroed, and mapped by workers: through a real kvd on this machine's first GPU."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import kvd_client

SPEC = kvd_client.KVSpec(layers=32, kv_heads=8, head_dim=128)  # 2 MiB a block
READY_S = 120.0  # seconds; a first start may compile
ATTACH = """
import sys, time
import kvd_client
with kvd_client.connect(sys.argv[1], device="gpu0", timeout=120) as client:
    began = time.perf_counter()
    client.pool("pool")
    print(time.perf_counter() - began)
"""


def sharing_s(pool_bytes: int) -> dict[str, float]:
    """Seconds: the pool created (zeroing included) and mapped by its maker; mapped by another
    process, which makes a context for it."""
    blocks = pool_bytes // SPEC.block_bytes
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kvd_daemon.cli", "--run-dir", folder, "--gpus", "0"]
        kvd = subprocess.Popen([*command, "--memory", str(pool_bytes + (1 << 30))], stdout=subprocess.PIPE)
        try:
            assert kvd.stdout is not None
            assert kvd.stdout.readline().startswith(b"kvd ready"), "kvd did not start"
            return _created_and_mapped(Path(folder), blocks)
        finally:
            kvd.terminate()
            kvd.wait(READY_S)


def _created_and_mapped(run_dir: Path, blocks: int) -> dict[str, float]:
    with kvd_client.connect(run_dir, device="gpu0", timeout=READY_S) as client:
        began = time.perf_counter()
        client.pool("pool", SPEC, blocks)
        made_s = time.perf_counter() - began
        command = [sys.executable, "-c", ATTACH, str(run_dir)]
        mapped = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {"created, zeroed, mapped": made_s, "mapped by another process": float(mapped)}
