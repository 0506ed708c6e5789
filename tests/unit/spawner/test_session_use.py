"""What counts as use of a session, seen with real processes."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import psutil
import pytest

from carme_spawner.singleuser import activity
from carme_spawner.singleuser.activity import Activity, Gpus, Processes
from carme_spawner.singleuser.time_left import TimeLeft

BURN = "import time\nend = time.monotonic() + 600\nwhile time.monotonic() < end: pass"
NVML = """
class NVMLError(Exception): pass
class Rates: pass
used = [0, 0]
def nvmlInit(): pass
def nvmlDeviceGetCount(): return len(used)
def nvmlDeviceGetHandleByIndex(number): return number
def nvmlDeviceGetUtilizationRates(handle):
    if used[handle] is None: raise NVMLError("lost")
    rates = Rates()
    rates.gpu = used[handle]
    return rates
"""


async def test_reports_continue_when_one_reading_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Activity, "refresh", Mock(side_effect=RuntimeError("a kernel is being started")))
    hub = Mock(post=AsyncMock(return_value={"ends": None}))
    reports = TimeLeft(hub, Mock())
    reports.start()
    try:
        for sent in (1, 2):
            while hub.post.await_count < sent:  # noqa: ASYNC110 - the test's own limit ends it
                await asyncio.sleep(0.01)
            reports.report_soon()
    finally:
        reports.stop()


@pytest.fixture
def shell() -> Iterator[subprocess.Popen[str]]:
    """A job's topmost process, which starts what a test wants."""
    program = (
        "import subprocess, sys\nfor line in sys.stdin: print(subprocess.Popen(eval(line)).pid, flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
    process.kill()
    process.wait()


def start(shell: subprocess.Popen[str], *command: str) -> psutil.Process:
    assert shell.stdin and shell.stdout
    print(list(command), file=shell.stdin, flush=True)
    process = psutil.Process(int(shell.stdout.readline()))
    while not process.cmdline():
        time.sleep(0.001)  # Linux shows its words a moment after it has begun
    return process


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock by which shares of processor time are computed: how busy the machine is does not count."""
    now = [0.0]
    monkeypatch.setattr(activity, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_program_that_computes_counts_and_one_that_waits_does_not(
    shell: subprocess.Popen[str], clock: list[float]
) -> None:
    start(shell, "sleep", "600")
    processes = Processes(top=shell.pid)
    clock[0] += 1
    assert processes.busy() is False
    burning = start(shell, sys.executable, "-c", BURN)
    while burning.cpu_times().user < 0.5:
        time.sleep(0.02)  # its processor time must not count as the session's
    clock[0] += 1
    assert processes.busy() is True


def test_a_launcher_counts_while_its_ranks_compute_elsewhere(
    shell: subprocess.Popen[str], clock: list[float], tmp_path: Path
) -> None:
    launcher = tmp_path / "carme-run"
    launcher.write_text("import time; time.sleep(600)")
    processes = Processes(top=shell.pid)
    process = start(shell, sys.executable, str(launcher), "train.py")
    assert processes.busy() is True
    process.kill()
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.02)
    clock[0] += 30
    assert processes.busy() is False


def test_what_cannot_be_known_is_reported() -> None:
    assert Processes(top=1).busy() is None
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert Processes(top=ended.pid).busy() is None


def test_a_gpu_counts_while_it_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pynvml.py").write_text(NVML)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    gpus = Gpus()
    library = sys.modules["pynvml"]
    assert gpus.busy() is False
    library.used[1] = 37
    assert gpus.busy() is True
    library.used[1] = None
    assert gpus.busy() is None
    monkeypatch.delitem(sys.modules, "pynvml")


def test_without_the_drivers_library_nothing_is_known_of_gpus() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has GPUs")
    assert Gpus().busy() is None


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-s", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
    )
    return done.stdout.strip()


def test_a_bundle_is_used_as_long_as_it_fits_what_is_installed(tmp_path: Path) -> None:
    packages = tmp_path / "some-packages"
    packages.mkdir()
    (packages / "bundled.py").write_text("where = __file__\n")
    file = tmp_path / "code"
    path = os.pathsep.join([*sys.path, str(packages)])
    begin = (
        f"from pathlib import Path\nfrom carme_spawner.singleuser import bundle\nfile = Path({str(file)!r})\n"
    )
    run(begin + "import bundled; bundle.write(file)", PYTHONPATH=path, PYTHONDONTWRITEBYTECODE="1")
    use = (
        begin
        + "print(bundle.use(file)); import bundled; print(type(bundled.__loader__).__name__, bundled.where)"
    )
    where = packages / "bundled.py"
    assert run(use, PYTHONPATH=path).splitlines() == ["True", f"_Loader {where}"]
    # A package is added, or another one takes its place.
    os.utime(packages, (1e9, 1e9))
    assert run(use, PYTHONPATH=path).splitlines() == ["False", f"SourceFileLoader {where}"]
    for content in (b"", b"nonsense", file.read_bytes()[:1000]):
        file.write_bytes(content)
        assert run(use, PYTHONPATH=path).splitlines()[0] == "False"
