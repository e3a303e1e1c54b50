"""`kvctl daemon ...`"""

import time
from argparse import Namespace

from kvd.errors import DeadlineExceededError, DeviceUnavailableError
from kvd.v1 import kvd_pb2 as pb
from kvd_client.cli.fleet import Fleet, fleet_of, new_request_id
from kvd_client.cli.output import Document, Output
from kvd_client.cli.screen import Table

POLL_S = 0.05  # between two looks whether the next daemon serves
DRAIN_TABLE = Table(("device", "draining", "leases"))


def drain(args: Namespace, output: Output) -> int:
    """0 if every device answered, else 1."""
    request = pb.DrainRequest(resume=args.resume, request_id=new_request_id())
    answers = _fleet(args).ask(lambda to: to.admin.Drain(request, timeout=to.timeout_s), insist=True)
    rows = [
        {"device": device, "draining": not args.resume, "leases": answer.leases}
        for device, answer in answers.by_device.items()
    ]
    return output.show_list("daemons", rows, DRAIN_TABLE, answers.failures)


def restart(args: Namespace, output: Output) -> int:
    """0 when all are replaced. Raises KvdError at the first that is not; the others stay as they are."""
    fleet = _fleet(args)
    records = [_replace(fleet.only(endpoint.device), endpoint.device) for endpoint in fleet.endpoints]
    output.show({"daemons": records}, [_line(record) for record in records])
    return 0


def _fleet(args: Namespace) -> Fleet:
    return fleet_of(args, args.only)


def _replace(one: Fleet, device: str) -> Document:
    old, began_s = _status(one, device), time.monotonic()
    request = pb.RestartRequest(request_id=new_request_id())
    one.ask_holder(device, lambda to: to.admin.Restart(request, timeout=to.timeout_s), insist=True)
    new = _next_daemon(one, device, old.epoch)
    return {
        "device": device,
        "pid_before": old.pid,
        "pid": new.pid,
        "version_before": old.version,
        "version": new.version,
        "epoch": new.epoch,
        "leases": sum(pool.leases for pool in new.pools),
        "sessions": new.sessions,
        "seconds": round(time.monotonic() - began_s, 3),
    }


def _status(one: Fleet, device: str) -> pb.GetStatusResponse:
    _, status = one.ask_holder(
        device, lambda to: to.admin.GetStatus(pb.GetStatusRequest(), timeout=to.timeout_s)
    )
    return status


def _next_daemon(one: Fleet, device: str, old_epoch: str) -> pb.GetStatusResponse:
    """Raises DeadlineExceededError if none serves within the time of one call."""
    deadline_s = time.monotonic() + one.timeout_s
    while time.monotonic() < deadline_s:
        try:
            status = _status(one, device)
        except DeviceUnavailableError:  # between the two
            time.sleep(POLL_S)
            continue
        if status.epoch != old_epoch:
            return status
        time.sleep(POLL_S)
    raise DeadlineExceededError(f"{device}: no new daemon after {one.timeout_s:g} s; look at kvd's log")


def _line(record: Document) -> str:
    sessions, leases = record["sessions"], record["leases"]
    kept = f"{sessions} session{'s' * (sessions != 1)} and {leases} lease{'s' * (leases != 1)} kept"
    return (
        f"{record['device']}: kvd {record['version']}, pid {record['pid']}; {kept}; {record['seconds']:.1f} s"
    )
