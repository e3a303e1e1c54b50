"""The command `kvd`: settings from the command line and kvd.toml, then the supervisor.

One line on stdout when everything serves; everything else on stderr. Exit status 0 after SIGTERM or SIGINT,
2 for an operator's mistake.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvd.errors import InvalidArgumentError
from kvd.run_dir import default_run_dir
from kvd_daemon import VERSION
from kvd_daemon.device.available import available_bytes
from kvd_daemon.run_dir import private_folder
from kvd_daemon.settings import LOG_LEVELS, Settings, read_toml, settings_from
from kvd_daemon.supervisor import OPERATOR_MISTAKE, Supervisor

NO_GPU_LAYER = "this build has no CUDA device layer yet; use --host-memory SIZE for pools in host memory"


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    try:
        settings = _settings(options)
    except InvalidArgumentError as error:
        print(f"kvd: {error}", file=sys.stderr)
        sys.exit(OPERATOR_MISTAKE)
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s supervisor %(name)s %(message)s",
        stream=sys.stderr,
    )
    sys.exit(Supervisor(settings, lambda: _announce(settings)).run())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvd", description="Owns a shared, paged KV cache pool on each device of this machine."
    )
    parser.add_argument("--host-memory", metavar="SIZE", help='host memory per device, e.g. "2GiB"')
    parser.add_argument("--devices", type=int, metavar="N", help="host devices (default 1)")
    parser.add_argument("--gpus", nargs="?", const="all", metavar="LIST", help="GPUs to serve")
    parser.add_argument(
        "--run-dir", metavar="DIR", help="where the sockets are (default $KVD_RUN_DIR, /run/kvd)"
    )
    parser.add_argument("--config", metavar="FILE", help="a kvd.toml with the same words as these options")
    parser.add_argument("--session-ttl", metavar="TIME", help='silence after which a session expires ("30s")')
    parser.add_argument(
        "--kernel-threads", type=int, metavar="N", help="threads per kernel worker (default 1)"
    )
    parser.add_argument("--log-level", choices=LOG_LEVELS)
    parser.add_argument("--version", action="version", version=f"kvd {VERSION}")
    return parser


def _settings(options: argparse.Namespace) -> Settings:
    """Raises InvalidArgumentError with the way out in its text."""
    if options.gpus is not None:
        raise InvalidArgumentError(f"--gpus {options.gpus}: {NO_GPU_LAYER}")
    told = {key: value for key, value in vars(options).items() if value is not None and key != "config"}
    layers = [read_toml(Path(options.config))] if options.config else []
    chosen = settings_from(*layers, told)
    if "host_memory_bytes" not in chosen:
        raise InvalidArgumentError(
            'say how much memory to serve, e.g. --host-memory 2GiB (or host_memory = "2GiB" in kvd.toml)'
        )
    settings = Settings(**chosen)  # type: ignore[arg-type]
    _check_memory(settings)
    run_dir = Path(settings.run_dir or default_run_dir(os.environ, os.geteuid()))
    return replace(settings, run_dir=str(private_folder(run_dir.absolute())))


def _check_memory(settings: Settings) -> None:
    """Refuse what the machine cannot back: later it would be killed in the middle of work."""
    wanted, there = settings.host_memory_bytes * settings.devices, available_bytes()
    if wanted > there:
        raise InvalidArgumentError(
            f"--host-memory: {_gib(wanted)} wanted, {_gib(there)} available here (machine and cgroup); "
            f"ask for {_gib(there // 10 * 9 // settings.devices)} or less"
        )


def _gib(byte_count: int) -> str:
    return f"{byte_count / 2**30:.1f} GiB" if byte_count >= 2**30 else f"{byte_count / 2**20:.0f} MiB"


def _announce(settings: Settings) -> None:
    size = _gib(settings.host_memory_bytes)
    devices = ", ".join(f"host{index} {size}" for index in range(settings.devices))
    print(f"kvd ready: {devices}; run dir {settings.run_dir}; pid {os.getpid()}", flush=True)


if __name__ == "__main__":
    main()
