"""`kvctl pool ...`"""

import shutil
import sys
import time
from argparse import Namespace
from dataclasses import replace

from kvd.convert import spec_to_proto
from kvd.errors import InvalidArgumentError, KvdError, PoolNotFoundError
from kvd.limits import NULL_BLOCKS
from kvd.spec import KVSpec
from kvd.streams import say
from kvd.v1 import kvd_pb2 as pb
from kvd_client.cli import records, status_page
from kvd_client.cli.fleet import Answers, Fleet, fleet_of, new_request_id
from kvd_client.cli.models import DEFAULT_DTYPE, load_model
from kvd_client.cli.output import Document, Output, complain, note
from kvd_client.cli.plan_command import plan_spec
from kvd_client.cli.screen import Screen, Table
from kvd_client.cli.sizes import show_bytes

POOL_TABLE = Table(
    (
        "name",
        "device",
        "blocks_total",
        "block_bytes",
        "total_bytes",
        "dtype",
        "layers",
        "kv_heads",
        "head_dim_k",
        "head_dim_v",
        "block_size",
        "layout",
        "backend",
        "pool_id",
        "fingerprint",
    ),
    elastic=("name",),
)


def _statuses(fleet: Fleet) -> Answers[pb.GetStatusResponse]:
    return fleet.ask(lambda to: to.admin.GetStatus(pb.GetStatusRequest(), timeout=to.timeout_s))


def status(args: Namespace, output: Output) -> int:
    """0 if every device serves, else 1. Raises InvalidArgumentError on --watch with anything but a table."""
    if args.watch is not None:
        return _watch(args, output)
    document = _status_document(args)
    output.show(document, status_page.page(document["devices"], document["pools"], output.screen))
    for device in document["devices"]:
        if device["health"] == records.UNREACHABLE and output.format != "table":  # the page says it itself
            complain(f"{device['device']}: {device['health_detail']}")
    return 0 if all(device["health"] == "serving" for device in document["devices"]) else 1


def _status_document(args: Namespace) -> Document:
    """Raises DeviceUnavailableError without any kvd, PoolNotFoundError if no device has the named pool."""
    answers = _statuses(fleet_of(args))
    devices = [
        records.device_record(answer) | {"device": device} for device, answer in answers.by_device.items()
    ]
    devices += [records.unreachable_record(device, error) for device, error in answers.failures.items()]
    pools = _pool_records(answers, args.name)
    if args.name is not None:
        holders = {pool["device"] for pool in pools} | answers.failures.keys()
        devices = [device for device in devices if device["device"] in holders]
    return {"devices": sorted(devices, key=lambda device: str(device["device"])), "pools": pools}


def _pool_records(answers: Answers[pb.GetStatusResponse], name: str | None) -> list[records.Record]:
    pools = [
        records.pool_status_record(device, pool)
        for device, answer in answers.by_device.items()
        for pool in answer.pools
    ]
    named = [pool for pool in pools if name in (None, pool["name"])]
    if name is not None and not named:
        there = ", ".join(sorted({pool["name"] for pool in pools})) or "none"
        silent = "".join(f"; {device}: {error}" for device, error in answers.failures.items())
        raise PoolNotFoundError(f"no pool {name!r}; there is {there}{silent}")
    return named


def _watch(args: Namespace, output: Output) -> int:
    """Draws the page again and again until Ctrl-C. A daemon that is away is waited for."""
    if output.format != "table":
        raise InvalidArgumentError(f"--watch is for people; call it in a loop to have {output.format}")
    ending = f"every {args.watch:g} s; Ctrl-C ends"
    try:
        while True:
            screen = Screen.of(sys.stdout)
            try:
                document = _status_document(args)
                lines = status_page.page(document["devices"], document["pools"], screen)
            except KvdError as error:
                lines = [screen.paint(str(error), "red")]
            _redraw([*lines, "", screen.paint(ending, "dim")], screen)
            time.sleep(args.watch)
    except KeyboardInterrupt:
        return 0


def _redraw(lines: list[str], screen: Screen) -> None:
    """Over the last page, line by line, so that nothing flickers; cut to the terminal's height. Below it
    where the cursor cannot be sent back."""
    if not screen.steers:
        say("\n".join([*lines, ""]) + "\n")
        return
    rows = lines[: shutil.get_terminal_size().lines - 1]
    say("\x1b[H" + "".join(f"{row}\x1b[K\n" for row in rows) + "\x1b[J")


