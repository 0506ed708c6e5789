"""Recordings without the native core, and the page and the sentences that come of them."""

import json
import os
import signal
import struct
import time
from pathlib import Path

import pytest

from carme_runtime import profile
from carme_runtime.petri import Net
from carme_runtime.petri.firings import Firings
from carme_runtime.petri.pool import Connection
from carme_runtime.traces import TraceError, archive, convert
from carme_runtime.traces.recordings import SUFFIX, Plain, Recording, read, read_all
from patience import HANG


@pytest.fixture(autouse=True)
def without_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_core", Plain)


def recorded(folder: Path, rank: int, *names: str) -> Path:
    """A recording of a rank with a phase for each name."""
    recorder = profile.Recorder(None, rank, folder)
    for name in names:
        recorder.add(profile.PHASE, name, time.perf_counter() - 0.001)
    recorder.write()
    return next(file for file in folder.glob(f".{rank}-*{SUFFIX}"))


def test_what_is_recorded_is_read_once(tmp_path: Path):
    file = recorded(tmp_path, 3, "forward", "backward", "forward")
    recording = read(file)
    assert [event.name for event in recording.events()] == ["forward", "backward", "forward"]
    assert all(event.end - event.begin >= 1_000_000 for event in recording.events())
    assert (recording.rank, recording.written, recording.dropped, recording.ended) == (3, 3, 0, True)


def test_what_has_no_room_is_dropped_and_counted(tmp_path: Path):
    recorder = profile.Recorder(None, 0, tmp_path, limit=200)
    for _ in range(10):
        recorder.add(profile.PHASE, "forward", time.perf_counter())
    recorder.write()
    assert convert.shortages(tmp_path, 2) == [
        "7 events of rank 0 had no room in the trace. Raise --trace-limit.",
        "Rank 1 left no trace: it was killed at once, or does not use carme_runtime.",
    ]


def test_a_block_that_is_not_whole_gives_its_whole_events(tmp_path: Path):
    file = recorded(tmp_path, 0, "forward")
    record = struct.pack("<qqQQIIiHH", 5, 9, 0, 0, 15, 0, -1, 4, 0)
    data = file.read_bytes()
    end = data.rindex(struct.pack("<IIQ", 6, 0, 16))
    file.write_bytes(data[:end] + struct.pack("<IIQ", 1, 0, 96) + record + record[:20])
    recording = read(file)
    assert [event.end for event in recording.events()][1:] == [9] and not recording.ended
    assert convert.shortages(tmp_path, 1) == ["Rank 0 was killed: its last events are missing in the trace."]


def test_the_page_holds_all_ranks(tmp_path: Path):
    for rank in (0, 1):
        recorded(tmp_path, rank, "forward", "</script><b>")
    page = tmp_path / "page.html"
    sentence = convert.make(tmp_path, 2, "html", page)
    assert sentence == f"The timeline is in {page}: 4 spans of 2 ranks. Any browser shows it."
    text = page.read_text()
    data = json.loads(text.split('type="application/json">')[1].split("</script>")[0])
    assert {row["rank"] for row in data["rows"]} == {0, 1}
    assert set(data["names"]) == {"forward", "</script><b>"}
    assert sum(len(row["spans"]) for row in data["rows"]) == 4


def test_times_follow_the_line_between_two_offsets():
    recording = Recording(Path(), {}, clocks=[(1000, 100, 10), (1500, 9999, 500), (2000, 200, 12)])
    assert [recording.corrected(at) for at in (0, 1000, 1500, 2000, 3000)] == [100, 1100, 1650, 2200, 3200]
    assert Recording(Path(), {}).corrected(7) == 7


def test_nodes_whose_clocks_were_not_compared_follow_their_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    recorded(tmp_path, 0, "forward")
    monkeypatch.setattr(profile, "_boot", lambda: "another")
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() - 1000 * 10**9)  # its boot was later
    recorded(tmp_path, 1, "forward")
    first, second = read_all(tmp_path)
    event = next(iter(second.events()))
    assert first.corrected(7) == 7
    assert second.corrected(event.end) - event.end == pytest.approx(-1000 * 10**9, abs=10**11)
    assert convert.shortages(tmp_path, 2) == [
        "The clock of rank 1 was not compared with that of rank 0, on another node: times between them are "
        "as exact as the clocks of the nodes."
    ]


def test_the_limit_counts_all_processes_of_a_rank(tmp_path: Path):
    files: list[Path] = []
    for _ in range(2):
        recorder = profile.Recorder(None, 0, tmp_path, limit=800)
        for _ in range(10):
            recorder.add(profile.PHASE, "forward", time.perf_counter())
        recorder.write()
        files += [file for file in tmp_path.iterdir() if file not in files]
    first, second = files
    assert read(first).written == 10 and read(second).written == 0 and read(second).dropped == 10
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in (first, second))


def test_a_profile_beside_a_trace_has_no_more_events_than_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(profile, "MOST_EVENTS", 3)
    recorder = profile.Recorder(tmp_path / "profile", 0, tmp_path / "trace")
    for _ in range(10):
        recorder.add(profile.PHASE, "forward", time.perf_counter())
    recorder.write()
    found = json.loads(profile.file_of(tmp_path / "profile", 0).read_text())
    assert len([event for event in found["traceEvents"] if event["ph"] == "X"]) == 3
    (file,) = (tmp_path / "trace").iterdir()
    assert len(list(read(file).events())) == 10
    assert read(file, 0).blocks == {0: []} and read(file, 0).written == 10


