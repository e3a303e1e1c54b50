"""The connection of a worker to one device's daemon."""

import os
import time
import warnings
import weakref
from types import TracebackType

from kvd.arguments import refused, whole
from kvd.convert import spec_from_proto, spec_to_proto
from kvd.errors import DeviceFullError, InvalidArgumentError, KvdWarning, PoolNotFoundError
from kvd.limits import MAX_BLOCKS_PER_POOL
from kvd.spec import KVSpec
from kvd.v1 import kvd_pb2 as pb
from kvd_client._attach import ask_memory
from kvd_client._checked import client_name, pool_name, seconds
from kvd_client._endpoint import find_endpoint
from kvd_client._events import Events, Offers
from kvd_client._mapping import map_pool
from kvd_client._pool import Pool
from kvd_client._session import Session, new_request_id

DEFAULT_TIMEOUT_S = 10.0  # a call takes a millisecond; a long compression or a restart a few seconds


class Client:
    """Made by `connect`. Thread-safe. Use it as a context manager, or call `close()`.

    A thread keeps the session alive and reconnects: a daemon that restarts finds session, leases and bytes
    again, and calls wait for it. Only if it does not know the session any more, leases raise LeaseLostError
    (or LeaseExpiredError), pools ClosedError, and `pool()` works in a new session.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        weakref.finalize(self, session.abandon)

    @property
    def events(self) -> Events:
        """What the daemon tells unasked: pressure, revoked leases, draining, a lost session."""
        return self._session.events

    @property
    def offers(self) -> Offers:
        """Leases that other sessions transferred to this one: `client.offers.get(timeout=5.0)`."""
        return self._session.offers

    @property
    def device(self) -> str:
        """The device's name, e.g. "host0"."""
        return self._session.endpoint.device

    @property
    def session_id(self) -> str:
        """As `kvctl session list` shows it. Waits for a reconnect; raises UnavailableError."""
        return self._session.connected().session_id

    @property
    def tenant(self) -> str:
        """Whom the daemon takes this process for. Waits and raises as `session_id`."""
        return self._session.connected().tenant

    @property
    def epoch(self) -> str:
        """Random id of the daemon's incarnation. Waits and raises as `session_id`."""
        return self._session.connected().epoch

    def pool(self, name: str, spec: KVSpec | None = None, blocks: int = 0, read_only: bool = False) -> Pool:
        """Create the pool, or attach to the one of that name; without `blocks` only attach.

        A pool that is there keeps its size, so that workers may come with a new number one by one:
        `Pool.blocks` tells it, and a KvdWarning where it is not `blocks`. To resize it, drop it first.

        read_only=True attaches for reading alone: this process cannot write the pool's bytes by mistake, and
        whatever would lease blocks or change a lease is a ReadOnlyError. `Pool.adopt` works: read
        what was published, then publish it again or release it. A GPU's memory by cuIpc handles cannot be
        mapped so (GpuHandleError).

        `spec` may be left out to attach to whatever is there. Asks the daemon. Raises PoolMismatchError (its
        text and its metadata `fields` name what differs), PoolNotFoundError, DeviceFullError,
        LimitExceededError, UnavailableError, DeadlineExceededError.
        """
        session = self._session
        name, blocks = pool_name(name), whole("blocks", blocks, 0, MAX_BLOCKS_PER_POOL - 1)
        if not isinstance(read_only, bool):
            raise refused("read_only", read_only, "True or False")
        if read_only and blocks:
            raise InvalidArgumentError(
                f"blocks={blocks} with read_only=True, which only attaches: create the pool elsewhere"
            )
        if spec is not None and not isinstance(spec, KVSpec):
            raise refused("spec", spec, "a kvd_client.KVSpec, such as KVSpec.from_hf(config),")
        session.check_usable()
        deadline = session.deadline()
        if spec is None:
            if blocks:
                raise InvalidArgumentError(
                    f"blocks={blocks} without a spec; pool(name, spec, blocks) creates"
                )
            found: pb.GetPoolResponse = session.ask(
                session.pool_service.GetPool, pb.GetPoolRequest(name=name), deadline
            )
            spec = spec_from_proto(found.pool.spec)
        request = pb.CreatePoolRequest(
            request_id=new_request_id(), name=name, spec=spec_to_proto(spec), blocks=blocks
        )
        answer = self._created(request, deadline)
        pool = self._attach(answer, spec, not read_only, deadline)
        if blocks and pool.blocks != blocks:
            warnings.warn(
                f"pool {name!r} is there with {pool.blocks} blocks, not {blocks}; it stays as it is until it "
                f"is dropped (kvctl pool drop {name})",
                KvdWarning,
                stacklevel=2,
            )
        return pool

    def _created(self, request: pb.CreatePoolRequest, deadline: float) -> pb.CreatePoolResponse:
        """Waits within the client's timeout for memory that is on its way back: that of killed processes."""
        session = self._session
        while True:
            try:
                answer: pb.CreatePoolResponse = session.call(
                    session.pool_service.CreatePool, request, session.check_usable, deadline
                )
                return answer
            except DeviceFullError as full:
                pause_s = (full.retry_after_ns or 0) / 1e9
                if not pause_s or time.monotonic() + pause_s > deadline:
                    raise
                time.sleep(pause_s)
                request.request_id = new_request_id()

    def _attach(self, answer: pb.CreatePoolResponse, spec: KVSpec, writable: bool, deadline: float) -> Pool:
        session = self._session
        identity = session.connected(deadline)
        path = session.endpoint.attach_path
        left_s = max(0.0, deadline - time.monotonic())
        descriptors = ask_memory(path, identity.token, answer.pool.name, left_s)
        try:
            if descriptors.pool_id != answer.pool.pool_id:
                raise PoolNotFoundError(
                    f"pool {answer.pool.name!r} was replaced meanwhile; call pool() again"
                )
            memory = map_pool(descriptors, spec, answer.pool.blocks_total, writable)
        finally:
            descriptors.close()
        pool = Pool(session, identity.session_id, answer.pool, memory, self)
        session.adopt_pool(pool, identity.session_id)
        return pool

    def close(self) -> None:
        """Release all leases and end the session. Asks the daemon. Harmless twice and in a forked child."""
        self._session.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(
    endpoint: str | os.PathLike[str] | None = None,
    *,
    device: str | None = None,
    name: str | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> Client:
    """Open a session with a device's daemon.

    endpoint  a run directory or a device's directory in it; default $KVD_ENDPOINT, else $KVD_RUN_DIR, else
              /run/kvd for root, $XDG_RUNTIME_DIR/kvd, or /tmp/kvd-UID
    device    default: the only or the first one there
    name      for `kvctl session list`; default: the process's id
    timeout   deadline of every call, in seconds

    Raises DeviceUnavailableError, DeadlineExceededError, InvalidArgumentError.
    """
    unnamed = isinstance(name, str | None) and not name
    shown_name = client_name(f"pid {os.getpid()}" if unnamed else name)
    timeout_s = seconds("timeout", timeout)
    session = Session(find_endpoint(endpoint, device), shown_name, timeout_s)
    session.start()
    return Client(session)
