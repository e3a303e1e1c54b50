"""`kvctl pin ...`"""

from argparse import Namespace

from kvd.errors import PinNotFoundError
from kvd.v1 import kvd_pb2 as pb
from kvd_client.cli import records
from kvd_client.cli.fleet import Stubs, fleet_of, new_request_id
from kvd_client.cli.lease_commands import Page, all_rows, show_rows
from kvd_client.cli.output import Output
from kvd_client.cli.screen import Table

PIN_TABLE = Table(
    ("pin_id", "device", "pool", "blocks", "ttl_seconds", "session_id", "tenant"), elastic=("pool",)
)


def list_pins(args: Namespace, output: Output) -> int:
    """0 if every device answered, else 1."""

    def ask(to: Stubs) -> Page:
        def ask_page(size: int, token: str) -> Page:
            request = pb.ListPinsRequest(pool=args.pool, page_size=size, page_token=token)
            page = to.admin.ListPins(request, timeout=to.timeout_s)
            return list(page.pins), page.next_page_token

        return all_rows(ask_page, None if args.all else args.limit)

    return show_rows(args, output, ("pins", PIN_TABLE, records.pin_record), ask)


def drop(args: Namespace, output: Output) -> int:
    """Raises PinNotFoundError."""
    what, fleet = f"pin {args.pin_id}", fleet_of(args)
    device, _ = fleet.ask_holder(what, lambda to: _found(to, args.pin_id), insist=True)
    request = pb.DropPinRequest(pin_id=args.pin_id, request_id=new_request_id())
    _, answer = fleet.only(device).ask_holder(
        what, lambda to: to.admin.DropPin(request, timeout=to.timeout_s), insist=True
    )
    record = {"device": device, "pin_id": args.pin_id, "blocks": answer.blocks}
    output.show(record, [f"{what} on {device} ended: {answer.blocks:,} blocks may be evicted again"])
    return 0


def _found(to: Stubs, pin_id: int) -> pb.PinInfo:
    """Raises PinNotFoundError where there is none."""
    request = pb.ListPinsRequest(page_size=1, page_token=str(max(0, pin_id - 1)))
    for pin in to.admin.ListPins(request, timeout=to.timeout_s).pins:
        if pin.pin_id == pin_id:
            found: pb.PinInfo = pin
            return found
    raise PinNotFoundError(f"no pin {pin_id}; kvctl pin list shows them")
