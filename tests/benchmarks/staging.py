"""Copying folders: carme data copy, verified, against cp -a, rsync -a, fpsync and tar | tar.

    python tests/benchmarks/staging.py --quick
    python tests/benchmarks/staging.py --json result.json --where /scratch

Three trees: 200,000 small files (0.2 to 8 KB, 200 in each folder), 20 files of 1 GB, and a mixture of both.
Each round copies a tree with each tool, one after the other, to a new folder of the same file system; we
report the medians. Times are those of the whole command from its start, for large files until the file
system has written everything to its device. Large files are compared with the time that fio takes to write as
much in the same rounds: through the page cache (fio), past it (fio_direct), and past it with all of it read
back from the device (fio_verified), which is what ours does. With --cold the source comes from the device,
too: there the limit is the longer of writing and of reading twice, as if the device did both at once;
fio_copy and fio_copy_verified say how long fio takes to do so. Then the second run: nothing has changed, and
1 % of the files have. At last the small files are packed into one image, and all are opened and read: in the
image as jobs mount it (ours), as the kernel mounts it, and in their folder.

As root the trees lie in a new ext4 file system in a file below --where, so that what was there before has no
influence; else in a plain folder there. That file is used past the host's page cache, so that the device is
what is measured. Large files are read once before each command; --cold has the caches of the whole host
dropped instead.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import os
import random
import resource
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import print_table, row, tidy_up_when_ended, write_json

SOURCE = Path(__file__).resolve().parents[2] / "carme" / "src"
NATIVE = runpy.run_path(str(SOURCE.parent / "native/compile.py"))
INTERPRETED = "import sys; sys.path.insert(0, sys.argv.pop(1)); from carme.cli import program; program()"
#: The command that is measured; `compiled` finds it.
CARME = [sys.executable, "-I", "-c", INTERPRETED, str(SOURCE)]


@contextlib.contextmanager
def compiled() -> Iterator[None]:
    """Build what a wheel has: the library, and the command with a Python beside it."""
    with tempfile.TemporaryDirectory(prefix="carme-bench-") as folder:
        python, program = Path(folder, "python"), Path(folder, "carme")
        python.write_text(f'#!/bin/sh\nPYTHONPATH={SOURCE} exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        if not NATIVE["build"](NATIVE["LIBRARY"], SOURCE.parent / NATIVE["LIBRARY"]):
            print("staging: no C compiler, so ours is measured without what is compiled", file=sys.stderr)
        elif NATIVE["build"](NATIVE["PROGRAM"], program):
            CARME[:] = [str(program)]
        yield


def carme(*arguments: str) -> list[str]:
    """What is measured."""
    return [*CARME, "data", *arguments]


def by_carme(source: Path, target: Path) -> list[list[str]]:
    """Verified, as it is by default."""
    return [carme("copy", "--quiet", str(source), str(target))]


def unverified(source: Path, target: Path) -> list[list[str]]:
    """The same without reading back."""
    return [carme("copy", "--quiet", "--verify", "none", str(source), str(target))]


def cp(source: Path, target: Path) -> list[list[str]]:
    """The second time into the same folder as well."""
    return [["cp", "-a", "-T", str(source), str(target)]]


def rsync(source: Path, target: Path) -> list[list[str]]:
    """Its usual way, which compares size and time."""
    return [["rsync", "-a", f"{source}/", str(target)]]


def fpsync(source: Path, target: Path) -> list[list[str]]:
    """As many rsyncs at once as there are cores."""
    target.mkdir(exist_ok=True)
    jobs = str(max(2, len(os.sched_getaffinity(0))))
    return [["fpsync", "-n", jobs, "-t", str(target.parent), f"{source}/", f"{target}/"]]


def tar(source: Path, target: Path) -> list[list[str]]:
    """Two of them with a pipe between."""
    target.mkdir(exist_ok=True)
    return [["tar", "-C", str(source), "-cf", "-", "."], ["tar", "-C", str(target), "-xpf", "-"]]


TOOLS: dict[str, Callable[[Path, Path], list[list[str]]]] = {
    "ours": by_carme,
    "unverified": unverified,
    "cp": cp,
    "rsync": rsync,
    "fpsync": fpsync,
    "tar": tar,
}


@dataclass(frozen=True)
class Amount:
    """How much is copied.

    Args:
        small: Number of small files.
        large: Number of large files.
        size: Bytes of a large file.
    """

    small: int
    large: int
    size: int

    def needs(self, only: str | None, tools: int) -> int:
        """Bytes of a file system that holds it.

        Args:
            only: The one tree that is copied; None: all of them.
            tools: How many copy it.
        """
        # Twice the largest tree, or a copy of the small files for each tool.
        need = 1 << 30
        need += 2 * self.large * self.size if only not in ("small", "packed") else 0
        need += self.small * 8_000 * (tools + 2) if only != "large" else 0
        return need + need // 10  # for the file system's own tables


def main() -> int:
    """Measure, print the table, write the JSON."""
    options = parsed()
    tidy_up_when_ended()
    tools = {
        name: make
        for name, make in TOOLS.items()
        if name == "ours"
        or (name in options.tools and (name in ("unverified", "cp", "tar") or shutil.which(name)))
    }
    if missing := set(options.tools) - tools.keys():
        print(f"staging: not installed, so left out: {', '.join(sorted(missing))}", file=sys.stderr)
    small, large, size = (10_000, 4, 64 << 20) if options.quick else (200_000, 20, 1 << 30)
    amount = Amount(options.files or small, options.large or large, size)
    need, free = amount.needs(options.only, len(tools)), shutil.disk_usage(options.where).free
    if free < need:
        print(
            f"staging: {options.where} has {free >> 30} GiB free; {need >> 30} are needed. "
            "Name another place with --where, or use --quick.",
            file=sys.stderr,
        )
        return 2
    with compiled(), place(options.where, need, options.plain) as folder:
        rows = measure(Bench(folder, tools, options.rounds, options.cold), folder, amount, options.only)
    print_table(rows)
    print("\nProcessor seconds, which say more where others use the machine as well:")
    print_table(
        [
            row(each["name"], "s", each["processor"].pop("ours"), peers=each["processor"])
            for each in [{**each, "processor": dict(each["processor"])} for each in rows]
        ]
    )
    if options.json:
        large_bytes = amount.large * size
        write_json(options.json, rows, files=amount.small, large_bytes=large_bytes, cold=options.cold)
    return 0


def parsed() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="10,000 small files, 4 of 64 MiB")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--where", type=Path, default=Path("/var/tmp"), help="where the trees are made")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured (default: 3)")
    parser.add_argument("--files", type=int, metavar="N", help="so many small files")
    parser.add_argument("--large", type=int, metavar="N", help="so many large files")
    parser.add_argument("--only", choices=("small", "large", "mixed", "packed"), help="one of them")
    parser.add_argument("--tools", nargs="+", choices=tuple(TOOLS), default=tuple(TOOLS), metavar="TOOL")
    parser.add_argument("--cold", action="store_true", help="drop the host's caches before each command")
    parser.add_argument("--plain", action="store_true", help="a plain folder, no file system of its own")
    return parser.parse_args()


def measure(bench: Bench, folder: Path, amount: Amount, only: str | None) -> list[dict[str, Any]]:
    """The rows of all trees, or of the one that is named; each is made in the folder, and goes again."""
    small, large, size = amount.small, amount.large, amount.size
    rows: list[dict[str, Any]] = []
    if only in (None, "small"):
        with tree(folder, small, 0, size) as source:
            rows += bench.small(source)
    if only in (None, "large"):
        with tree(folder, 0, large, size) as source:
            rows += bench.large(source, large * size)
    if only in (None, "mixed"):
        with tree(folder, small // 2, large // 2, size) as source:
            rows += bench.mixed(source)
    if only in (None, "packed"):
        with tree(folder, small, 0, size) as source:
            rows += bench.packed(source)
    return rows


@contextlib.contextmanager
def place(where: Path, size: int, plain: bool) -> Iterator[Path]:
    """A folder on a file system of its own, where that can be had."""
    with tempfile.TemporaryDirectory(prefix="carme-bench-", dir=where) as name:
        folder = Path(name)
        if os.geteuid() or plain or not shutil.which("mkfs.ext4"):
            yield folder
            return
        image, mounted = folder / "image", folder / "mounted"
        mounted.mkdir()
        with image.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        # Written once, so that nobody who is measured is the first to use its blocks.
        zeros = ["dd", "if=/dev/zero", f"of={image}", "bs=8M", f"count={size >> 23}"]
        if subprocess.run(
            [*zeros, "conv=notrunc", "oflag=direct"], stderr=subprocess.DEVNULL, check=False
        ).returncode:
            subprocess.run([*zeros, "conv=notrunc,fsync"], stderr=subprocess.DEVNULL, check=True)
        subprocess.run(
            ["mkfs.ext4", "-q", "-i", "4096", "-E", "lazy_itable_init=0,lazy_journal_init=0", image],
            check=True,
        )
        # Past the page cache where that can be: else most of the time is that of copies in memory.
        loop = ["losetup", "--find", "--show", image]
        created = subprocess.run([*loop, "--direct-io=on"], capture_output=True, text=True, check=False)
        if created.returncode:
            created = subprocess.run(loop, stdout=subprocess.PIPE, text=True, check=True)
        device = created.stdout.strip()
        try:
            subprocess.run(["mount", device, mounted], check=True)
            try:
                yield mounted
            finally:
                subprocess.run(["umount", mounted], check=True)
        finally:
            subprocess.run(["losetup", "--detach", device], check=True)


@contextlib.contextmanager
def tree(folder: Path, small: int, large: int, size: int) -> Iterator[Path]:
    """A tree: small files with 200 in each folder, large ones beside them. Always the same."""
    top = folder / "source"
    chance = random.Random(1)
    noise = chance.randbytes(1 << 20)
    top.mkdir()
    for number in range(small):
        folder = top / f"{number // 20_000:02d}" / f"{number // 200 % 100:02d}"
        if number % 200 == 0:
            folder.mkdir(parents=True)
        length = chance.randint(200, 8000)
        begin = chance.randrange(len(noise) - length)
        (folder / f"image_{number:07d}.jpg").write_bytes(noise[begin : begin + length])
    for number in range(large):
        with (top / f"large{number}").open("wb") as file:
            for _ in range(size >> 20):
                file.write(noise)
    yield top
    shutil.rmtree(top)


#: Opens and reads all files below a folder.
READ = """
import os, sys
for top, _, names in os.walk(sys.argv[1]):
    for name in names:
        with open(os.path.join(top, name), "rb", buffering=0) as file:
            file.read()
