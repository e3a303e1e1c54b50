"""All devices of a run directory, asked at once: one that fails does not hide the others."""

import os
import secrets
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import grpc

from kvd.errors import (
    DeadlineExceededError,
    DeviceUnavailableError,
    InvalidArgumentError,
    KvdError,
    NotFoundError,
)
from kvd.run_dir import ATTACH_SOCKET, DOWN_FILE, GRPC_SOCKET, LOCK_FILE, default_run_dir
from kvd.v1 import kvd_pb2_grpc as rpc
from kvd_client._endpoint import Endpoint
from kvd_client._errors import DETAILS_KEY, from_rpc_error
from kvd_client.cli.targets import START_HINT, LocalDevice, RemoteDevice, Target, TlsWords

AGAIN_S = 0.05  # seconds between two attempts of a call that nobody heard
REQUEST_ID_BYTES = 16  # 128 bits, as a UUID
MAX_DEVICES = 64  # asked at once, a thread each; far beyond one machine's
LEFT_BY_A_DAEMON = (GRPC_SOCKET, ATTACH_SOCKET, LOCK_FILE, DOWN_FILE)  # a clean stop leaves none of them

T = TypeVar("T")


@dataclass(frozen=True)
class Answers(Generic[T]):
    """By device name, in order."""

    by_device: dict[str, T] = field(default_factory=dict)
    failures: dict[str, KvdError] = field(default_factory=dict)

    def without(self, kind: type[KvdError]) -> "Answers[T]":
        """The same, failures of that kind forgotten."""
        left = {device: error for device, error in self.failures.items() if not isinstance(error, kind)}
        return Answers(self.by_device, left)


@dataclass(frozen=True)
class Stubs:
    """One device's services; `timeout_s` is the deadline of every call."""

    admin: "rpc.AdminServiceStub"
    pools: "rpc.PoolServiceStub"
    timeout_s: float


@dataclass(frozen=True)
class Fleet:
    """The devices a command speaks to."""

    endpoints: tuple[Target, ...]
    timeout_s: float

    def ask(self, call: Callable[[Stubs], T], insist: bool = False) -> Answers[T]:
        """`call` on every device, in threads. KvdErrors are collected, nothing else is.

        `insist`: where no daemon answers, the call is made again, as long as its time lasts. It must be one
        that can be repeated: one that reads, or has a `new_request_id`.
        """
        answers = Answers[T]()
        with ThreadPoolExecutor(max_workers=len(self.endpoints)) as threads:
            ask = self._insist if insist else self._ask_one
            asked = [(one.device, threads.submit(ask, one, call)) for one in self.endpoints]
        for device, future in asked:
            error = future.exception()
            if isinstance(error, KvdError):
                answers.failures[device] = error
            else:
                answers.by_device[device] = future.result()
        return answers

    def _ask_one(self, target: Target, call: Callable[[Stubs], T]) -> T:
        try:
            return _called(target, call, self.timeout_s)
        except grpc.RpcError as error:
            raise _explained(error, target, self.timeout_s) from None

    def _insist(self, target: Target, call: Callable[[Stubs], T]) -> T:
        deadline_s = time.monotonic() + self.timeout_s
        while True:
            try:
                return _called(target, call, max(AGAIN_S, deadline_s - time.monotonic()))
            except grpc.RpcError as error:
                if not _was_unheard(error) or time.monotonic() + AGAIN_S > deadline_s:
                    raise _explained(error, target, self.timeout_s) from None
            time.sleep(AGAIN_S)

    def only(self, device: str) -> "Fleet":
        return Fleet(tuple(one for one in self.endpoints if one.device == device), self.timeout_s)

    def ask_holder(self, what: str, call: Callable[[Stubs], T], insist: bool = False) -> tuple[str, T]:
        """The one device that has `what`, and its answer. `insist` is as of `ask`.

        Raises what it raised where no device has it, InvalidArgumentError where more than one has.
        """
        answers = self.ask(call, insist)
        if len(answers.by_device) > 1:
            raise InvalidArgumentError(
                f"{what} is on {' and '.join(answers.by_device)}; choose one with --device"
            )
        for device, answer in answers.by_device.items():
            return device, answer
        errors = list(answers.failures.values())
        raise next((error for error in errors if not isinstance(error, NotFoundError)), errors[0])


