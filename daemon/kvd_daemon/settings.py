"""What an operator may set, from the command line or from kvd.toml (the command line wins)."""

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kvd.errors import InvalidArgumentError
from kvd_daemon import tenant_quotas
from kvd_daemon.access.gate import Guarding
from kvd_daemon.access.listening import Listening, ListenWords
from kvd_daemon.access.pool_tenants import PoolTenants, pool_tenants_of
from kvd_daemon.access.rules import Rule, gid_of, rules_of, rules_table
from kvd_daemon.access.serving_limits import ServingLimits, serving_limits_of
from kvd_daemon.gpu_list import chosen_gpus, gpus_text, memory_text, names_these, share_of
from kvd_daemon.tenant_quotas import TenantQuotas, tenant_quotas_of
from kvd_daemon.unknown_keys import refuse_unknown

MIN_HOST_MEMORY_BYTES = 1 << 20  # less holds no block of any real model
MAX_HOST_MEMORY_BYTES = 1 << 46  # 64 TiB; more is a typing error
MAX_DEVICES = 16  # daemons of one kvd; each is two processes
MIN_SESSION_TTL_NS = 100_000_000  # workers renew three times per TTL; below 0.1 s that is all they do
MAX_SESSION_TTL_NS = 3600 * 1_000_000_000  # an hour; a longer one never frees a hung worker's blocks
MAX_DRAIN_TIMEOUT_NS = 86_400 * 1_000_000_000  # a day; who waits longer does not want it to stop
MAX_KERNEL_THREADS = 256  # threads of one kernel worker; no socket has more cores, so more is a typing error
GPU_SHARINGS = ("auto", "descriptors", "legacy")  # how workers get a GPU's memory
EVICTIONS = (
    "2q",
    "lru",
)  # orders in which cached blocks go (core.eviction); the first is the default
LOG_LEVELS = ("debug", "info", "warning", "error")

_BYTE_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _BYTE_UNITS |= {f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power, _letter: 1024**_power}
_TIME_UNITS = {"ms": 10**6, "s": 10**9, "": 10**9, "m": 60 * 10**9, "min": 60 * 10**9, "h": 3600 * 10**9}


def parse_bytes(text: str | int) -> int:
    """ "2GiB", "512 MB", "1.5g" or a plain number of bytes. Raises InvalidArgumentError."""
    return _quantity(str(text), _BYTE_UNITS, 'a size such as "2GiB"')


def parse_duration_ns(text: str | int | float) -> int:
    """ "30s", "500ms", "2m" or a plain number of seconds. Raises InvalidArgumentError."""
    return _quantity(str(text), _TIME_UNITS, 'a duration such as "30s"')


def _quantity(text: str, units: Mapping[str, int], wanted: str) -> int:
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in units:
        raise InvalidArgumentError(f"{text!r}; {wanted} is needed")
    return (
        int(float(match[1]) * units[match[2].lower()])
        if "." in match[1]
        else int(match[1]) * units[match[2].lower()]
    )


