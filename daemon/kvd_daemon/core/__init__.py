"""The state machine: pools, sessions, leases, blocks. Pure; see `Device`."""

from .blocks import BlockCounts, BlockState
from .device import Device
from .free_runs import ids_of, runs_of
from .invariants import InvariantError
from .lease import Lease, LeaseState
from .limits import Limits
from .parked import Tier
from .pins import Pin
from .pool import Pool
from .quotas import UNLIMITED, Need, Quota
from .recovering import Losses, Recovered
from .resting import Gift, can_give, could_be_compressible
from .results import (
    Change,
    Compressed,
    CompressPlan,
    Extended,
    Fetched,
    FetchPlan,
    Forked,
    Granted,
    LeaseWish,
    Matched,
    ObservePlan,
    Offer,
    Progress,
    QueryShape,
    Reclaimed,
    Revoked,
    StowPlan,
    Unchanged,
)
from .session import Session, SessionIdentity, SessionState
from .version import CORE_VERSION

__all__ = [
    "CORE_VERSION",
    "UNLIMITED",
    "BlockCounts",
    "BlockState",
    "Change",
    "CompressPlan",
    "Compressed",
    "Device",
    "Extended",
    "FetchPlan",
    "Fetched",
    "Forked",
    "Gift",
    "Granted",
    "InvariantError",
    "Lease",
    "LeaseState",
    "LeaseWish",
    "Limits",
    "Losses",
    "Matched",
    "Need",
    "ObservePlan",
    "Offer",
    "Pin",
    "Pool",
    "Progress",
    "QueryShape",
    "Quota",
    "Reclaimed",
    "Recovered",
    "Revoked",
    "Session",
    "SessionIdentity",
    "SessionState",
    "StowPlan",
    "Tier",
    "Unchanged",
    "can_give",
    "could_be_compressible",
    "ids_of",
    "runs_of",
]
