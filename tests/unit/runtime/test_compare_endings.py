"""What a comparison leaves that is ended or killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from carme_runtime.compare import command, entries, rounds
from carme_runtime.compare.work_folder import work_folder
from patience import HANG

#: Ends well only if SIGTERM has reached the other one too, whichever it reaches first.
TOGETHER = """
import pathlib, signal, sys, time
here, name, other = pathlib.Path(sys.argv[1]), *sys.argv[2:]
def end(*_):
    (here / f"{name}.asked").touch()
    while not (here / f"{other}.asked").exists():
        time.sleep(0.01)
    (here / f"{name}.ended").touch()
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


def test_a_comparison_that_is_ended_asks_all_to_end_at_once_and_removes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, a cancelled job would be killed before it has come to the folder."""
    names = ["parallelize", "torch-gloo"]
    started: list[str] = []
    out = tmp_path / "out"
    out.mkdir()

    def start(entry: entries.Entry, *_: object) -> None:
        name = entry.row.contestant
        (second,) = set(names) - {name}
        command = [sys.executable, "-c", TOGETHER, str(tmp_path), name, second]
        process = entry._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout and process.stdout.readline() == b"ready\n"
        process.stdout.close()
        started.append(name)
        if len(started) == len(names):
            raise SystemExit(143)  # as SIGTERM does

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setattr(entries.Entry, "start", start)
    monkeypatch.setattr(entries, "STOP_SECONDS", HANG)
    with pytest.raises(SystemExit):
        rounds.compare(rounds.Plan(tuple(names), ("tiny",), (1,)), {}, out, lambda line: None)
    assert sorted(path.name for path in tmp_path.glob("*.ended")) == [f"{name}.ended" for name in names]
    assert list(out.iterdir()) == []


def test_the_folder_of_a_killed_comparison_goes_with_the_next_start_and_no_others(tmp_path: Path) -> None:
    program = (
        "import pathlib, signal, sys; from carme_runtime.compare.work_folder import work_folder\n"
        "with work_folder(pathlib.Path(sys.argv[1])) as folder: print(folder, flush=True); signal.pause()"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", program, str(tmp_path)]
    (tmp_path / ".compare-mine").mkdir()  # of nobody that holds a lock in it
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        folder = Path(process.stdout.readline().strip())
        try:
            with work_folder(tmp_path) as own:
                assert folder.exists(), "it still runs"
                assert own.exists()
            assert not own.exists()
        finally:
            process.kill()
    assert folder.exists(), "it had no time to remove it"
    lock = folder / "lock"
    identity = lock.read_text()
    lock.write_text(f"another-{identity}")
    with work_folder(tmp_path) as own:
        assert folder.exists(), "whether it still runs on its node cannot be seen from here"
    lock.write_text(identity)
    with work_folder(tmp_path) as own:
        assert not folder.exists()
    assert [path.name for path in tmp_path.iterdir()] == [".compare-mine"]


@pytest.mark.parametrize("name", ["nothing", "lock.new", "a file"])
def test_a_folder_that_got_no_lock_goes_when_it_is_old_and_empty(tmp_path: Path, name: str) -> None:
    """Its comparison was killed before; another may be about to lock a new one."""
    left = tmp_path / ".compare-left"
    left.mkdir()
    if name != "nothing":
        (left / name).touch()
    with work_folder(tmp_path):
        assert left.exists()
    os.utime(left, (0, 0))
    with work_folder(tmp_path):
        assert left.exists() == (name == "a file")


#: Removes a folder with a file that goes only later, as what is open elsewhere on a network file system.
REFUSED = """
import pathlib, sys
from carme_runtime.compare.work_folder import work_folder
def refuse(event, arguments):
    if refusing and event == "os.remove" and str(arguments[0]).endswith("open"):
        raise OSError("in use")
folder, refusing = pathlib.Path(sys.argv[1]), True
sys.addaudithook(refuse)
with work_folder(folder) as own:
    for name in ("a", "open", "z"):
        (own / name).touch()
print(*sorted(path.name for path in own.iterdir()))
refusing = False
with work_folder(folder):
    print(own.exists())
"""


def test_what_could_not_be_removed_goes_with_the_next_start(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", REFUSED, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "lock open\nFalse\n", done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_end_the_cleaning_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: signal.Signals
) -> None:
    cleaned: list[str] = []

    def compare(_plan: object, _options: object, folder: Path, _progress: object) -> None:
        with work_folder(folder):
            try:
                signal.raise_signal(first)
            finally:
                for second in (signal.SIGINT, signal.SIGTERM):
                    signal.raise_signal(second)
                    cleaned.append(second.name)

    monkeypatch.setattr(command, "compare", compare)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as ended:
            command.main(["--quick", "--output", str(tmp_path)])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 128 + first
    assert cleaned == ["SIGINT", "SIGTERM"]
    assert list(tmp_path.iterdir()) == []
