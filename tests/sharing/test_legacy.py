"""cuIpc handles on fake GPUs."""

import json
import subprocess

import pytest
from tests.fakecuda import FakeGpus, fake_gpus

from .test_driver import PRELUDE


@pytest.fixture(scope="module")
def machine():
    with fake_gpus(memory=64 << 20) as gpus:
        yield gpus


LEGACY_MAKER = """
owned = d.OwnedMemory(gpu, MIB)
print(owned.handle().hex(), flush=True)
sys.stdin.read()
"""
LEGACY_USER = """
import subprocess
def maker():
    started = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=-1, stdout=-1, text=True)
    return started, bytes.fromhex(started.stdout.readline())
first, handle = maker()
fd = os.memfd_create("handle")
os.write(fd, handle)
mapping = d.map_legacy(gpu, fd, MIB)
put(mapping, 7, b"hello")
print(got(d.map_legacy(gpu, fd, MIB), 7, 5))
first.kill(); first.wait()
try:
    d.map_legacy(gpu, fd, MIB)
except d.StaleHandleError as error:
    print(str(error).split(":")[0])
"""


def test_a_cuipc_handle_is_good_as_long_as_its_maker_lives(machine: FakeGpus) -> None:
    told = machine.run(PRELUDE + LEGACY_USER, PRELUDE + LEGACY_MAKER).splitlines()
    assert told[0] == "b'hello'"
    assert told[1] == "the handle of this GPU memory is not good here"


def test_a_process_cannot_open_its_own_cuipc_handle_and_is_told(machine: FakeGpus) -> None:
    told = machine.run(
        PRELUDE
        + """
owned = d.OwnedMemory(gpu, MIB)
try:
    fd = os.memfd_create("handle")
    os.write(fd, owned.handle())
    d.map_legacy(gpu, fd, MIB)
except d.StaleHandleError as error:
    print(error)
owned.free()
"""
    )
    assert "is this very process" in told


CONTAINER = ("unshare", "--map-root-user", "--pid", "--fork", "--kill-child")  # whoever runs is process 1
IN_CONTAINERS = """
import json, subprocess, sys
command = [*json.loads(sys.argv[1]), sys.executable, "-c"]
maker = subprocess.Popen([*command, sys.argv[2]], stdin=-1, stdout=-1, text=True)
handle = maker.stdout.readline().strip()
user = subprocess.run([*command, sys.argv[3], handle], stdout=-1, text=True)
maker.communicate()
print(user.stdout)
"""
USER_OF_ONE_PID = """
fd = os.memfd_create("handle")
os.write(fd, bytes.fromhex(sys.argv[1]))
try:
    d.map_legacy(gpu, fd, MIB)
except d.StaleHandleError as error:
    print(os.getpid(), error)
"""


def test_a_cuipc_handle_of_another_container_with_the_same_pid_is_refused_with_the_way_out(
    machine: FakeGpus,
) -> None:
    able = subprocess.run([*CONTAINER, "true"], capture_output=True, text=True)
    if able.returncode:
        assert "not permitted" in able.stderr
        return
    scripts = (PRELUDE + LEGACY_MAKER, PRELUDE + USER_OF_ONE_PID)
    told = machine.run(IN_CONTAINERS, json.dumps(CONTAINER), *scripts)
    assert told.startswith("1 the handle of this GPU memory is not good here")
    assert "the very same pid (docker: --pid=host" in told
