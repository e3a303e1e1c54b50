"""--listen: a TCP port for operators. It is opened only with TLS and a proof of who calls."""

import re
import string
from dataclasses import dataclass
from pathlib import Path

from kvd.errors import InvalidArgumentError

from .certificates import TlsFiles

MAX_PORT = 65_535  # a port has 16 bits
ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9.*_-]+):(\d{1,5})")


@dataclass(frozen=True)
class Listening:
    """Where device number 0 listens; the next one has the next port (0: any free ones)."""

    host: str
    port: int
    tls: TlsFiles
    token_file: Path | None

    def address(self, device: str) -> str:
        """HOST:PORT of the device ("host0", ...). Raises InvalidArgumentError beyond the last port."""
        index = int(device.lstrip(string.ascii_letters))
        port = self.port + index if self.port else 0
        if port > MAX_PORT:
            raise InvalidArgumentError(f"--listen: {device} would have port {port}; choose a lower one")
        return f"{self.host}:{port}"


@dataclass(frozen=True)
class ListenWords:
    """The settings of these names, "" where one is not set."""

    listen: str
    tls_cert: str
    tls_key: str
    tls_client_ca: str
    token_file: str

    def listening(self) -> Listening | None:
        """None without a port. Raises InvalidArgumentError for a port that anybody could use."""
        if not self.listen:
            self._refuse_leftovers()
            return None
        found = ADDRESS.fullmatch(self.listen)
        if found is None or int(found[2]) > MAX_PORT:
            raise InvalidArgumentError(f"listen is {self.listen!r}; HOST:PORT is needed, e.g. 127.0.0.1:7443")
        if not (self.tls_cert and self.tls_key):
            raise InvalidArgumentError(
                f"--listen {self.listen} without TLS is refused: anybody on the network could steer it; "
                "give --tls-cert and --tls-key, or leave --listen away (the Unix socket is always there)"
            )
        if not (self.tls_client_ca or self.token_file):
            raise InvalidArgumentError(
                f"--listen {self.listen} would let everybody in: give --tls-client-ca (clients with "
                "certificates), --token-file (clients with tokens), or both"
            )
        client_ca = Path(self.tls_client_ca) if self.tls_client_ca else None
        tls = TlsFiles(Path(self.tls_cert), Path(self.tls_key), client_ca)
        return Listening(found[1], int(found[2]), tls, Path(self.token_file) if self.token_file else None)

    def _refuse_leftovers(self) -> None:
        given = {
            "tls_cert": self.tls_cert,
            "tls_key": self.tls_key,
            "tls_client_ca": self.tls_client_ca,
            "token_file": self.token_file,
        }
        for name, value in given.items():
            if value:
                raise InvalidArgumentError(f"{name} is for --listen HOST:PORT, which is not given")
