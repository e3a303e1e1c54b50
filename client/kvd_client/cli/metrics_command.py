"""`kvctl metrics`: what daemons say, for Prometheus; once, or as a small server beside kvd.

It is a process of its own on purpose: whoever scrapes it, and however often, is nothing the daemons notice
beyond two calls, and its end is nobody else's.
"""

import re
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from kvd.errors import DeviceUnavailableError, InvalidArgumentError
from kvd.streams import say
from kvd.v1 import kvd_pb2 as pb
from kvd_client.cli.fleet import Answers, fleet_of
from kvd_client.cli.output import Output, complain, note

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

Told = tuple[pb.GetStatusResponse, Sequence[pb.TenantInfo]]
"""One daemon's answers."""
MAX_PORT = 65_535  # a port has 16 bits
ADDRESS = re.compile(r"\[?([0-9A-Za-z.:%_-]+?)\]?:(\d{1,5})")
HINT = "kvctl metrics needs prometheus-client: pip install 'kvd-pool[metrics]'"


def address(text: str) -> tuple[str, int]:
    """HOST:PORT. Raises InvalidArgumentError."""
    found = ADDRESS.fullmatch(text)
    if found is None or int(found[2]) > MAX_PORT:
        raise InvalidArgumentError(f"{text!r}; HOST:PORT is needed, e.g. 127.0.0.1:9464")
    return found[1], int(found[2])


def run(args: Namespace, output: Output) -> int:
    """Once: 0 if every daemon answered, else 1; raises DeviceUnavailableError without any kvd. With --listen
    it serves until it is told to end, and daemons may come and go. Raises InvalidArgumentError."""
    if output.format != "table":
        raise InvalidArgumentError("metrics have one format, Prometheus text; leave -o away")
    try:
        import prometheus_client
    except ImportError:
        raise InvalidArgumentError(HINT) from None
    from kvd_client.cli.metrics import KvdCollector

    registry = prometheus_client.CollectorRegistry()
    if args.listen is not None:
        with suppress(DeviceUnavailableError):  # it may start later; what was said wrongly is wrong now
            fleet_of(args)
        registry.register(KvdCollector(lambda: _ask(args)))
        return _serve(args.listen, registry)
    answers = _ask(args)
    registry.register(KvdCollector(lambda: answers))
    say(prometheus_client.generate_latest(registry).decode())
    for device, error in answers.failures.items():
        complain(f"{device}: {error}")
    return 1 if answers.failures else 0


def _ask(args: Namespace) -> "Answers[Told]":
    """Devices are looked for each time: a kvd that was started later is seen."""
    return fleet_of(args).ask(
        lambda to: (
            to.admin.GetStatus(pb.GetStatusRequest(), timeout=to.timeout_s),
            to.admin.ListTenants(pb.ListTenantsRequest(), timeout=to.timeout_s).tenants,
        )
    )


def _serve(listen: tuple[str, int], registry: "CollectorRegistry") -> int:
    from prometheus_client import start_http_server

    host, port = listen
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:  # in use, not ours, no such host
        raise InvalidArgumentError(f"--listen {host}:{port}: {error.strerror}; choose another") from None
    note(f"metrics at http://{host}:{server.server_port}/metrics; Ctrl-C ends")
    try:
        thread.join()
    finally:
        server.server_close()
    return 0
