"""The command `kvd`: settings from the command line and kvd.toml, then the supervisor.

One line on stdout when everything serves; everything else on stderr. Exit status 0 after SIGTERM or SIGINT,
2 for an operator's mistake. SIGHUP: kvd.toml is read again. SIGUSR2: the code installed now takes over this
process first, then one daemon after another; sessions, leases and bytes stay.
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvd.errors import InvalidArgumentError
from kvd.run_dir import default_run_dir
from kvd.streams import StdoutError, complain, have_standard_streams, say
from kvd_daemon import VERSION
from kvd_daemon.access.certificates import Certificates
from kvd_daemon.access.tokens import Tokens
from kvd_daemon.device.available import available_bytes
from kvd_daemon.device.list_gpus import visible_gpus
from kvd_daemon.device.slot_files import disk_file
from kvd_daemon.gpu_list import resolved
from kvd_daemon.processes import allow_many_descriptors, lend_no_descriptor
from kvd_daemon.run_dir import private_folder
from kvd_daemon.settings import EVICTIONS, GPU_SHARINGS, LOG_LEVELS, Settings, read_toml, settings_from
from kvd_daemon.settings_page import page
from kvd_daemon.supervisor import OPERATOR_MISTAKE, Operator, Supervisor, handoff
from kvd_daemon.supervisor.claims import Claims
from kvd_daemon.supervisor.handoff import upgrade
from kvd_daemon.supervisor.kept import Kept, by_device, memory_bytes
from kvd_daemon.supervisor.systemd import Systemd, inherited_fds

MAX_SETTINGS_BYTES = 100_000  # as JSON; an argument of a process, and a packet to it, hold 128 KiB
OWN_OPTIONS = ("config", "check")  # of the command line alone


def main(arguments: Sequence[str] | None = None) -> None:
    have_standard_streams()
    options = build_parser().parse_args(arguments)
    lend_no_descriptor()
    handed_over = os.environ.pop(handoff.VARIABLE, "")
    try:
        if options.check:
            _check(options, handed_over)
            return
        supervisor = _taking_over(options, int(handed_over)) if handed_over else _starting(options)
        status = supervisor.run()
    except InvalidArgumentError as error:
        complain(f"kvd: {error}")
        sys.exit(OPERATOR_MISTAKE)
    except (StdoutError, BrokenPipeError) as error:  # who waits for the line that it is ready waits in vain
        complain(f"kvd: {error}")
        sys.exit(1)
    sys.exit(status)


def _check(options: argparse.Namespace, handed_over: str) -> None:
    """Raises InvalidArgumentError if a kvd started like this would be refused, or could not take over."""
    settings = _written(options)
    if handed_over:
        _check_files(handoff.check(int(handed_over)).reloaded(settings))
    elif not settings.gpus:
        _check_files(settings)
    say(page(settings))


def _starting(options: argparse.Namespace) -> Supervisor:
    """A new kvd, with what systemd kept of the last one. Raises InvalidArgumentError."""
    settings = _written(options)
    if settings.gpus:
        settings = replace(settings, gpus=resolved(settings.gpus, visible_gpus()))
    _check_files(settings)
    run_dir = Path(settings.run_dir or default_run_dir(os.environ, os.geteuid()))
    kept = by_device(inherited_fds(os.environ, os.getpid()))
    taken_bytes = memory_bytes(fd for fds in kept.values() for fd in fds.values())
    if not settings.gpus:
        _check_memory(settings, available_bytes() + taken_bytes)
    settings = replace(settings, run_dir=str(private_folder(run_dir.absolute())))
    claims = Claims.on(Path(settings.run_dir), settings.device_names)
    return _supervisor(options, settings, kept, claims)


def _taking_over(options: argparse.Namespace, handoff_fd: int) -> Supervisor:
    """This code in the place of an older one, whose daemons run."""
    left = handoff.taken(handoff_fd)
    try:
        settings = left.settings.reloaded(_reread(options, left.settings))
    except InvalidArgumentError:
        settings = left.settings  # the file was good a moment ago; what runs must not end over it
    claims = Claims(Path(settings.run_dir), left.claims)
    supervisor = _supervisor(options, settings, left.kept, claims)
    supervisor.take_over(left.daemons)
    return supervisor


def _supervisor(
    options: argparse.Namespace, settings: Settings, kept: Mapping[str, Mapping[str, int]], claims: Claims
) -> Supervisor:
    _log_to_stderr(settings)
    allow_many_descriptors()
    systemd = Systemd(os.environ, os.getpid())
    operator = Operator(
        lambda serving: _announce(settings, serving), lambda running: _reread(options, running), upgrade
    )
    return Supervisor(settings, operator, systemd, Kept(systemd, kept), claims)


def _log_to_stderr(settings: Settings) -> None:
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s supervisor %(name)s %(message)s",
        stream=sys.stderr,
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvd", description="Owns a shared, paged KV cache pool on each device of this machine."
    )
    parser.add_argument("--host-memory", metavar="SIZE", help='host memory per device, e.g. "2GiB"')
    parser.add_argument("--devices", type=int, metavar="N", help="host devices (default 1)")
    parser.add_argument(
        "--gpus",
        nargs="?",
        const="all",
        metavar="LIST",
        help='GPUs to serve, e.g. "0-7" or UUIDs (default all)',
    )
    parser.add_argument(
        "--memory", metavar="SHARE|SIZE", help='of each GPU, for pools: "0.85" (default) or "60GiB"'
    )
    parser.add_argument(
        "--gpu-sharing", choices=GPU_SHARINGS, help="how workers get a GPU's memory (default auto)"
    )
    parser.add_argument(
        "--host-tier",
        metavar="SIZE",
        help='host memory per device for what is suspended, e.g. "4GiB" (default: none)',
    )
    parser.add_argument("--spill-dir", metavar="DIR", help="a folder for what host memory is too small for")
    parser.add_argument("--spill-size", metavar="SIZE", help='bytes there per device, e.g. "64GiB"')
    parser.add_argument(
        "--run-dir", metavar="DIR", help="where the sockets are (default $KVD_RUN_DIR, /run/kvd)"
    )
    parser.add_argument("--config", metavar="FILE", help="a kvd.toml with the same words as these options")
    parser.add_argument("--session-ttl", metavar="TIME", help='silence after which a session expires ("30s")')
    parser.add_argument(
        "--kernel-threads", type=int, metavar="N", help="threads per kernel worker (default 1)"
    )
    parser.add_argument(
        "--eviction", choices=EVICTIONS, help="which cached blocks are evicted first (default 2q)"
    )
    parser.add_argument(
        "--drain-timeout", metavar="TIME", help='time that leases get to end after SIGTERM (default "0s")'
    )
    _add_access(parser.add_argument_group("who gets in").add_argument)
    parser.add_argument("--log-level", choices=LOG_LEVELS)
    parser.add_argument(
        "--check-config",
        action="store_true",
        dest="check",
        help="print the settings that would apply, and exit",
    )
    parser.add_argument("--version", action="version", version=f"kvd {VERSION}")
    return parser


def _add_access(add: Callable[..., object]) -> None:
    add(
        "--socket-group",
        metavar="GROUP",
        help="this group may open the sockets too; see [access] in the docs",
    )
    add("--listen", metavar="HOST:PORT", help="a TCP port for operators, with TLS; the next device: PORT + 1")
    add("--tls-cert", metavar="FILE", help="certificate chain of the port (PEM)")
    add("--tls-key", metavar="FILE", help="its key (PEM)")
    add("--tls-client-ca", metavar="FILE", help="authority whose clients may call (PEM)")
    add("--token-file", metavar="FILE", help="hashes of tokens that may call; see: kvctl token new")
    add("--audit-dir", metavar="DIR", help="where audit logs go (default: the run dir)")


def _check_files(settings: Settings) -> None:
    """Raises InvalidArgumentError if a daemon could not use a file or group that they name."""
    _check_group(settings.socket_gid)
    if settings.spill_dir:
        try:
            os.close(disk_file(settings.spill_dir))
        except OSError as error:
            raise InvalidArgumentError(
                f"--spill-dir {settings.spill_dir}: {error.strerror}; name a folder kvd may write to"
            ) from error
    listening = settings.listening
    if listening is not None:
        for device in settings.device_names:
            listening.address(device)
        Certificates(listening.tls)
        if listening.token_file is not None:
            Tokens(listening.token_file)


def _check_group(group: int | None) -> None:
    """Only root may give sockets to any group."""
    if group is not None and os.geteuid() != 0 and group not in (os.getegid(), *os.getgroups()):
        raise InvalidArgumentError(
            f"--socket-group: user {os.geteuid()} is not in group {group}; name one that it is in"
        )


def _written(options: argparse.Namespace) -> Settings:
    """As they stand on the command line and in kvd.toml. Raises InvalidArgumentError."""
    told = {
        key: value for key, value in vars(options).items() if value is not None and key not in OWN_OPTIONS
    }
    layers = [read_toml(Path(options.config))] if options.config else []
    chosen = settings_from(*layers, told)
    if "host_memory_bytes" not in chosen and not chosen.get("gpus"):
        raise InvalidArgumentError(
            'say what to serve, e.g. --gpus 0-7, or --host-memory 2GiB (or host_memory = "2GiB" in kvd.toml)'
        )
    settings = Settings(**chosen)  # type: ignore[arg-type]
    if (size := len(settings.to_json().encode())) > MAX_SETTINGS_BYTES:
        raise InvalidArgumentError(
            f"settings of {size} bytes, {MAX_SETTINGS_BYTES} allowed; have fewer rules"
        )
    return settings


def _reread(options: argparse.Namespace, running: Settings) -> Settings:
    """As they are written now. Raises InvalidArgumentError also where a later daemon would be refused."""
    written = _written(options)
    _check_files(running.reloaded(written))
    return written


def _check_memory(settings: Settings, there_bytes: int) -> None:
    """Refuse what the machine cannot back: later it would be killed in the middle of work."""
    option = "--host-memory with --host-tier" if settings.host_tier_bytes else "--host-memory"
    wanted_bytes = (settings.host_memory_bytes + settings.host_tier_bytes) * settings.devices
    if wanted_bytes > there_bytes:
        raise InvalidArgumentError(
            f"{option}: {_gib(wanted_bytes)} wanted, {_gib(there_bytes)} available here (machine and "
            f"cgroup); ask for {_gib(there_bytes // 10 * 9 // settings.devices)} or less"
        )


def _gib(byte_count: int) -> str:
    return f"{byte_count / 2**30:.1f} GiB" if byte_count >= 2**30 else f"{byte_count / 2**20:.0f} MiB"


def _announce(settings: Settings, serving: Collection[str]) -> None:
    size = f"{settings.memory} of its memory" if settings.gpus else _gib(settings.host_memory_bytes)
    names = settings.device_names
    devices = ", ".join(f"{name} {size if name in serving else 'does not serve'}" for name in names)
    say(f"kvd ready: {devices}; run dir {settings.run_dir}; pid {os.getpid()}\n")


if __name__ == "__main__":
    main()
