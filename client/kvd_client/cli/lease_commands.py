"""`kvctl lease ...` and `kvctl session list`."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from kvd.errors import NotFoundError
from kvd.v1 import kvd_pb2 as pb
from kvd_client.cli import records
from kvd_client.cli.fleet import Stubs, fleet_of, new_request_id
from kvd_client.cli.output import Output, note
from kvd_client.cli.screen import Screen, Table, labelled, show_cell

PAGE_ROWS = 1000  # rows per call, the most a daemon answers
MAX_PAGES = 10_000  # pages of one `--all`: ten million rows
LABEL_WIDTH = 15  # columns of `lease show`'s field names

LEASE_TABLE = Table(
    (
        "lease_id",
        "device",
        "pool",
        "state",
        "length",
        "position",
        "blocks",
        "blocks_saved",
        "gave_blocks",
        "policy",
        "age_seconds",
        "session_id",
        "shelf_key",
        "shelf_ttl_seconds",
        "to_session",
        "floor_tokens",
        "sealed_blocks",
        "sink_blocks",
        "generation",
        "tenant",
        "scratch",
        "create_time",
    ),
    elastic=("pool", "policy"),
)
SESSION_TABLE = Table(
    (
        "session_id",
        "device",
        "client_name",
        "state",
        "pid",
        "leases",
        "blocks",
        "idle_seconds",
        "age_seconds",
        "uid",
        "tenant",
        "create_time",
    ),
    elastic=("client_name",),
)

Page = tuple[list[Any], str]
"""Rows of one reply, and the token of the next page ('' on the last)."""

Listing = tuple[str, Table, Callable[[str, Any], records.Record]]
"""What is listed, in which columns, and the record of a row."""


def all_rows(ask_page: Callable[[int, str], Page], limit: int | None) -> Page:
    """Up to `limit` rows (None: all), page by page, and the token where it stopped."""
    rows, token = list[Any](), ""
    for _ in range(MAX_PAGES):
        page, token = ask_page(min(PAGE_ROWS, limit - len(rows)) if limit else PAGE_ROWS, token)
        rows += page
        if not token or (limit and len(rows) >= limit):
            break
    return rows, token


def list_leases(args: Namespace, output: Output) -> int:
    """0 if every device answered, else 1."""

    def ask(to: Stubs) -> Page:
        def ask_page(size: int, token: str) -> Page:
            request = pb.ListLeasesRequest(pool=args.pool, page_size=size, page_token=token)
            page = to.admin.ListLeases(request, timeout=to.timeout_s)
            return list(page.leases), page.next_page_token

        return all_rows(ask_page, None if args.all else args.limit)

    return show_rows(args, output, LEASES, ask)


def list_sessions(args: Namespace, output: Output) -> int:
    """0 if every device answered, else 1."""

    def ask(to: Stubs) -> Page:
        def ask_page(size: int, token: str) -> Page:
            request = pb.ListSessionsRequest(page_size=size, page_token=token)
            page = to.admin.ListSessions(request, timeout=to.timeout_s)
            return list(page.sessions), page.next_page_token

        return all_rows(ask_page, None if args.all else args.limit)

    return show_rows(args, output, SESSIONS, ask)


def show_rows(args: Namespace, output: Output, listing: Listing, ask: Callable[[Stubs], Page]) -> int:
    """0 if every device answered, else 1."""
    answers = fleet_of(args).ask(ask)
    if answers.by_device:  # a pool that one device has need not be on every other
        answers = answers.without(NotFoundError)
    noun, table, record = listing
    rows = [record(device, row) for device, (page, _) in answers.by_device.items() for row in page]
    result = output.show_list(noun, rows, table, answers.failures)
    if any(token for _, token in answers.by_device.values()):
        note(f"there are more {noun}; show them with --all")
    return result


LEASES: Listing = ("leases", LEASE_TABLE, records.lease_record)
SESSIONS: Listing = ("sessions", SESSION_TABLE, records.session_record)


def show(args: Namespace, output: Output) -> int:
    """Raises LeaseNotFoundError."""
    device, answer = fleet_of(args).ask_holder(
        f"lease {args.lease_id}",
        lambda to: to.admin.GetLease(pb.GetLeaseRequest(lease_id=args.lease_id), timeout=to.timeout_s),
    )
    record = records.lease_record(device, answer.lease) | {"table": records.run_records(answer.table)}
    output.show(record, _lease_lines(record, output.screen))
    return 0


def _lease_lines(record: records.Record, screen: Screen) -> list[str]:
    lines = list[str]()
    for name, value in record.items():
        text = _runs(value) if name == "table" else show_cell(name, value)
        lines += labelled(name.ljust(LABEL_WIDTH), text, screen, screen.width)
    return lines


def _runs(runs: list[records.Record]) -> str:
    """'1-8 12 40-41': block ids in table order."""
    ends = ((run["start"], run["start"] + run["count"] - 1) for run in runs)
    return " ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ends) or "-"


def revoke(args: Namespace, output: Output) -> int:
    """Raises LeaseNotFoundError, LeaseBusyError, those of a lease that is gone."""
    what = f"lease {args.lease_id}"
    fleet = fleet_of(args)
    device, _ = fleet.ask_holder(
        what,
        lambda to: to.admin.GetLease(pb.GetLeaseRequest(lease_id=args.lease_id), timeout=to.timeout_s),
        insist=True,
    )
    request = pb.RevokeLeaseRequest(lease_id=args.lease_id, cause=args.cause, request_id=new_request_id())
    _, answer = fleet.only(device).ask_holder(
        what, lambda to: to.admin.RevokeLease(request, timeout=to.timeout_s), insist=True
    )
    blocks = answer.quarantined_blocks
    record = {
        "device": device,
        "lease_id": args.lease_id,
        "cause": args.cause,
        "quarantined_blocks": blocks,
        "deferred": answer.deferred,
    }
    if answer.deferred:
        output.show(record, [f"{what} on {device} has a job under way; it is taken away when that has ended"])
        return 0
    until = f"; {blocks:,} blocks stay in quarantine until its worker releases it or exits" if blocks else ""
    output.show(record, [f"{what} on {device} revoked{until}"])
    return 0
