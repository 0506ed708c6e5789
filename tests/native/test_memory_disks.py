"""Spill folders on disks that are slow, full, fail or go away; the disks are real file systems in files."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import carme_runtime
from carme_runtime.out_of_core import spill
from patience import HANG

PROGRAM = Path(__file__).parent / "programs" / "out_of_core.py"
MIB = 1 << 20
LIMIT, MODEL = "310M", ("sgd", "512", "40")
SAVED = "370M"  # saving takes memory too
LARGER = ("sgd", "512", "80")  # 250 MB with gradients and momentum
SECONDS = 3 * HANG
_SHUT_DOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN of the kernel's fs/ext4/ext4.h
_AT_ONCE = 2  # without writing anything more
_THROTTLES = Path("/sys/fs/cgroup/blkio")


def needed(*command: str | Path) -> str:
    """The output of a command that needs root; without it the test is skipped."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip(f"there is no {command[0]}")
    if os.geteuid() or done.returncode:
        pytest.skip(f"{command[0]} does not work here: {done.stderr.strip() or 'it needs root'}")
    return done.stdout


class Disk:
    """A file system of its own, in a sparse file."""

    def __init__(self, image: Path, size: int, folder: Path) -> None:
        self.folder, self._image = folder, image
        folder.mkdir()
        with image.open("wb") as file:
            file.truncate(size)
        needed("mkfs.ext4", "-q", image)
        needed("mount", "-o", "loop", image, folder)

    def fail(self) -> None:
        """Let all transfers fail from now on, as the kernel does where a disk is lost."""
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(handle, _SHUT_DOWN, struct.pack("I", _AT_ONCE))
        finally:
            os.close(handle)

    def detach(self) -> None:
        """Take it out of the tree of folders, although files on it are open."""
        subprocess.run(["umount", "--lazy", self.folder], check=True)

    @property
    def device(self) -> str:
        """The block device's numbers."""
        name = needed("losetup", "-j", self._image, "-O", "NAME", "-n").strip()
        return Path(f"/sys/block/{Path(name).name}/dev").read_text().strip()


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    mounted: list[Disk] = []

    def make(size: int = 1 << 30, images: Path = tmp_path) -> Disk:
        mounted.append(Disk(images / "image", size, tmp_path / f"disk{len(mounted)}"))
        return mounted[-1]

    yield make
    for disk in mounted:
        if os.path.ismount(disk.folder):
            subprocess.run(["umount", disk.folder], check=True)


@pytest.fixture
def throttled() -> Iterator[Callable[[str, int], Callable[[], None]]]:
    """Puts a process's transfers with a block device below a rate."""
    folder = _THROTTLES / f"carme-test-{os.getpid()}"
    with contextlib.ExitStack() as stack:

        def enter() -> None:
            (folder / "cgroup.procs").write_text(str(os.getpid()))

        def limit(device: str, rate: int) -> Callable[[], None]:
            try:
                folder.mkdir()
                stack.callback(folder.rmdir)
                for operation in ("read", "write"):
                    (folder / f"blkio.throttle.{operation}_bps_device").write_text(f"{device} {rate}")
            except OSError as error:
                pytest.skip(f"the kernel does not throttle disks here: {error}")
            return enter

        yield limit


def start(
    *arguments: str | Path, before: Callable[[], None] | None = None, keeps: Path | None = None
) -> subprocess.Popen[str]:
    option = [f"--checkpoint={keeps}"] if keeps else []
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *option, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
    )


def first_line(process: subprocess.Popen[str]) -> str:
    """What it prints after its first step: its tensors move by then."""
    assert process.stdout
    line = process.stdout.readline()
    assert line, process.communicate(timeout=SECONDS)[1]
    return line


def finish(process: subprocess.Popen[str], begun: str = "") -> list[dict[str, Any]]:
    output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    return [json.loads(line) for line in (begun + output).splitlines()]


def losses(lines: list[dict[str, Any]]) -> list[str]:
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """The losses without a limit."""
    return losses(finish(start(*MODEL, "4")))


@pytest.fixture(scope="module")
def of_larger() -> list[str]:
    """The same for the model whose checkpoints are written."""
    return losses(finish(start(*LARGER, "4")))


def ends_with_a_sentence(process: subprocess.Popen[str], folder: Path) -> str:
    """The last line of its errors, which speaks of the spill folder."""
    errors = process.communicate(timeout=SECONDS)[1]
    assert process.returncode == 1, errors
    last = errors.strip().splitlines()[-1]
    assert f"spill folder '{folder}'" in last, errors
    return last.partition(": ")[2]


def goes_on(checkpoint: Path, expected: list[str]) -> None:
    """The checkpoint is whole: training goes on from it as if nothing had happened."""
    done = torch.load(checkpoint)["step"]
    assert done > 0
    assert losses(finish(start(*LARGER, "4", keeps=checkpoint))) == expected[done:]


@pytest.mark.timeout(4 * SECONDS)
def test_a_disk_that_fails_in_the_middle(
    disks: Callable[..., Disk], tmp_path: Path, of_larger: list[str]
) -> None:
    disk = disks()
    process = start(*LARGER, "100", SAVED, disk.folder, keeps=tmp_path / "checkpoint.pt")
    begun = json.loads(first_line(process))
    os.kill(process.pid, signal.SIGSTOP)  # it stands still in some transfer
    disk.fail()
    os.kill(process.pid, signal.SIGCONT)
    sentence = ends_with_a_sentence(process, disk.folder)
    assert re.search(r"failed: Input/output error\.|gives no more room \(Input/output error\)", sentence)
    assert begun["loss"] == of_larger[0]
    goes_on(tmp_path / "checkpoint.pt", of_larger)


