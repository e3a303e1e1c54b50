"""The server's certificate and key, and the authority whose clients it trusts: files that may be renewed."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from kvd.errors import InvalidArgumentError

from .watched import read_bounded, refuse_if_others_may, stamp_of

OPEN_TO_OTHERS = 0o007  # a key that everybody may read is none; a group may (as secrets are mounted)
SETTLE_ATTEMPTS = 3  # reads of files that are being replaced; then they are left for the next look


@dataclass(frozen=True)
class TlsFiles:
    """PEM files. Without a client authority, clients need no certificate (but a token)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @property
    def paths(self) -> list[Path]:
        return [self.certificate, self.key, *([self.client_ca] if self.client_ca else [])]


@dataclass(frozen=True)
class Material:
    """What the files held, checked."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None

    def __repr__(self) -> str:
        return "Material(...)"  # a key must not get into a log


class Certificates:
    """The files as they were when they could last be used."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises InvalidArgumentError."""
        self._files = files
        self._stamp = stamp_of(files.paths)
        self.material = _read(files)

    def refresh(self) -> bool:
        """True if the files changed and count from now on.

        Raises InvalidArgumentError, once per change, if they cannot be used (a key that does not fit yet,
        say): what was read before still counts.
        """
        stamp = stamp_of(self._files.paths)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        self.material = _read(self._files)
        return True


def _read(files: TlsFiles) -> Material:
    refuse_if_others_may(files.key, OPEN_TO_OTHERS, "TLS key")
    for _ in range(SETTLE_ATTEMPTS):
        before = stamp_of(files.paths)
        material = Material(
            read_bounded(files.certificate, "TLS certificate"),
            read_bounded(files.key, "TLS key"),
            read_bounded(files.client_ca, "client authority") if files.client_ca else None,
        )
        _check(files, material)
        if stamp_of(files.paths) == before:
            return material
    raise InvalidArgumentError(f"TLS certificate {files.certificate} changes while it is read; try again")


def _check(files: TlsFiles, material: Material) -> None:
    """Raises InvalidArgumentError if key and certificate do not belong together, or either is none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(files.certificate, files.key, password=b"")
    except (ssl.SSLError, OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"TLS certificate {files.certificate} with key {files.key}: {_why(error)}; PEM files that belong "
            "together are needed, the key without a password"
        ) from error
    if material.client_ca is not None:
        try:
            context.load_verify_locations(cadata=material.client_ca.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise InvalidArgumentError(
                f"client authority {files.client_ca}: {_why(error)}; a PEM file of certificates is needed"
            ) from error


def _why(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)
