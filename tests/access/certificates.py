"""Authorities and certificates for tests, as the files that kvd and kvctl are told."""

import datetime
import os
from dataclasses import dataclass
from pathlib import Path

import grpc
import trustme

Validity = tuple[datetime.datetime | None, datetime.datetime | None]
"""Since when and until when; None: long ago, and for long."""


@dataclass(frozen=True)
class KeyPair:
    """PEM files of a certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """Signs the server's and the clients' certificates; `pem` is its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder / name
        self._folder.mkdir()
        self._authority = trustme.CA(organization_name=name)
        self.pem = self._folder / "ca.pem"
        self._authority.cert_pem.write_to_path(self.pem)

    def issue(
        self, file_name: str, *names: str, common_name: str | None = None, valid: Validity = (None, None)
    ) -> KeyPair:
        """A certificate for DNS names and addresses. One of that file name is replaced, as by a renewal."""
        since, until = valid
        issued = self._authority.issue_cert(
            *names, common_name=common_name, not_before=since, not_after=until
        )
        pair = KeyPair(self._folder / f"{file_name}.pem", self._folder / f"{file_name}.key")
        chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        _replace(pair.key, issued.private_key_pem.bytes())
        _replace(pair.cert, chain)
        return pair


def _replace(path: Path, content: bytes) -> None:
    fresh = path.with_suffix(".fresh")
    fresh.touch(0o600)
    fresh.write_bytes(content)
    os.replace(fresh, path)


def channel_credentials(
    authority: Authority, shown: KeyPair | None = None, token: str = ""
) -> grpc.ChannelCredentials:
    """What a client trusts and shows."""
    key, cert = (shown.key.read_bytes(), shown.cert.read_bytes()) if shown else (None, None)
    tls = grpc.ssl_channel_credentials(authority.pem.read_bytes(), key, cert)
    if not token:
        return tls
    return grpc.composite_channel_credentials(tls, grpc.access_token_call_credentials(token))