"""


@contextlib.contextmanager
def _mounted(mount: list[str | Path], place: Path) -> Iterator[None]:
    """An image at a place that is made for it."""
    place.mkdir()
    subprocess.run([*mount, place], check=True)
    try:
        yield
    finally:
        subprocess.run([*(["fusermount", "-u"] if os.geteuid() else ["umount"]), place], check=True)
        place.rmdir()


def _fio(size: int, *jobs: tuple[Any, ...], direct: bool = True) -> float:
    """Seconds that fio takes for jobs at once: each reads or writes so many bytes, of some files in turn."""
    shared = [
        f"--size={size}", "--bs=2M", "--ioengine=libaio", "--iodepth=4", f"--direct={int(direct)}",
        "--end_fsync=1", "--file_service_type=sequential",
    ]  # fmt: skip
    each = [
        [f"--name=job{number}", f"--rw={mode}", f"--filename={':'.join(map(str, files))}", *shared]
        for number, (mode, *files) in enumerate(jobs)
    ]
    for _, *files in jobs:
        descriptor = os.open(files[0].parent, os.O_RDONLY)
        ctypes.CDLL(None).syncfs(descriptor)
        os.close(descriptor)
    command = ["fio", "--output-format=json", *itertools.chain.from_iterable(each)]
    reported = subprocess.run(command, check=True, capture_output=True, text=True)
    return max(job["job_runtime"] for job in json.loads(reported.stdout)["jobs"]) / 1000


#: For each tool and each time: seconds, and processor seconds.
Times = dict[str, list[tuple[float, float]]]


class Bench:
    """The measurements: seconds, and processor seconds with what the kernel does for them.

    Args:
        folder: Where there is room.
        tools: What is compared.
        rounds: How often.
        cold: Drop the host's caches before each command.
    """

    def __init__(
        self, folder: Path, tools: dict[str, Callable[[Path, Path], list[list[str]]]], rounds: int, cold: bool
    ) -> None:
        self.folder, self.tools, self.rounds, self.cold = folder, tools, rounds, cold

    def small(self, source: Path) -> list[dict[str, Any]]:
        """Small files, and the second runs."""
        times = self._times(source, written=False, keep=True)
        aim = "2x rsync, faster than cp"
        rows = [
            self._row(
                "small_files_s",
                times,
                aim,
                lambda t: 2 * t("ours") <= t("rsync") and t("ours") < t("cp"),
            ),
            self._row(
                "rerun_s", self._again(source), "3x faster than rsync", lambda t: 3 * t("ours") <= t("rsync")
            ),
        ]
        rows.append(self._row("rerun_1_percent_s", self._again(source, change=100), "", None))
        for name in self.tools:
            shutil.rmtree(self.folder / f"copy-{name}")
        return rows

    def large(self, source: Path, size: int) -> list[dict[str, Any]]:
        """Large files, with the time until they are on the device."""
        writes: dict[str, list[float]] = {}
        times = self._times(source, written=True, between=lambda: self._writes(source, size, writes))
        limits = {name: statistics.median(each) for name, each in writes.items()}
        floor = writing = None
        if limits:
            # Nobody can have everything read back from the device sooner than it can be written and read.
            writing, floor = min(limits["fio"], limits["fio_direct"]), limits["fio_verified"]
            if self.cold:  # What is copied has to be read as well, at best while the device writes.
                reading = limits["fio_read"]
                writing, floor = max(writing, reading), max(writing, 2 * reading)
        rows = [
            self._row(
                "large_files_s",
                times,
                "0.9 of the disk, read back",
                (lambda t: 0.9 * t("ours") <= floor) if floor else None,
                floor=floor,
                more={name: seconds for name, seconds in limits.items() if name != "fio_verified"},
            )
        ]
        if "unverified" in times:
            rows.append(
                self._row(
                    "large_files_unverified_s",
                    {"ours": times["unverified"]},
                    "0.9 of the disk",
                    (lambda t: 0.9 * t("ours") <= writing) if writing else None,
                    floor=writing,
                )
            )
        return rows

    def mixed(self, source: Path) -> list[dict[str, Any]]:
        """Both, with the time until they are on the device."""
        return [self._row("mixed_s", self._times(source, written=True), "", None)]

    def packed(self, source: Path) -> list[dict[str, Any]]:
        """All small files opened and read: from one image, as jobs mount it, and from their folder."""
        program = shutil.which("squashfuse_ll") or shutil.which("squashfuse")
        if not program or not shutil.which("mksquashfs"):
            print("staging: squashfuse or mksquashfs is not installed: nothing is packed", file=sys.stderr)
            return []
        image = self.folder / "packed.sqsh"
        packing: Times = {"ours": [self._timed([carme("pack", "--quiet", str(source), str(image))], False)]}
        places = {
            "ours": self.folder / "by-squashfuse",
            "folder": source,
            "kernel": self.folder / "by-kernel",
        }
        times: Times = {}
        with contextlib.ExitStack() as mounts:
            mounts.callback(image.unlink)
            mounts.enter_context(_mounted([program, image], places["ours"]))
            if os.geteuid():
                del places["kernel"]
            else:
                command = ["mount", "-t", "squashfs", "-o", "loop,ro", image]
                mounts.enter_context(_mounted(command, places["kernel"]))
            for _ in range(self.rounds):
                for name, place in places.items():
                    command = [sys.executable, "-I", "-S", "-c", READ, str(place)]
                    times.setdefault(name, []).append(self._timed([command], False))
        return [self._row("pack_s", packing, "", None), self._row("image_read_s", times, "", None)]

    def _times(
        self,
        source: Path,
        *,
        written: bool,
        keep: bool = False,
        between: Callable[[], None] | None = None,
    ) -> Times:
        """Copy with each tool in each round; with `keep` the last round's copies stay.

        `between` is called in each round as well.
        """
        times: Times = {name: [] for name in self.tools}
        for number in range(self.rounds):
            for name in self._order(number):
                target = self.folder / f"copy-{name}"
                times[name].append(self._run(name, source, target, written))
                if not keep or number < self.rounds - 1:
                    shutil.rmtree(target)
            if between:
                between()
        return times

    def _again(self, source: Path, change: int = 0) -> Times:
        """Run each tool once more over its own copy; with `change` every so-manyth file is another one."""
        times: Times = {name: [] for name in self.tools if name != "unverified"}
        for number in range(self.rounds):
            if change:
                files = sorted(source.rglob("*.jpg"))
                for file in files[number::change]:
                    file.write_bytes(file.read_bytes()[::-1])
            for name in self._order(number):
                if name in times:
                    times[name].append(self._run(name, source, self.folder / f"copy-{name}", False))
        return times

    def _order(self, number: int) -> list[str]:
        """Each round begins with another tool."""
        names = list(self.tools)
        return names[number % len(names) :] + names[: number % len(names)]

    def _run(self, name: str, source: Path, target: Path, written: bool) -> tuple[float, float]:
        if not self.cold:
            # Hosts that give memory they have not used for some seconds to others have lost it.
            for large in source.glob("large*"):
                with large.open("rb", buffering=0) as file:
                    while file.read(8 << 20):
                        pass
        return self._timed(self.tools[name](source, target), written)

    def _timed(self, commands: list[list[str]], written: bool) -> tuple[float, float]:
        """Seconds, and processor seconds, of commands with pipes between."""
        descriptor = os.open(self.folder, os.O_RDONLY)
        libc = ctypes.CDLL(None)
        libc.syncfs(descriptor)
        if self.cold:
            Path("/proc/sys/vm/drop_caches").write_text("3\n")
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        begun = time.monotonic()
        processes: list[subprocess.Popen[bytes]] = []
        for number, command in enumerate(commands):
            last = number == len(commands) - 1
            processes.append(
                subprocess.Popen(
                    command,
                    stdin=processes[-1].stdout if processes else subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL if last else subprocess.PIPE,
                    stderr=errors,
                )
            )
        codes = [process.wait() for process in reversed(processes)]
        if written:
            libc.syncfs(descriptor)
        taken = time.monotonic() - begun
        os.close(descriptor)
        uses = resource.getrusage(resource.RUSAGE_CHILDREN)
        with errors:
            if any(codes):
                errors.seek(0)
                text = errors.read().decode(errors="replace")
                sys.exit(f"staging: {' | '.join(' '.join(command) for command in commands)} failed:\n{text}")
        return taken, uses.ru_utime + uses.ru_stime - used.ru_utime - used.ru_stime

    def _writes(self, source: Path, size: int, seconds: dict[str, list[float]]) -> None:
        """Add how long fio takes to move so many bytes to and from the device: see the top of this file."""
        if not shutil.which("fio"):
            return
        copy = self.folder / "fio"
        write, read = ("write", copy), ("read", copy)
        taken = {
            "fio": _fio(size, write, direct=False),
            "fio_direct": _fio(size, write),
            "fio_read": _fio(size, read),
        }
        taken["fio_verified"] = taken["fio_direct"] + taken["fio_read"]
        if self.cold:
            again = ("read", *sorted(source.glob("large*")))
            for name, jobs in (("fio_copy", (write, again)), ("fio_copy_verified", (write, again, again))):
                copy.unlink()
                taken[name] = _fio(size, *jobs)
        copy.unlink()
        for name, each in taken.items():
            seconds.setdefault(name, []).append(each)

    def _row(
        self,
        name: str,
        times: Times,
        aim: str,
        holds: Callable[[Callable[[str], float]], bool] | None,
        floor: float | None = None,
        more: dict[str, float] | None = None,
    ) -> dict[str, Any]:
        """A row of the report; `more` are others' figures that were measured elsewise."""
        medians = {tool: statistics.median(taken for taken, _ in each) for tool, each in times.items()}
        processor = {tool: statistics.median(used for _, used in each) for tool, each in times.items()}
        measured = medians.pop("ours")
        reached = None
        with contextlib.suppress(KeyError):
            # Not all of the others are always measured.
            reached = holds and holds(lambda tool: measured if tool == "ours" else medians[tool])
        return row(
            name,
            "s",
            measured,
            peers={**medians, **(more or {})},
            floor=floor,
            aim=aim,
            holds=reached,
            processor=processor,
            each=times,
        )


if __name__ == "__main__":
    sys.exit(main())
