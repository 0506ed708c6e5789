"""Jobs' own file systems: `beeond` is a stand-in (tests/simulated_beeond.sh), mounts and owners are real."""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from carme.errors import CarmeError
from carme.storage import beeond
from carme.storage.beeond import BeeOND
from patience import HANG

STAND_IN = Path(__file__).parents[2] / "simulated_beeond.sh"
UID = 54321

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="what a prolog does takes root")


@pytest.fixture
def instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BeeOND]:
    """That of the node n1."""
    for name in ("bin", "mounts", "state"):
        (tmp_path / name).mkdir()
    shutil.copy(STAND_IN, tmp_path / "bin/beeond")
    monkeypatch.setattr(beeond, "PLACES", f"{tmp_path}/bin:/usr/bin:/bin:/usr/sbin:/sbin")
    created = BeeOND(tmp_path / "mounts", tmp_path / "state", tmp_path / "marks", "n1")
    yield created
    for path in created.mounts.iterdir():
        subprocess.run(["umount", "--lazy", str(path)], check=False, capture_output=True)


def server(instance: BeeOND, job: str) -> int:
    return int((instance.state / f"{job}.data/storage.pid").read_text())


def is_there(process: int) -> bool:
    """Whether it runs; one that has ended may wait for its parent."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until_gone(process: int) -> None:
    """Wait until it has ended, which a killed process does soon, but not at once."""
    end = time.monotonic() + HANG
    while is_there(process):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_file_system_belongs_to_the_jobs_owner_and_leaves_nothing(instance: BeeOND) -> None:
    instance.start("7", UID, ["n1", "n2"])
    status = (instance.mounts / "7").stat()
    assert os.path.ismount(instance.mounts / "7")
    assert (status.st_uid, status.st_mode & 0o777) == (UID, 0o700)
    assert (instance.state / "7.nodes").read_text() == "n1\nn2\n"
    instance.start("8", UID, ["n1"])
    assert instance.jobs() == ["7", "8"]
    process = server(instance, "7")
    assert is_there(process)
    assert instance.stop("7")
    until_gone(process)
    assert is_there(server(instance, "8"))
    assert instance.jobs() == ["8"] and not instance.stop("7")
    left = {path.name for path in instance.state.iterdir()}
    assert left == {"8.data", "8.log", "8.nodes", "8.status"}
    assert instance.stop("8")
    assert not [*instance.state.iterdir(), *instance.mounts.iterdir(), *instance.marks.iterdir()]


def test_other_nodes_wait_until_it_is_complete(instance: BeeOND) -> None:
    second = BeeOND(instance.mounts, instance.state, instance.marks, "n2")
    with pytest.raises(CarmeError, match=r"not there after 0 s\. See what the prolog of n1 says"):
        second.start("7", UID, ["n1", "n2"], seconds=0.1)
    waiting = threading.Thread(target=second.start, args=("7", UID, ["n1", "n2"]))
    waiting.start()
    instance.start("7", UID, ["n1", "n2"])
    waiting.join(HANG)
    assert not waiting.is_alive()
    instance.stop("7")


def test_what_fails_is_reported_and_leaves_nothing(instance: BeeOND, tmp_path: Path) -> None:
    program = tmp_path / "bin/beeond"
    program.write_text(program.read_text().replace("${BEEOND_FAILS:-}", "yes"))
    with pytest.raises(CarmeError, match="beeond start failed: ERROR: Host is unreachable via ssh: n2"):
        instance.start("7", UID, ["n1", "n2"])
    assert instance.stop("7") and instance.jobs() == []
    program.unlink()
    with pytest.raises(CarmeError, match="beeond is not installed"):
        instance.start("7", UID, ["n1"])
    assert instance.stop("7")


def test_after_the_host_s_start_nobody_else_s_process_is_ended(instance: BeeOND) -> None:
    instance.start("7", UID, ["n1"])
    process = server(instance, "7")
    # As after a reset: /run is empty, nothing is mounted, and the process id belongs to another program.
    shutil.rmtree(instance.marks)
    subprocess.run(["umount", "--lazy", str(instance.mounts / "7")], check=True)
    try:
        assert instance.jobs() == ["7"] and instance.stop("7")
        time.sleep(0.1)
        assert is_there(process)
    finally:
        os.kill(process, 9)
    assert instance.jobs() == []