def new_request_id() -> str:
    """For one request, however often it is made."""
    return secrets.token_hex(REQUEST_ID_BYTES)


def _called(target: Target, call: Callable[[Stubs], T], timeout_s: float) -> T:
    with target.channel(timeout_s) as channel:
        return call(Stubs(rpc.AdminServiceStub(channel), rpc.PoolServiceStub(channel), timeout_s))


def _was_unheard(error: grpc.RpcError) -> bool:
    """Or nobody can tell: the daemon died with it, or is not there. Its own refusal is no such thing."""
    assert isinstance(error, grpc.Call)
    return error.code() is grpc.StatusCode.UNAVAILABLE and DETAILS_KEY not in dict(
        error.trailing_metadata() or ()
    )


def _explained(error: grpc.RpcError, target: Target, timeout_s: float) -> KvdError:
    """The daemon's own word, or where gRPC itself failed, an operator's way out."""
    assert isinstance(error, grpc.Call)
    if DETAILS_KEY in dict(error.trailing_metadata() or ()):
        return from_rpc_error(error)
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return DeviceUnavailableError(target.why_away(error.details() or ""))
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceededError(f"no answer within {timeout_s:g} s; look at its log, or raise --timeout")
    return from_rpc_error(error)


def fleet_of(args: Namespace, device: str | None = None) -> Fleet:
    """The daemons that the command line names: elsewhere with --endpoint, or of this machine.

    Raises DeviceUnavailableError if there is none, InvalidArgumentError.
    """
    words = TlsWords(args.tls_ca, args.tls_cert, args.tls_key, args.token_file)
    if not args.endpoint:
        words.refuse_without_endpoint()
        return find_fleet(args.run_dir, device or args.device, args.timeout)
    if args.run_dir is not None:
        raise InvalidArgumentError("--endpoint is for daemons elsewhere, --run-dir for those here; give one")
    credentials = words.credentials()
    named = device or args.device
    chosen = [address for address in args.endpoint if named in (None, address)]
    if not chosen:
        raise InvalidArgumentError(f"no device {named!r}; by --endpoint they are called HOST:PORT")
    return Fleet(tuple(RemoteDevice(address, credentials) for address in chosen), args.timeout)


def find_fleet(run_dir: str | None, device: str | None, timeout_s: float) -> Fleet:
    """The devices of `run_dir` (default: $KVD_ENDPOINT, else the default run dir), or the one named.

    Raises DeviceUnavailableError if there is none.
    """
    named = run_dir or os.environ.get("KVD_ENDPOINT") or default_run_dir(os.environ, os.geteuid())
    base = Path(named).absolute()
    found = [base] if _holds_device(base) else _device_folders(base)
    if not found:
        raise DeviceUnavailableError(f"no kvd at {base}; {START_HINT}, or name its --run-dir")
    chosen = [path for path in found if device in (None, path.name)]
    if not chosen:
        names = ", ".join(path.name for path in found)
        raise InvalidArgumentError(f"no device {device!r} at {base}; there is {names}")
    if len(chosen) > MAX_DEVICES:
        raise InvalidArgumentError(f"{len(chosen)} devices at {base}; choose one with --device")
    return Fleet(tuple(LocalDevice(Endpoint(path)) for path in chosen), timeout_s)


def _holds_device(folder: Path) -> bool:
    return any((folder / name).exists() for name in LEFT_BY_A_DAEMON)


def _device_folders(base: Path) -> list[Path]:
    try:
        return sorted(path for path in base.iterdir() if path.is_dir() and _holds_device(path))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DeviceUnavailableError(
            f"run dir {base}: {error.strerror}; run as the user who started kvd, or name another --run-dir"
        ) from None
