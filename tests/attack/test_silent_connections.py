"""Connections that say nothing: each holds a descriptor of the daemon."""

import socket

from tests.running_kvd import PATIENCE_S, RunningKvd


def test_a_connection_without_a_word_of_http_is_closed(kvd: RunningKvd) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.settimeout(PATIENCE_S / 2)  # gRPC itself takes a minute
        silent.connect(str(kvd.run_dir / "host0/grpc.sock"))
        while silent.recv(1 << 10):
            pass  # its own settings, then the end
