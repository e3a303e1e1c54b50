"""The TCP port's credentials: certificates and tokens that are read again when their files change."""

import logging
from collections.abc import Callable
from typing import Any

import grpc

from kvd.errors import InvalidArgumentError, UnauthenticatedError
from kvd_daemon.access.audit import AuditLog
from kvd_daemon.access.certificates import Certificates, Material
from kvd_daemon.access.listening import Listening
from kvd_daemon.access.roles import Principal
from kvd_daemon.access.tokens import Tokens

LOOK_S = 1.0  # seconds between two looks at the files
LOG = logging.getLogger("kvd.tls")


class TlsPort:
    """`address` is HOST:PORT."""

    def __init__(self, listening: Listening, device: str) -> None:
        """Raises InvalidArgumentError on files that cannot be used."""
        self.address = listening.address(device)
        self.wants_certificates = listening.tls.client_ca is not None
        self._certificates = Certificates(listening.tls)
        self._tokens = Tokens(listening.token_file) if listening.token_file else None

    def of_token(self, token: str) -> Principal:
        """Raises UnauthenticatedError."""
        if self._tokens is None:
            raise UnauthenticatedError("tokens are not taken here; a certificate is needed: kvctl --tls-cert")
        return self._tokens.of_token(token)

    def credentials(self) -> grpc.ServerCredentials:
        """Asks for the newest certificates at every handshake (in a thread of gRPC's)."""
        given = self._certificates.material

        def newest() -> Any:  # None: as before, which the stubs do not know
            nonlocal given
            if self._certificates.material is given:
                return None
            given = self._certificates.material
            return _configuration(given)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(given), newest, require_client_authentication=self.wants_certificates
        )

    def refresh(self, audit: AuditLog) -> None:
        """Take what changed; what cannot be used is told, and what was there before still counts."""
        _take(self._certificates.refresh, "certificates", audit)
        if self._tokens is not None:
            _take(self._tokens.refresh, "tokens", audit)


def _take(refresh: Callable[[], bool], what: str, audit: AuditLog) -> None:
    try:
        changed = refresh()
    except InvalidArgumentError as error:
        LOG.error("the %s stay as they were: %s", what, error)
        audit.noted("reload", what, {"outcome": "failed", "why": str(error)})
        return
    if changed:
        LOG.info("the %s were read again", what)
        audit.noted("reload", what, {"outcome": "done"})


def _configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    pairs = [(material.key, material.certificate)]
    return grpc.ssl_server_certificate_configuration(pairs, material.client_ca)