def test_a_forked_process_waits_for_no_lock_of_the_recorder(tmp_path: Path):
    recorder = profile.Recorder(None, 0, tmp_path)
    with recorder._core._lock:
        child = os.fork()
        if not child:
            signal.alarm(int(HANG))
            recorder.add(profile.PHASE, "in the child", time.perf_counter())
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    recorder.write()


@pytest.mark.parametrize("end", [KeyboardInterrupt, MemoryError])
def test_an_archive_that_does_not_come_to_its_end_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: type[BaseException]
):
    class Ending:
        def __init__(self, folder: Path, ranks: int) -> None:
            folder.mkdir()

        def add(self, recording: Recording) -> None:
            raise end

    monkeypatch.setattr(archive, "Archive", Ending)
    with pytest.raises(end):
        archive.write(tmp_path / "made", iter([Recording(Path(), {})]), 1)
    assert not (tmp_path / "made").exists()
    (tmp_path / "own").mkdir()
    with pytest.raises(TraceError, match="exists, and an archive is a new folder"):
        archive.write(tmp_path / "own", iter([]), 1)
    assert (tmp_path / "own").is_dir()


def test_another_file_is_refused(tmp_path: Path):
    (tmp_path / f"x{SUFFIX}").write_text("something else")
    with pytest.raises(TraceError, match=r"is not a recording of carme_runtime\."):
        list(read_all(tmp_path))


def test_firings_are_in_rows_of_their_workers_when_they_happened(tmp_path: Path):
    recorder = profile.Recorder(None, 0, tmp_path)
    recorder.add(profile.FIRING, "render", 1.0, end=2.0, extra=4, row="worker 0 on n1")
    recorder.add(profile.FIRING, "shade", 1.5, end=1.75, row="worker 1 on n2")
    recorder.add(profile.PHASE, "forward", 1.0, end=3.0)
    recorder.write()
    recording = read(next(tmp_path.glob(f".0-*{SUFFIX}")))
    found = {
        event.name: (recording.threads.get(event.thread, "main"), event.begin, event.end, event.extra)
        for event in recording.events()
    }
    assert found == {
        "render": ("worker 0 on n1", 1_000_000_000, 2_000_000_000, 4),
        "shade": ("worker 1 on n2", 1_500_000_000, 1_750_000_000, 0),
        "forward": ("main", 1_000_000_000, 3_000_000_000, 0),
    }
    convert.make(tmp_path, 1, "html", tmp_path / "page.html")
    assert "render of micro-batch 3" in (tmp_path / "page.html").read_text()


def test_another_nodes_clock_is_that_of_the_report_that_came_quickest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(profile, "recorder", recorder := profile.Recorder(None, 0, tmp_path))
    now = 1000.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    firings = Firings()
    connection = Connection(3)
    connection.node = 1
    for begin, end, arrived in ((5.0, 6.0, 100.5), (6.5, 7.0, 101.0), (8.0, 9.0, 103.2)):
        now = arrived  # the node's clock is 94 s behind; the second report took no time
        firings.add(connection, "n2", "step", (begin, end), 0)
    recorder.write()
    recording = read(next(tmp_path.glob(f".0-*{SUFFIX}")))
    times = [(event.begin / 1e9, event.end / 1e9) for event in recording.events()]
    assert times == [
        (pytest.approx(99.5), pytest.approx(100.5)),
        (pytest.approx(100.5), pytest.approx(101.0)),
        (pytest.approx(102.0, abs=0.001), pytest.approx(103.0, abs=0.001)),
    ]
    assert {recording.threads[event.thread] for event in recording.events()} == {"worker 3 on n2"}


def test_a_node_that_has_started_again_has_another_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(profile, "recorder", recorder := profile.Recorder(None, 0, tmp_path))
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    firings = Firings()
    connection = Connection(3)
    connection.node = 1
    for begin, end, arrived in ((5000.0, 5001.0, 1001.0), (2.0, 3.0, 1500.0), (4.0, 5.0, 1502.5)):
        now = arrived  # at first the node's clock is 4000 s ahead, and after its start 1497 s behind
        firings.add(connection, "n2", "step", (begin, end), 0)
    recorder.write()
    recording = read(next(tmp_path.glob(f".0-*{SUFFIX}")))
    assert [(event.begin / 1e9, event.end / 1e9) for event in recording.events()] == [
        (pytest.approx(1000.0), pytest.approx(1001.0)),
        (pytest.approx(1499.0), pytest.approx(1500.0)),
        (pytest.approx(1501.0, abs=0.001), pytest.approx(1502.0, abs=0.001)),
    ]


def test_workers_report_the_micro_batch_of_a_firing_and_one_that_has_none_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(profile, "recorder", recorder := profile.Recorder(None, 0, tmp_path))
    net = Net("numbers")
    net.number_of = lambda token: os.getpid() // (token % 2)  # none of even tokens
    numbers, done = net.place("numbers", int, tokens=[1, 2, 3, 4]), net.place("done", int)

    @net.transition(numbers >> done)
    def same(number):
        return number

    with net.start(folder=tmp_path / "run", workers=1) as run:
        assert sorted(run.wait(HANG)["done"]) == [1, 2, 3, 4]
    recorder.write()
    recording = read(next(tmp_path.glob(f".0-*{SUFFIX}")))
    found = sorted(event.extra for event in recording.events() if event.name == "same")
    assert found[:2] == [0, 0] and all(found[2:]) and len(found) == 4
    assert (
        os.getpid() + 1 not in found
    )  # the coordinator, which serves all workers, unpickles no tokens for it
