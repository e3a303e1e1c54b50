"""Zero new GPU memory before anybody maps it: `python -m kvd_daemon.device.zero_memory FD UUID BYTES`.

A process that ends: this takes a CUDA context, which the daemon must not have. Exit status 0, or 1 with one
line on stderr, or FULL where the GPU has no room for the context.
"""

import sys

from kvd_cuda.driver import CudaError, GpuMemoryFullError, gpu_of, load_driver, map_shared

FULL = 3


def main() -> None:
    fd, uuid, byte_count = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    try:
        map_shared(gpu_of(load_driver(), uuid), fd, byte_count).zero(0, byte_count)
    except CudaError as error:
        print(error, file=sys.stderr)
        sys.exit(FULL if isinstance(error, GpuMemoryFullError) else 1)


if __name__ == "__main__":
    main()
