"""What a health probe asks: would a lease be granted? It is decided, and nothing is different afterwards.

No lease is made and taken back, not even one without blocks: it would use up a lease id and a fence, and a
journal that leaves it out would replay to another state than the one that was left.
"""

from kvd.errors import LimitExceededError

from . import quotas
from .granting import need_of_lease
from .registry import Registry
from .results import LeaseWish
from .session import Session, SessionIdentity


def rehearse(registry: Registry, now_ns: int) -> None:
    """Decide on a lease of no tokens in every pool, for the tenant that came last.

    A pool without free blocks and a device with as many leases as it may have serve as well as others.
    """
    for tenant in list(registry.tenants)[-1:]:
        session = Session(SessionIdentity("probe", tenant, 0, 0), 0, now_ns, now_ns)
        for pool in registry.pools.values():
            try:
                need = need_of_lease(registry, session, pool, [LeaseWish(0)])
            except LimitExceededError:
                continue
            quotas.require(registry, tenant, [(pool, need)])
