"""Packets and descriptors between two processes that may die at any moment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.errors import DeviceUnavailableError
from kvd_daemon.channel import Channel, ChannelEndedError, Packet
from kvd_daemon.fd_store import FdStore, NoFdStore, names_file

SENDS_AND_DIES = """
import os, signal, sys
from kvd_daemon.channel import Channel
from kvd_daemon.fd_store import FdStore, names_file
store = FdStore(Channel.of(int(sys.argv[1])), names_file({}))
fd = os.memfd_create("bytes")
os.write(fd, b"outlived")
store.put("fence", fd)
os.kill(os.getpid(), signal.SIGKILL)
"""


def memfd(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


def content_of(fd: int) -> bytes:
    return os.pread(fd, 100, 0)


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_descriptor_put_by_a_process_that_dies_at_once_is_there_with_its_bytes() -> None:
    ours, theirs = Channel.pair()
    process = subprocess.Popen(
        [sys.executable, "-c", SENDS_AND_DIES, str(theirs.fileno())], pass_fds=[theirs.fileno()]
    )
    theirs.close()
    assert process.wait(60) == -9
    packet = ours.receive()
    assert packet is not None
    assert (packet.kind, packet.fields) == ("put", {"name": "fence"})
    assert content_of(packet.fds[0]) == b"outlived"
    assert not os.get_inheritable(packet.fds[0])
    with pytest.raises(ChannelEndedError):
        ours.receive()
    packet.close()
    ours.close()


def test_what_was_sent_before_the_end_is_read_although_the_dead_had_unread_words() -> None:
    ours, theirs = Channel.pair()
    assert ours.send(Packet("restart"))
    assert theirs.send(Packet("drop", {"name": "one"}))
    assert theirs.send(Packet("drop", {"name": "two"}))
    theirs.close()
    names = [packet.fields["name"] for packet in (ours.receive(), ours.receive()) if packet]
    assert names == ["one", "two"]
    with pytest.raises(ChannelEndedError):
        ours.receive()
    ours.close()


def put_until_refused(store: FdStore, fd: int) -> int:
    """How many were put before."""
    for count in range(100_000):
        try:
            store.put(f"session.{count}", fd)
        except DeviceUnavailableError:
            return count
    raise AssertionError("never refused")


def test_an_empty_channel_does_not_block() -> None:
    ours, theirs = Channel.pair()
    assert ours.receive() is None
    ours.close()
    theirs.close()


def test_nonsense_is_a_packet_of_no_kind() -> None:
    ours, theirs = Channel.pair()
    for nonsense in (b"\xff\x00", b"[]", b"{}", b"7", b'{"kind"'):
        os.write(theirs.fileno(), nonsense)
        packet = ours.receive()
        assert packet is not None
        assert packet.kind == ""
    ours.close()
    theirs.close()


def test_a_supervisor_that_does_not_read_is_a_typed_error_and_drops_are_said_later() -> None:
    ours, theirs = Channel.pair()
    store = FdStore(theirs, names_file({}))
    fd = memfd(b"")
    put = put_until_refused(store, fd)
    assert put > 100, "a supervisor that is busy for a moment costs nobody anything"
    store.drop("session.0")
    read = []
    while (packet := ours.receive()) is not None:
        read.append(packet)
    store.put("fence", fd)
    read += [packet for packet in (ours.receive(), ours.receive()) if packet]
    assert [packet.kind for packet in read] == ["put"] * put + ["drop", "put"]
    for packet in read:
        packet.close()
    os.close(fd)
    ours.close()
    theirs.close()


def test_the_next_daemon_takes_what_was_put_and_drops_what_it_does_not_know() -> None:
    before = open_fds()
    ours, theirs = Channel.pair()
    kept = {"pool.1.bytes": memfd(b"one"), "pool.2.bytes": memfd(b"two")}
    for fd in kept.values():
        os.set_inheritable(fd, True)
    store = FdStore(theirs, names_file(kept))
    taken = store.take_all()
    assert taken == kept
    assert not any(os.get_inheritable(fd) for fd in taken.values())
    store.keep({"pool.2.bytes"})
    packet = ours.receive()
    assert packet is not None
    assert (packet.kind, packet.fields) == ("drop", {"name": "pool.1.bytes"})
    assert content_of(taken["pool.2.bytes"]) == b"two"
    os.close(taken["pool.2.bytes"])
    ours.close()
    theirs.close()
    assert open_fds() == before


def test_without_a_supervisor_nothing_is_kept() -> None:
    store = NoFdStore()
    store.put("fence", 0)
    store.drop("fence")
    assert store.take_all() == {}
    store.keep(())
    assert not store.survives


def test_the_channel_loads_neither_grpc_nor_numpy(tmp_path: Path) -> None:
    code = "import sys, kvd_daemon.fd_store; print({'grpc', 'numpy', 'asyncio'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "set()\n"
