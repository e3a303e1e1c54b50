"""AdminService: see proto/kvd/v1/kvd.proto."""

# ruff: noqa: N802 - the methods are named by the proto

import time
from collections.abc import Callable, Mapping
from typing import Any

from kvd.convert import runs_to_proto, spec_from_proto
from kvd.errors import DeviceUnavailableError, InvalidArgumentError, LeaseNotFoundError, PoolNotFoundError
from kvd.v1 import kvd_pb2 as pb
from kvd.v1 import kvd_pb2_grpc
from kvd_daemon import VERSION
from kvd_daemon.core import Lease, Pin
from kvd_daemon.engine.stopping import Ending, Wanted

from .answering import Answering, Context, Reply, answered, repeatable
from .paging import check_token, page, page_size_of
from .views import (
    age,
    lease_info,
    pin_info,
    pool_status,
    pool_view,
    recovery_view,
    session_info,
    tenant_infos,
    timestamp,
)

MAX_CAUSE_CHARS = 1000  # characters; it is told to the worker and logged


class AdminService(Answering, kvd_pb2_grpc.AdminServiceServicer):
    """What operators see and do."""

    @answered
    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        engine, device = self.engine, self.engine.device
        return pb.GetStatusResponse(
            epoch=engine.epoch,
            device=engine.settings.name,
            device_kind=engine.pools.device_kind,
            memory_bytes=device.memory_bytes,
            memory_used_bytes=device.memory_used_bytes,
            health=engine.health.state.value,
            health_detail=engine.health.detail,
            sessions=len(device.sessions),
            pools=[pool_status(engine, device.pools[name]) for name in sorted(device.pools)],
            pid=engine.pid,
            start_time=timestamp(engine.started_ns),
            version=VERSION,
            kernel_pid=engine.kernel.pid,
            kernel_restarts=engine.kernel.restarts,
            lease_probe_age=age(engine.health.lease_age_s),
            kernel_probe_age=age(engine.kernel.age_s),
            recovery=recovery_view(engine.recovery),
            host_tier_bytes=engine.parking.host_tier.budget_bytes,
            host_tier_used_bytes=engine.parking.host_tier.used_bytes,
            disk_tier_bytes=engine.parking.disk_tier.budget_bytes,
            disk_tier_used_bytes=engine.parking.disk_tier.used_bytes,
        )

    @answered
    async def ListLeases(self, request: pb.ListLeasesRequest, context: Context) -> pb.ListLeasesResponse:
        leases = self.engine.device.leases
        keys, next_token = self._page_of_pool(leases, request)
        now_ns = time.monotonic_ns()
        infos = [lease_info(self.engine, leases[key], now_ns) for key in keys]
        return pb.ListLeasesResponse(epoch=self.engine.epoch, leases=infos, next_page_token=next_token)

    @answered
    async def GetLease(self, request: pb.GetLeaseRequest, context: Context) -> pb.GetLeaseResponse:
        lease = self.engine.device.leases.get(request.lease_id)
        if lease is None:
            raise LeaseNotFoundError(
                f"no lease {request.lease_id}; list the leases", lease_id=request.lease_id
            )
        info, table = lease_info(self.engine, lease, time.monotonic_ns()), runs_to_proto(lease.table)
        return pb.GetLeaseResponse(epoch=self.engine.epoch, lease=info, table=table)

    @answered
    async def RevokeLease(self, request: pb.RevokeLeaseRequest, context: Context) -> pb.RevokeLeaseResponse:
        if len(request.cause) > MAX_CAUSE_CHARS:
            raise InvalidArgumentError(f"cause of {len(request.cause)} characters; {MAX_CAUSE_CHARS} allowed")
        return self._once(request, lambda: self._revoke(request))

    def _revoke(self, request: pb.RevokeLeaseRequest) -> pb.RevokeLeaseResponse:
        revoked = self.engine.revocations.revoke(request.lease_id, request.cause)
        return pb.RevokeLeaseResponse(
            epoch=self.engine.epoch,
            quarantined_blocks=revoked.quarantined_count,
            deferred=revoked.deferred,
        )

    @answered
    async def ListSessions(
        self, request: pb.ListSessionsRequest, context: Context
    ) -> pb.ListSessionsResponse:
        sessions, now_ns = self.engine.device.sessions, time.monotonic_ns()
        keys, next_token = page(sessions, check_token(request.page_token), page_size_of(request.page_size))
        infos = [session_info(self.engine, sessions[key], now_ns) for key in keys]
        return pb.ListSessionsResponse(epoch=self.engine.epoch, sessions=infos, next_page_token=next_token)

    @answered
    async def ListPins(self, request: pb.ListPinsRequest, context: Context) -> pb.ListPinsResponse:
        pins, now_ns = self.engine.device.pins, time.monotonic_ns()
        keys, next_token = self._page_of_pool(pins, request)
        infos = [pin_info(pins[key], now_ns) for key in keys]
        return pb.ListPinsResponse(epoch=self.engine.epoch, pins=infos, next_page_token=next_token)

    def _page_of_pool(
        self,
        things: Mapping[int, Lease] | Mapping[int, Pin],
        request: pb.ListLeasesRequest | pb.ListPinsRequest,
    ) -> tuple[list[int], str]:
        """Keys of the things of the request's pool, and the token of the next page."""
        token, size = check_token(request.page_token), page_size_of(request.page_size)
        if token and not (token.isascii() and token.isdigit()):
            raise InvalidArgumentError("page_token is none of kvd's; start again with an empty one")
        if request.pool and request.pool not in self.engine.device.pools:
            raise PoolNotFoundError(f"no pool {request.pool!r}; GetStatus names them")
        wanted = (key for key, thing in things.items() if request.pool in ("", thing.pool))
        return page(wanted, int(token or 0), size)

    @answered
    async def DropPin(self, request: pb.DropPinRequest, context: Context) -> pb.DropPinResponse:
        return self._once(request, lambda: self._drop_pin(request))

    def _drop_pin(self, request: pb.DropPinRequest) -> pb.DropPinResponse:
        pin = self.engine.sharing.drop_pin(request.pin_id)
        return pb.DropPinResponse(epoch=self.engine.epoch, blocks=pin.blocks.size)

    @answered
    async def AdminCreatePool(
        self, request: pb.AdminCreatePoolRequest, context: Context
    ) -> pb.AdminCreatePoolResponse:
        return self._once(request, lambda: self._create_pool(request))

    def _create_pool(self, request: pb.AdminCreatePoolRequest) -> pb.AdminCreatePoolResponse:
        pool, created = self.engine.pools.create(request.name, spec_from_proto(request.spec), request.blocks)
        return pb.AdminCreatePoolResponse(epoch=self.engine.epoch, pool=pool_view(pool), created=created)

    @answered
    async def DropPool(self, request: pb.DropPoolRequest, context: Context) -> pb.DropPoolResponse:
        return self._once(request, lambda: self._drop_pool(request))

    def _drop_pool(self, request: pb.DropPoolRequest) -> pb.DropPoolResponse:
        self.engine.pools.drop(request.name, request.with_pins)
        self.engine.admission.wake()  # who waits for it waits in vain
        return pb.DropPoolResponse(epoch=self.engine.epoch)

    @answered
    async def ListTenants(self, request: pb.ListTenantsRequest, context: Context) -> pb.ListTenantsResponse:
        return pb.ListTenantsResponse(epoch=self.engine.epoch, tenants=tenant_infos(self.engine))

    @answered
    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        return repeatable(self.engine, self.engine.passing_requests, request, lambda: self._drain(request))

    def _drain(self, request: pb.DrainRequest) -> pb.DrainResponse:
        if request.resume:
            self.engine.resume()
        else:
            self.engine.drain()
        return pb.DrainResponse(epoch=self.engine.epoch, leases=self.engine.held_leases())

    @answered
    async def Restart(self, request: pb.RestartRequest, context: Context) -> pb.RestartResponse:
        if not self.engine.descriptors.survives:
            raise DeviceUnavailableError(
                "this daemon has no supervisor that would keep its memory; start it by the command kvd"
            )
        return self._once(request, self._restart)

    def _restart(self) -> pb.RestartResponse:
        self.engine.stopping.ask(Wanted(Ending.RESTART))
        return pb.RestartResponse(epoch=self.engine.epoch)

    def _once(self, request: Any, act: Callable[[], Reply]) -> Reply:
        """The reply to the first request of that request_id; the journal has it with what was done."""
        return repeatable(self.engine, self.engine.requests, request, act)