@pytest.mark.timeout(4 * SECONDS)
def test_a_disk_that_promised_more_than_it_has(
    disks: Callable[..., Disk], tmp_path: Path, of_larger: list[str]
) -> None:
    """What a thin volume does: the file system has room, and the device below it has not."""
    (pool := tmp_path / "pool").mkdir()
    needed("mount", "-t", "tmpfs", "-o", "size=80M", "tmpfs", pool)
    try:
        disk = disks(images=pool)
        checkpoint = tmp_path / "checkpoint.pt"
        finish(start(*LARGER, "1", keeps=checkpoint))
        process = start(*LARGER, "4", SAVED, disk.folder, keeps=checkpoint)
        sentence = ends_with_a_sentence(process, disk.folder)
        assert "is full" in sentence or "failed: Input/output error." in sentence, sentence
        goes_on(checkpoint, of_larger)
        subprocess.run(["umount", disk.folder], check=True)
    finally:
        subprocess.run(["umount", "--lazy", pool], check=True)


@pytest.mark.timeout(4 * SECONDS)
def test_a_disk_that_is_full_leaves_the_checkpoint_whole(
    disks: Callable[..., Disk], tmp_path: Path, of_larger: list[str]
) -> None:
    disk, checkpoint = disks(96 * MIB), tmp_path / "checkpoint.pt"
    finish(start(*LARGER, "1", keeps=checkpoint))
    process = start(*LARGER, "4", SAVED, disk.folder, keeps=checkpoint)
    assert "is full: it holds" in ends_with_a_sentence(process, disk.folder)
    goes_on(checkpoint, of_larger)


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("operation", ["removed", "detached"])
def test_a_folder_that_vanishes_does_no_harm(
    disks: Callable[..., Disk], tmp_path: Path, expected: list[str], operation: str
) -> None:
    disk = disks() if operation == "detached" else None
    folder = disk.folder if disk else tmp_path / "spill"
    folder.mkdir(exist_ok=True)
    process = start(*MODEL, "4", LIMIT, folder)
    begun = first_line(process)
    if disk:
        disk.detach()
    else:
        shutil.rmtree(folder)
    lines = finish(process, begun)
    assert losses(lines) == expected
    assert lines[-1]["plan"]["measured_read"] > 0


@pytest.mark.timeout(2 * SECONDS)
def test_a_slow_disk_is_reported_and_does_no_harm(
    disks: Callable[..., Disk], throttled: Callable[[str, int], Callable[[], None]], expected: list[str]
) -> None:
    disk, rate = disks(), 32 * MIB
    process = start(*MODEL, "4", LIMIT, disk.folder, before=throttled(disk.device, rate))
    output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    lines = [json.loads(line) for line in output.splitlines()]
    assert losses(lines) == expected
    assert f"The disk of the spill folder '{disk.folder}' is slow: it takes " in errors
    assert "Name a folder on a faster one" in errors
    plan = lines[-1]["plan"]
    # The kernel limits each direction by itself and lets short bursts pass: with both at once it is twice the
    # rate, and a little more.
    assert plan["write_rate"] < 3 * rate and plan["read_rate"] < 3 * rate
    assert plan["floor_seconds"] == plan["transfer_seconds"] > plan["compute_seconds"]


def test_a_folder_of_a_container_in_memory_is_refused(tmp_path: Path) -> None:
    """A container's own files are an overlay, which may lie in memory and does not look like it."""
    memory, folder = tmp_path / "memory", tmp_path / "of a container"
    memory.mkdir()
    folder.mkdir()
    needed("mount", "-t", "tmpfs", "tmpfs", memory)
    try:
        for name in ("lower", "upper", "work"):
            (memory / name).mkdir()
        layers = f"lowerdir={memory}/lower,upperdir={memory}/upper,workdir={memory}/work"
        needed("mount", "-t", "overlay", "overlay", "-o", layers, folder)
        with pytest.raises(carme_runtime.CarmeRuntimeError, match=r"is memory itself \(tmpfs\)"):
            carme_runtime.memory("64GiB", folder).__enter__()
    finally:
        subprocess.run(["umount", "--lazy", folder], capture_output=True, check=False)
        subprocess.run(["umount", "--lazy", memory], check=True)


@pytest.mark.timeout(2 * SECONDS)
def test_a_folder_of_a_container_on_a_disk_works(tmp_path: Path, expected: list[str]) -> None:
    for name in ("lower", "upper", "work", "folder"):
        (tmp_path / name).mkdir()
    layers = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    needed("mount", "-t", "overlay", "overlay", "-o", layers, tmp_path / "folder")
    try:
        lines = finish(start(*MODEL, "4", LIMIT, tmp_path / "folder"))
    finally:
        subprocess.run(["umount", tmp_path / "folder"], check=True)
    assert losses(lines) == expected


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.sshfs"])
def test_a_folder_of_the_network_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """The kernel's table of file systems is simulated, as nothing serves one here; the folder is real."""
    device = tmp_path.stat().st_dev
    table = tmp_path / "mounts"
    table.write_text(f"1 0 {os.major(device)}:{os.minor(device)} / / rw - {kind} server:/folder rw\n")
    monkeypatch.setattr(spill, "_MOUNTS", table)
    with caplog.at_level("WARNING", "carme_runtime"):
        spill.SpillFile(tmp_path).close()
    assert f"The spill folder '{tmp_path}' is on a file system of the network ({kind})" in caplog.text
    assert "Name a folder on a local disk." in caplog.text
