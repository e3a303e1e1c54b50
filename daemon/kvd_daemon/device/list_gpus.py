"""`python -m kvd_daemon.device.list_gpus`: what GPUs there are, as JSON, for whoever loads no driver."""

import json
import subprocess
import sys

from kvd.errors import InvalidArgumentError
from kvd_cuda.driver import CudaError, gpus, load_driver

PATIENCE_S = 60.0  # seconds for the driver to start; without the persistence daemon it takes many
HOST_INSTEAD = "or serve host memory: --host-memory SIZE"


def visible_gpus() -> list[str]:
    """UUIDs in order, asked in a process of its own. Raises InvalidArgumentError where there is no driver."""
    command = [sys.executable, "-m", "kvd_daemon.device.list_gpus"]
    try:
        ran = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise InvalidArgumentError(
            f"--gpus: the CUDA driver does not answer ({error}); {HOST_INSTEAD}"
        ) from error
    told = json.loads(ran.stdout)
    if "error" in told:
        raise InvalidArgumentError(f"--gpus: {told['error']}; {HOST_INSTEAD}")
    uuids: list[str] = told["uuids"]
    return uuids


def main() -> None:
    told: dict[str, object]
    try:
        told = {"uuids": [gpu.uuid for gpu in gpus(load_driver())]}
    except CudaError as error:
        told = {"error": str(error)}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
