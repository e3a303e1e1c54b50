"""The command line: what may be said, and which function answers it."""

import sys
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NoReturn, TypeVar

from kvd.errors import InvalidArgumentError
from kvd.policy import Keep
from kvd.spec import DTYPE_ALIASES, DTYPE_BYTES, LAYOUTS
from kvd.streams import say
from kvd_client.cli import (
    daemon_commands,
    lease_commands,
    metrics_command,
    pin_commands,
    plan_command,
    pool_commands,
    tenant_commands,
    token_commands,
)
from kvd_client.cli.models import BUILT_IN, DEFAULT_DTYPE
from kvd_client.cli.output import FORMATS, complain
from kvd_client.cli.plan import POLICY_KINDS
from kvd_client.cli.sizes import parse_bytes, parse_memory, parse_tokens

DEFAULT_TIMEOUT_S = 10.0  # seconds per call; a healthy daemon needs milliseconds
MAX_TIMEOUT_S = 86_400.0  # seconds; a day, and who waits longer has forgotten it
DEFAULT_LIMIT = 100  # rows per device of a list without --all; two screens of most terminals
DEFAULT_WATCH_S = 2.0  # seconds; slow enough to read a figure before it changes
MIN_WATCH_S = 0.1  # seconds; quicker is a flicker, and a load for the daemon
REMOTE_OPTIONS = (
    (
        "--tls-ca",
        "FILE",
        "with --endpoint: who signs the daemon's certificate (default: the system's authorities)",
    ),
    ("--tls-cert", "FILE", "with --endpoint: the certificate to show (PEM)"),
    ("--tls-key", "FILE", "with --endpoint: its key (PEM)"),
    ("--token-file", "FILE", "with --endpoint: a file with a token of kvctl token new"),
)
EXAMPLES = """\
examples:
  kvctl pool status --watch                                what is going on
  kvctl pool create chat --model config.json --size 2GiB   memory before the workers
  kvctl lease list --pool chat -o json                     for programs
  kvctl plan --model llama-3-70b --context 128k --sessions 16 --memory 8x80GiB
"""

T = TypeVar("T")


class Parser(ArgumentParser):
    """Usage errors in our form: one line, then where to look."""

    def error(self, message: str) -> NoReturn:
        complain(f"{message}; see: {self.prog} --help")
        sys.exit(2)

    def _print_message(self, message: str, file: Any = None) -> None:
        """The help, or the version."""
        say(message)