@dataclass(frozen=True)
class Settings:
    """Raises InvalidArgumentError on values outside the limits of this module."""

    host_memory_bytes: int = 0
    devices: int = 1
    gpus: str = ""
    memory: str = "0.85"
    gpu_sharing: str = "auto"
    host_tier_bytes: int = 0
    spill_dir: str = ""
    spill_size_bytes: int = 0
    run_dir: str = ""
    session_ttl_ns: int = 30_000_000_000
    drain_timeout_ns: int = 0
    kernel_threads: int = 1
    eviction: str = EVICTIONS[0]
    log_level: str = "info"
    socket_group: str = ""
    listen: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    token_file: str = ""
    audit_dir: str = ""
    access: tuple[Rule, ...] = ()
    limits: ServingLimits = field(default_factory=ServingLimits)
    pools: PoolTenants = field(default_factory=PoolTenants)
    tenants: TenantQuotas = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, low, high in (
            ("host_memory_bytes", 0 if self.gpus else MIN_HOST_MEMORY_BYTES, MAX_HOST_MEMORY_BYTES),
            ("devices", 1, MAX_DEVICES),
            ("host_tier_bytes", 0, MAX_HOST_MEMORY_BYTES),
            ("spill_size_bytes", 0, MAX_HOST_MEMORY_BYTES),
            ("session_ttl_ns", MIN_SESSION_TTL_NS, MAX_SESSION_TTL_NS),
            ("drain_timeout_ns", 0, MAX_DRAIN_TIMEOUT_NS),
            ("kernel_threads", 1, MAX_KERNEL_THREADS),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise InvalidArgumentError(f"{name} is {value!r}; an integer from {low} to {high} is needed")
        for name in TEXTS:
            if not isinstance(getattr(self, name), str):
                raise InvalidArgumentError(f"{name} is {getattr(self, name)!r}; a text in quotes is needed")
        if bool(self.spill_dir) != bool(self.spill_size_bytes) or (
            self.spill_dir and not self.host_tier_bytes
        ):
            raise InvalidArgumentError(
                "the disk tier is behind the host tier: --spill-dir, --spill-size and --host-tier go together"
            )
        _ = self.listening, self.socket_gid  # each raises if it makes no sense
        for name, choices in (
            ("log_level", LOG_LEVELS),
            ("gpu_sharing", GPU_SHARINGS),
            ("eviction", EVICTIONS),
        ):
            if getattr(self, name) not in choices:
                raise InvalidArgumentError(
                    f"{name} {getattr(self, name)!r}; one of {', '.join(choices)} is needed"
                )
        if share_of(self.memory) is None and parse_bytes(self.memory) == 0:
            raise InvalidArgumentError(f"memory is {self.memory!r}; a share such as 0.85 or a size is needed")
        if self.gpus and self.host_memory_bytes:
            raise InvalidArgumentError(
                "one kvd serves GPUs or host memory: give --gpus or --host-memory, and start another kvd "
                "with a --run-dir of its own for the other"
            )

    @property
    def device_names(self) -> tuple[str, ...]:
        """One daemon each. GPUs must be resolved."""
        if self.gpus:
            return tuple(gpu.device for gpu in chosen_gpus(self.gpus))
        return tuple(f"host{index}" for index in range(self.devices))

    def gpu_uuid(self, device: str) -> str | None:
        """Of the device; None for the host."""
        uuids = {gpu.device: gpu.uuid for gpu in chosen_gpus(self.gpus)}
        return uuids.get(device)

    @property
    def socket_gid(self) -> int | None:
        """The group that may open the sockets. Raises InvalidArgumentError if there is none of that name."""
        name = self.socket_group
        return gid_of(int(name) if name.isdecimal() else name, "socket_group") if name else None

    @property
    def listening(self) -> Listening | None:
        """Raises InvalidArgumentError for a port that anybody could use."""
        words = (self.listen, self.tls_cert, self.tls_key, self.tls_client_ca, self.token_file)
        return ListenWords(*words).listening()

    def guarding(self, device: str) -> Guarding:
        """Who gets in at that device, and where its audit log is."""
        name = f"{device}.audit.jsonl" if self.audit_dir else "audit.jsonl"
        folder = Path(self.audit_dir) if self.audit_dir else Path(self.run_dir) / device
        return Guarding(self.access, self.pools, self.limits, bool(self.socket_group), folder / name)

    def to_json(self) -> str:
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps(plain | {name: show(plain[name]) for name, (_, show) in TABLES.items()})

    def reloaded(self, written: "Settings") -> "Settings":
        """What is written now, but for what cannot change while kvd runs."""
        return replace(written, **{name: getattr(self, name) for name in FIXED})

    def differing(self, written: "Settings", names: Sequence[str]) -> list[str]:
        """Which of these fields are written otherwise than they run, in the words of kvd.toml."""
        differs = [name for name in names if not self._is_as(written, name)]
        return [WORDS.get(name, name) for name in differs]

    def _is_as(self, written: "Settings", name: str) -> bool:
        """What runs has its GPUs resolved, and its run dir chosen."""
        if name == "gpus":
            return names_these(written.gpus, self.gpus)
        if name == "run_dir":
            return not written.run_dir or str(Path(written.run_dir).absolute()) == self.run_dir
        return bool(getattr(self, name) == getattr(written, name))

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        """Of another process of kvd, perhaps of another version: unknown words are passed over."""
        told = json.loads(text)
        known = {field.name for field in fields(cls)}
        plain: dict[str, Any] = {name: value for name, value in told.items() if name in known}
        return cls(
            **plain | {name: parse(plain[name]) for name, (parse, _) in TABLES.items() if name in plain}
        )


FIXED = (
    "host_memory_bytes",
    "devices",
    "gpus",
    "memory",
    "gpu_sharing",
    "host_tier_bytes",
    "spill_dir",
    "spill_size_bytes",
    "run_dir",
)
"""What only a new kvd takes from kvd.toml; a reload passes it over."""

LATER = (
    "session_ttl_ns",
    "kernel_threads",
    "socket_group",
    "listen",
    "tls_cert",
    "tls_key",
    "tls_client_ca",
    "token_file",
    "audit_dir",
)
"""What a reload changes for daemons that are started later. All else counts at once."""

TEXTS = (
    "spill_dir",
    "gpus",
    "memory",
    "gpu_sharing",
    "eviction",
    "run_dir",
    "socket_group",
    "listen",
    "tls_cert",
    "tls_key",
    "tls_client_ca",
    "token_file",
    "audit_dir",
)
TABLES: Mapping[str, tuple[Callable[[object], Any], Callable[[Any], object]]] = {
    "access": (rules_of, rules_table),
    "limits": (serving_limits_of, ServingLimits.to_table),
    "pools": (pool_tenants_of, PoolTenants.to_table),
    "tenants": (tenant_quotas_of, tenant_quotas.to_table),
}
"""Tables of kvd.toml: what reads them, and what shows them as they stood there."""

_PARSERS = {
    "host_memory": ("host_memory_bytes", parse_bytes),
    "gpus": ("gpus", gpus_text),
    "memory": ("memory", memory_text),
    "host_tier": ("host_tier_bytes", parse_bytes),
    "spill_size": ("spill_size_bytes", parse_bytes),
    "session_ttl": ("session_ttl_ns", parse_duration_ns),
    "drain_timeout": ("drain_timeout_ns", parse_duration_ns),
    **{name: (name, parse) for name, (parse, _) in TABLES.items()},
}
WORDS = {field: key for key, (field, _) in _PARSERS.items()}
"""Those of kvd.toml for fields that are called otherwise here."""

KEYS = tuple(WORDS.get(field.name, field.name) for field in fields(Settings))
"""What kvd.toml may hold; the command line's options are the same words."""


def settings_from(*layers: Mapping[str, object]) -> dict[str, object]:
    """Fields of Settings from layers of `KEYS`, later ones win. Raises InvalidArgumentError."""
    chosen: dict[str, object] = {}
    for layer in layers:
        refuse_unknown(layer, KEYS, "setting")
        for key, value in layer.items():
            field, parse = _PARSERS.get(key, (key, None))
            chosen[field] = parse(value) if parse is not None else value  # type: ignore[arg-type]
    return chosen


def read_toml(path: Path) -> dict[str, object]:
    """The keys of a kvd.toml. Raises InvalidArgumentError if it is none."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidArgumentError(f"{path}: {error.strerror}; name a readable file with --config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{path} is no TOML: {error}") from error
