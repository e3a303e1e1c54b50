import os
import subprocess
import sys
import zipfile

import pytest
from kvd_demo.fetch import REPOSITORY, MaterialUnavailableError, cache_folder, download, made_once


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVD_CACHE", str(tmp_path / "cache"))


RACER = """
import os, sys
from kvd_demo.fetch import cache_folder, made_once
def make(folder):
    (folder / "maker").write_text(str(os.getpid()))
    os.read(int(sys.argv[2]), 1)  # until the test has heard of all others
    (cache_folder() / "log").open("a").write("made\\n")
os.write(int(sys.argv[1]), b".")
print((made_once("thing", make) / "maker").read_text())
"""


def test_of_processes_that_race_one_makes_the_folder_and_all_get_it_whole():
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "examples")}
    (hear, arrive), (wait, go) = os.pipe(), os.pipe()
    command = [sys.executable, "-c", RACER, str(arrive), str(wait)]
    given = {"env": environment, "stdout": subprocess.PIPE, "pass_fds": (arrive, wait)}
    racers = [subprocess.Popen(command, **given) for _ in range(4)]
    os.close(arrive)
    assert b"".join(os.read(hear, 1) for _ in racers) == b"...."
    for fd in (go, wait, hear):
        os.close(fd)
    seen = [racer.communicate()[0] for racer in racers]
    assert all(racer.returncode == 0 for racer in racers)
    assert int(seen[0]) in [racer.pid for racer in racers]
    assert len(set(seen)) == 1
    assert (cache_folder() / "log").read_text() == "made\n"


def test_a_folder_that_could_not_be_made_leaves_nothing_behind_and_can_be_tried_again():
    def fails(folder):
        (folder / "half").touch()
        raise MaterialUnavailableError("no network")

    with pytest.raises(MaterialUnavailableError):
        made_once("thing", fails)
    assert [path.name for path in cache_folder().iterdir()] == ["thing.lock"]
    assert made_once("thing", lambda folder: (folder / "whole").touch()).joinpath("whole").exists()


def test_a_package_that_cannot_be_had_is_named_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(MaterialUnavailableError, match=r"cannot download absent==1\.0.*KVD_CACHE"):
        download("absent==1.0", tmp_path)


def test_a_package_is_downloaded_as_its_one_archive(tmp_path, monkeypatch):
    links, target = tmp_path / "links", tmp_path / "target"
    links.mkdir()
    target.mkdir()
    with zipfile.ZipFile(links / "thing-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
        wheel.writestr("thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("thing-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    archive = download("thing==1.0", target)
    assert archive == target / "thing-1.0-py3-none-any.whl"
    assert archive.read_bytes() == (links / archive.name).read_bytes()