def list_pools(args: Namespace, output: Output) -> int:
    """0 if every device answered, else 1."""
    answers = _statuses(fleet_of(args))
    pools = [
        records.pool_record(device, pool.pool)
        for device, answer in answers.by_device.items()
        for pool in answer.pools
    ]
    return output.show_list("pools", pools, POOL_TABLE, answers.failures)


def create(args: Namespace, output: Output) -> int:
    """Raises DeviceFullError, PoolMismatchError, InvalidArgumentError on a geometry kvd refuses."""
    spec = _spec_of(args)
    request = pb.AdminCreatePoolRequest(
        name=args.name,
        spec=spec_to_proto(spec),
        blocks=_blocks_of(args.blocks, args.size, spec),
        request_id=new_request_id(),
    )
    fleet = fleet_of(args)
    if len(fleet.endpoints) > 1:
        names = " or ".join(one.device for one in fleet.endpoints)
        raise InvalidArgumentError(f"there is more than one device; choose one with --device {names}")
    device, answer = fleet.ask_holder(
        args.name, lambda to: to.admin.AdminCreatePool(request, timeout=to.timeout_s), insist=True
    )
    record = records.pool_record(device, answer.pool) | {"created": answer.created}
    leasable = record["blocks_total"] - NULL_BLOCKS
    done = "created" if answer.created else "was there already, with the same geometry"
    size = f"{leasable:,} blocks of {show_bytes(record['block_bytes'])}"
    if leasable != request.blocks:
        note(f"it has {leasable:,} blocks, not {request.blocks:,}; drop it and create it again to resize it")
    output.show(
        record, [f"pool {args.name} on {device} {done}: {size}, {show_bytes(record['total_bytes'])} in all"]
    )
    return 0


def _spec_of(args: Namespace) -> KVSpec:
    """The model's geometry, changed by what is given besides; without a model, all of it is needed."""
    given = {"layers": args.layers, "kv_heads": args.kv_heads}
    given |= {"head_dim_k": args.head_dim, "head_dim_v": args.head_dim_v or args.head_dim}
    given = {name: value for name, value in given.items() if value is not None}
    if args.model is not None:
        model = load_model(args.model)
        base = plan_spec(model, args.dtype or model.dtype, args.block_size)
        return replace(base, layout=args.layout, backend=args.backend, **given)
    if len(given) < 4:
        raise InvalidArgumentError(
            "a pool needs a geometry: --model config.json (or a built-in name), or --layers, --kv-heads "
            "and --head-dim"
        )
    dtype = args.dtype or DEFAULT_DTYPE
    return KVSpec(**given, dtype=dtype, block_size=args.block_size, layout=args.layout, backend=args.backend)


def _blocks_of(blocks: int | None, size_bytes: int | None, spec: KVSpec) -> int:
    """`blocks`, or as many as `size_bytes` hold beside the null block."""
    if blocks is not None:
        return blocks
    assert size_bytes is not None, "the parser asks for one of the two"
    fitting = size_bytes // spec.block_bytes - NULL_BLOCKS
    if fitting < 1:
        raise InvalidArgumentError(
            f"{show_bytes(size_bytes)} hold no block: one is {show_bytes(spec.block_bytes)}, and the null "
            f"block is needed too; give at least {show_bytes(2 * spec.block_bytes)}"
        )
    return fitting


def drop(args: Namespace, output: Output) -> int:
    """Raises PoolNotFoundError, PoolInUseError."""
    fleet = fleet_of(args)
    what = f"pool {args.name}"
    device, held = fleet.ask_holder(
        what,
        lambda to: to.pools.GetPool(pb.GetPoolRequest(name=args.name), timeout=to.timeout_s),
        insist=True,
    )
    request = pb.DropPoolRequest(name=args.name, request_id=new_request_id(), with_pins=args.with_pins)
    fleet.only(device).ask_holder(
        what, lambda to: to.admin.DropPool(request, timeout=to.timeout_s), insist=True
    )
    record = records.pool_record(device, held.pool)
    output.show(record, [f"{what} on {device} dropped: {show_bytes(record['total_bytes'])} given back"])
    return 0
