"""`kvctl tenant list`."""

from argparse import Namespace

from kvd.v1 import kvd_pb2 as pb
from kvd_client.cli.fleet import fleet_of
from kvd_client.cli.output import Output
from kvd_client.cli.records import Record
from kvd_client.cli.screen import Table

MAXIMA = ("max_blocks", "max_parked_blocks")
TENANT_TABLE = Table(
    (
        "tenant",
        "device",
        "blocks",
        "max_blocks",
        "guaranteed_blocks",
        "leases",
        "sessions",
        "waiting_calls",
        "pin_blocks",
        "pinned_blocks",
        "max_parked_blocks",
        "parked_blocks",
    ),
    elastic=("tenant",),
)


def tenant_record(device: str, tenant: pb.TenantInfo) -> Record:
    """A maximum is None if there is no limit. Guaranteed blocks are those of each pool."""
    record = {name: getattr(tenant, name) for name in TENANT_TABLE.columns if name != "device"}
    return {"device": device, **record, **{name: record[name] or None for name in MAXIMA}}


def list_tenants(args: Namespace, output: Output) -> int:
    """0 if every device answered, else 1."""
    answers = fleet_of(args).ask(
        lambda to: to.admin.ListTenants(pb.ListTenantsRequest(), timeout=to.timeout_s)
    )
    tenants = [
        tenant_record(device, tenant)
        for device, answer in answers.by_device.items()
        for tenant in answer.tenants
    ]
    return output.show_list("tenants", tenants, TENANT_TABLE, answers.failures)