def checked(parse: Callable[[str], T]) -> Callable[[str], T]:
    """`parse` as an argparse type: its InvalidArgumentError becomes a usage error."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except InvalidArgumentError as error:
            raise ArgumentTypeError(str(error)) from None

    return convert


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) < 1 << 32:
        raise InvalidArgumentError(f"{text!r}; a whole number from 1 on is needed")
    return int(text)


def _id(noun: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) >= 1 << 64:
            raise InvalidArgumentError(f"{text!r}; a {noun} id (see: kvctl {noun} list) is needed")
        return int(text)

    return parse


def _seconds(low: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            seconds = float(text.removesuffix("s"))
        except ValueError:
            seconds = 0.0
        if not low <= seconds <= MAX_TIMEOUT_S:
            raise InvalidArgumentError(f"{text!r}; seconds from {low:g} to {MAX_TIMEOUT_S:g} are needed")
        return seconds

    return parse


def _keep(text: str) -> Keep:
    """'0.15', '15%' or '2048' (tokens)."""
    try:
        amount = float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        amount = 0.0
    return Keep.of(int(amount) if amount > 1 and amount == int(amount) else amount)


def build_parser() -> Parser:
    """The whole command line. Every verb sets `run`, a function of (args, output) -> exit status."""
    parser = Parser(
        prog="kvctl",
        description="See and steer the kvd daemons of this machine.",
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvctl {version('kvd-pool')}")
    _add_output(parser, suppress=False)
    _add_daemons(parser, suppress=False)
    nouns = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_pool(nouns)
    _add_lease(nouns)
    session = _add_noun(nouns, "session", "workers' connections")
    verb = _add_verb(session, "list", lease_commands.list_sessions, "who is connected, and what they hold")
    _add_paging(verb)
    _add_pin(nouns)
    tenant = _add_noun(nouns, "tenant", "who may hold how many blocks")
    _add_verb(tenant, "list", tenant_commands.list_tenants, "quotas of tenants, and what they hold")
    _add_daemon(nouns)
    _add_token(nouns)
    _add_plan(nouns)
    metrics = _add_verb(nouns, "metrics", metrics_command.run, "what daemons say, as Prometheus text")
    metrics.add_argument(
        "--listen",
        metavar="HOST:PORT",
        type=checked(metrics_command.address),
        help="serve it at http://HOST:PORT/metrics, asked anew for each scrape, until Ctrl-C or SIGTERM",
    )
    status = _add_verb(nouns, "status", pool_commands.status, "the same as: kvctl pool status")
    _add_status_options(status)
    return parser


def _add_output(parser: ArgumentParser, suppress: bool) -> None:
    """Before the command or after it; after it there is no default that would undo the one before."""
    default = SUPPRESS if suppress else "table"
    parser.add_argument("-o", "--output", choices=FORMATS, default=default, help="default: table")


def _add_daemons(parser: ArgumentParser, suppress: bool) -> None:
    """Whom to ask; before or after the command, as `_add_output`."""
    add = parser.add_argument_group("which daemons").add_argument
    add(
        "--run-dir",
        metavar="DIR",
        default=SUPPRESS if suppress else None,
        help="where kvd keeps its sockets (default: $KVD_ENDPOINT, $KVD_RUN_DIR, or kvd's own default)",
    )
    for option, metavar, text in REMOTE_OPTIONS:
        add(option, metavar=metavar, default=SUPPRESS if suppress else None, help=text)
    add(
        "--endpoint",
        metavar="HOST:PORT",
        action="append",
        default=SUPPRESS if suppress else None,
        help="a daemon elsewhere (kvd --listen), by TLS; may be given more than once",
    )
    add(
        "--device",
        metavar="NAME",
        default=SUPPRESS if suppress else None,
        help="only this device, e.g. host0 (default: all)",
    )
    add(
        "--timeout",
        metavar="SECONDS",
        type=checked(_seconds(0.001)),
        default=SUPPRESS if suppress else DEFAULT_TIMEOUT_S,
        help=f"per call (default: {DEFAULT_TIMEOUT_S:g})",
    )


def _add_noun(nouns: Any, name: str, text: str) -> Any:
    noun = nouns.add_parser(name, help=text, description=text)
    return noun.add_subparsers(title="commands", metavar="COMMAND", required=True)


def _add_verb(verbs: Any, name: str, run: Callable[..., int], text: str) -> ArgumentParser:
    """A verb that asks daemons."""
    verb = _add_offline_verb(verbs, name, run, text)
    _add_daemons(verb, suppress=True)
    return verb


def _add_offline_verb(verbs: Any, name: str, run: Callable[..., int], text: str) -> ArgumentParser:
    verb: ArgumentParser = verbs.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    _add_output(verb, suppress=True)
    verb.set_defaults(run=run)
    return verb


def _add_status_options(verb: ArgumentParser) -> None:
    verb.add_argument("name", nargs="?", metavar="NAME", help="only the pool of this name")
    verb.add_argument(
        "-w",
        "--watch",
        nargs="?",
        metavar="SECONDS",
        type=checked(_seconds(MIN_WATCH_S)),
        const=DEFAULT_WATCH_S,
        help=f"draw it again every so often (default: {DEFAULT_WATCH_S:g} s) until Ctrl-C",
    )


def _add_paging(verb: ArgumentParser) -> None:
    amount = verb.add_mutually_exclusive_group()
    amount.add_argument("--all", action="store_true", help="all rows, however many")
    amount.add_argument(
        "--limit",
        metavar="N",
        type=checked(_count),
        default=DEFAULT_LIMIT,
        help=f"rows per device at most (default: {DEFAULT_LIMIT})",
    )


def _add_pool(nouns: Any) -> None:
    verbs = _add_noun(nouns, "pool", "regions of device memory, one KV geometry each")
    _add_status_options(
        _add_verb(verbs, "status", pool_commands.status, "devices and pools: health, blocks, savings")
    )
    _add_verb(verbs, "list", pool_commands.list_pools, "pools with their geometry")
    create = _add_verb(verbs, "create", pool_commands.create, "create a pool that belongs to no worker")
    create.add_argument("name", metavar="NAME", help="1 to 128 characters of A-Z a-z 0-9 . _ -")
    _add_geometry(create)
    drop = _add_verb(verbs, "drop", pool_commands.drop, "remove a pool without leases and pins")
    drop.add_argument("name", metavar="NAME")
    drop.add_argument("--with-pins", action="store_true", help="also if blocks are pinned there for good")


def _add_geometry(create: ArgumentParser) -> None:
    size = create.add_mutually_exclusive_group(required=True)
    size.add_argument("--blocks", type=checked(_count), metavar="N", help="blocks that can be leased")
    size.add_argument("--size", type=checked(parse_bytes), metavar="SIZE", help="memory, e.g. 2GiB")
    add = create.add_argument_group("geometry").add_argument
    add("--model", metavar="MODEL", help=f"config.json, its folder, or one of {', '.join(BUILT_IN)}")
    add("--layers", type=checked(_count), metavar="N")
    add("--kv-heads", type=checked(_count), metavar="N", help="on this device, under tensor parallelism")
    add("--head-dim", type=checked(_count), metavar="N", help="elements of a key, and of a value")
    add("--head-dim-v", type=checked(_count), metavar="N", help="elements of a value, if they differ")
    _add_storage(add)
    add("--layout", choices=LAYOUTS, default=LAYOUTS[0], help=f"default: {LAYOUTS[0]}")
    add("--backend", metavar="TAG", default="generic", help="who interprets the bytes (default: generic)")


def _add_storage(add: Callable[..., Any]) -> None:
    names = ", ".join([*DTYPE_BYTES, *DTYPE_ALIASES])
    add("--dtype", metavar="DTYPE", help=f"{names} (default: the model's, else {DEFAULT_DTYPE})")
    add("--block-size", type=checked(_count), metavar="TOKENS", default=16, help="default: 16")


def _add_lease(nouns: Any) -> None:
    verbs = _add_noun(nouns, "lease", "sequences' rights to blocks")
    listing = _add_verb(verbs, "list", lease_commands.list_leases, "leases: who holds how much")
    listing.add_argument("--pool", metavar="NAME", default="", help="only those of this pool")
    _add_paging(listing)
    showing = _add_verb(verbs, "show", lease_commands.show, "one lease with its block table")
    showing.add_argument("lease_id", metavar="ID", type=checked(_id("lease")))
    revoke = _add_verb(verbs, "revoke", lease_commands.revoke, "take a lease away from its worker")
    revoke.add_argument("lease_id", metavar="ID", type=checked(_id("lease")))
    revoke.add_argument(
        "--cause", metavar="TEXT", default="revoked by an operator", help="told to the worker"
    )


def _add_pin(nouns: Any) -> None:
    verbs = _add_noun(nouns, "pin", "matches and pins, which keep prefixes from eviction")
    listing = _add_verb(verbs, "list", pin_commands.list_pins, "matches and pins: who keeps how many blocks")
    listing.add_argument("--pool", metavar="NAME", default="", help="only those of this pool")
    _add_paging(listing)
    drop = _add_verb(verbs, "drop", pin_commands.drop, "end a match or pin; its blocks may be evicted again")
    drop.add_argument("pin_id", metavar="ID", type=checked(_id("pin")))


def _add_daemon(nouns: Any) -> None:
    verbs = _add_noun(nouns, "daemon", "the processes that serve devices")
    restart = _add_verb(
        verbs,
        "restart",
        daemon_commands.restart,
        "replace daemons by the installed version, one after another; sessions, leases and bytes stay",
    )
    drain = _add_verb(verbs, "drain", daemon_commands.drain, "have daemons take no new leases")
    drain.add_argument("--resume", action="store_true", help="take leases again")
    for verb in (restart, drain):
        verb.add_argument("only", nargs="?", metavar="DEVICE", help="only this one (default: all)")


def _add_token(nouns: Any) -> None:
    verbs = _add_noun(nouns, "token", "secrets that let operators call over TLS")
    new = _add_offline_verb(
        verbs, "new", token_commands.new, "make a token, and its line for kvd --token-file"
    )
    new.add_argument("name", metavar="NAME", help="whose it is; the audit log shows it")
    new.add_argument("--role", choices=token_commands.ROLES, default="read-only", help="default: read-only")


def _add_plan(nouns: Any) -> None:
    verb = _add_offline_verb(nouns, "plan", plan_command.run, "how much memory sessions need; asks no daemon")
    add = verb.add_argument
    models = f"config.json, its folder, or one of {', '.join(BUILT_IN)}"
    add("--model", required=True, metavar="MODEL", help=models)
    add("--context", required=True, type=checked(parse_tokens), metavar="TOKENS", help="e.g. 128k")
    add("--sessions", type=checked(_count), metavar="N", default=1, help="default: 1")
    _add_storage(add)
    add("--policy", choices=["all", *POLICY_KINDS], default="all", help="default: all")
    add(
        "--keep",
        type=checked(_keep),
        metavar="AMOUNT",
        help="0.15, 15%% or 2048 tokens; for snapkv, h2o, dual, span",
    )
    add("--window", type=checked(_count), metavar="TOKENS", help="tokens kept last (of h2o: recent)")
    add("--sinks", type=checked(_count), metavar="TOKENS", help="tokens kept first")
    add(
        "--memory",
        type=checked(parse_memory),
        metavar="SIZE",
        help="for KV alone: 141GiB, or 8x80GiB to split the KV heads over 8 devices",
    )
