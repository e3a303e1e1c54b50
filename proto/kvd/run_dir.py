"""Where a daemon and its workers meet: the run directory's path and what lies in it."""

from collections.abc import Mapping
from pathlib import Path

GRPC_SOCKET = "grpc.sock"
ATTACH_SOCKET = "attach.sock"
LOCK_FILE = "lock"
DOWN_FILE = "down"
"""Says why no daemon of this device runs, written by the supervisor."""
MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un.sun_path is 108, its final zero included


def default_run_dir(environ: Mapping[str, str], uid: int) -> Path:
    """$KVD_RUN_DIR, else /run/kvd for root, else $XDG_RUNTIME_DIR/kvd, else /tmp/kvd-UID."""
    if chosen := environ.get("KVD_RUN_DIR"):
        return Path(chosen)
    if uid == 0:
        return Path("/run/kvd")
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "kvd"
    return Path(f"/tmp/kvd-{uid}")
