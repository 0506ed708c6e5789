"""`carme-run --trace`: archives that others read, with each event once."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from patience import HANG

otf2 = pytest.importorskip("otf2", reason="PyPI's otf2 is not there")

PROGRAMS = Path(__file__).parent / "programs"
RUN = [sys.executable, "-m", "carme_runtime.launcher.command"]
PRINT = shutil.which("otf2-print")


def run(*arguments: str, code: int = 0, environment: dict[str, str] | None = None) -> str:
    """What carme-run says; it must end with `code`."""
    done = subprocess.run(
        [*RUN, *arguments],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
        env=os.environ | (environment or {}),
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@dataclass
class Read:
    """What otf2 reads of an archive, by rank."""

    events: dict[int, list[tuple[str, Any]]] = field(default_factory=dict)
    regions: dict[int, Counter[str]] = field(default_factory=dict)
    times: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    metrics: dict[tuple[int, str], list[dict[str, int]]] = field(default_factory=dict)

    def of(self, rank: int, kind: str) -> list[Any]:
        return [event for name, event in self.events[rank] if name == kind]


def read(folder: Path) -> Read:
    found = Read()
    with otf2.reader.open(str(folder / "traces.otf2")) as trace:
        for location, event in trace.events:
            digits = re.match(r"rank (\d+)", location.group.name)
            assert digits
            rank = int(digits[1])
            found.events.setdefault(rank, []).append((type(event).__name__, event))
            found.times.setdefault((rank, location.name), []).append(event.time)
            if isinstance(event, otf2.events.Metric):
                names = [member.name for member in event.metric.members]
                values = dict(zip(names, event.values, strict=True))
                found.metrics.setdefault((rank, location.name), []).append(values)
            if isinstance(event, otf2.events.Enter):
                found.regions.setdefault(rank, Counter())[event.region.name] += 1
    return found


def op(value: Any) -> str:
    """A value of an enumeration by its name."""
    return str(value).partition(".")[2]


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced")
    output = run(
        "-n", "2", "--trace", f"otf2:{folder / 'trace'}", "--trace", f"html:{folder / 'page.html'}",
        "--profile", str(folder / "profile"), str(PROGRAMS / "traced.py"),
    )  # fmt: skip
    return folder, output


def test_each_event_is_there_once_and_collectives_name_bytes_and_members(traced):
    folder, output = traced
    assert "The trace is in" in output and "no trace" not in output, output
    assert sorted(path.name for path in folder.iterdir()) == ["page.html", "profile", "trace"]
    trace = read(folder / "trace")
    for rank in (0, 1):
        collectives = trace.of(rank, "MpiCollectiveEnd")
        kinds = Counter(op(event.collective_op) for event in collectives)
        assert kinds["ALLREDUCE"] == 7 and kinds["BCAST"] == 1 and kinds["BARRIER"] >= 2, kinds
        assert len(trace.of(rank, "MpiCollectiveBegin")) == len(collectives)
        sums = [event for event in collectives if op(event.collective_op) == "ALLREDUCE"]
        assert {(event.size_sent, event.size_received) for event in sums} == {(4000, 4000)}
        assert len({event.communicator.name for event in collectives}) == 1
        (broadcast,) = (event for event in collectives if op(event.collective_op) == "BCAST")
        assert broadcast.root == 1
        assert (broadcast.size_sent, broadcast.size_received) == ((4000, 0) if rank else (0, 4000))
        regions = trace.regions[rank]
        assert [regions[name] for name in ("forward", "forward pass", "render", "shade", "spill")] == [1] * 5
        assert len(trace.of(rank, "Enter")) == len(trace.of(rank, "Leave")) == sum(regions.values())


def test_sends_are_matched_with_receives(traced):
    trace = read(traced[0] / "trace")
    for rank, count in ((0, 3), (1, 4)):
        sends, receives = trace.of(rank, "MpiSend"), trace.of(1 - rank, "MpiRecv")
        assert len(sends) == len(receives) == count

        def key(event):
            (number,) = event.attributes.values()
            return (event.msg_tag, number, event.msg_length)

        assert (
            sorted(map(key, sends)) == sorted(map(key, receives)) == [(5, n, 100 + n) for n in range(count)]
        )
        assert {event.receiver for event in sends} == {1 - rank}
        assert {event.sender for event in receives} == {rank}
        assert {e.communicator.name for e in sends} == {e.communicator.name for e in receives}
        ends = {key(event): event.time for event in receives}
        assert all(event.time <= ends[key(event)] for event in sends)


def test_one_sided_operations_name_window_bytes_and_completion(traced):
    trace = read(traced[0] / "trace")
    for rank in (0, 1):
        puts, gets, atomics = (trace.of(rank, name) for name in ("RmaPut", "RmaGet", "RmaAtomic"))
        assert [(put.bytes, put.remote, put.win.name) for put in puts] == [(512, 1 - rank, "segment 3")] * 2
        assert [(get.bytes, get.remote) for get in gets] == [(64, 1 - rank)]
        assert len(atomics) == 1
        over = trace.of(rank, "RmaOpCompleteBlocking") + trace.of(rank, "RmaOpCompleteNonBlocking")
        started = [event.matching_id for event in (*puts, *gets, *atomics)]
        assert sorted(event.matching_id for event in over) == sorted(started) and len(set(started)) == 4
        notices = Counter(op(event.sync_type) for event in trace.of(rank, "RmaSync"))
        assert notices == {"NOTIFY_OUT": 2, "NOTIFY_IN": 2}


def test_times_grow_on_each_location_and_overlapping_firings_have_their_own(traced):
    trace = read(traced[0] / "trace")
    assert len(trace.times) >= 4
    for location, times in trace.times.items():
        assert times == sorted(times), location


def test_metrics_of_each_thread_are_sums_of_its_bytes_and_of_its_waiting(traced):
    trace = read(traced[0] / "trace")
    for rank in (0, 1):
        bytes_moved = 0
        for (of, location), sums in trace.metrics.items():
            if of == rank:
                for name in ("bytes", "waiting"):
                    values = [each[name] for each in sums]
                    assert values == sorted(values), (location, name)
                bytes_moved += sums[-1]["bytes"]
        messages = sum(event.msg_length for event in trace.of(rank, "MpiSend"))
        one_sided = sum(event.bytes for kind in ("RmaPut", "RmaGet") for event in trace.of(rank, kind))
        assert bytes_moved >= messages + one_sided + 7 * 4000, (rank, bytes_moved)


@pytest.mark.skipif(PRINT is None, reason="otf2-print of otf2-tools is not there")
def test_otf2_print_accepts_the_archive(traced):
    assert PRINT
    done = subprocess.run(
        [PRINT, str(traced[0] / "trace/traces.otf2")],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert len(re.findall("^MPI_SEND ", done.stdout, re.M)) == 7
    assert len(re.findall("^RMA_PUT ", done.stdout, re.M)) == 4


def test_the_profile_comes_from_the_same_recording(traced):
    for rank in (0, 1):
        events = json.loads((traced[0] / f"profile/rank-{rank}.json").read_text())["traceEvents"]
        names = Counter(
            event["name"] for event in events if event.get("cat") == "collective" and event["ph"] == "b"
        )
        assert names["allreduce"] == 7 and names["broadcast"] == 1
        assert Counter(e["name"] for e in events if e.get("cat") == "message") == {
            "send": 3 + rank,
            "receive": 4 - rank,
        }


def test_the_page_needs_nothing_but_itself(traced):
    text = (traced[0] / "page.html").read_text()
    assert "default-src 'none'" in text and not re.search(r"(?:src|href)=|https?://", text)
    data = json.loads(text.split('type="application/json">')[1].split("</script>")[0])
    assert len(data["messages"]) == 7
    assert {"rank 0: main thread", "rank 1: main thread"} <= {row["name"] for row in data["rows"]}
    assert {"allreduce", "send", "stage 1, forward pass of micro-batch 7"} <= set(data["names"])


def test_a_killed_rank_leaves_the_trace_of_the_others_and_a_sentence(tmp_path):
    folder = tmp_path / "trace"
    output = run("-n", "2", "--trace", f"otf2:{folder}", str(PROGRAMS / "traced.py"), "killed", code=137)
    assert "carme-run: Rank 1 was killed: its last events are missing in the trace." in output
    trace = read(folder)
    for rank in (0, 1):
        kinds = Counter(op(event.collective_op) for event in trace.of(rank, "MpiCollectiveEnd"))
        assert kinds["ALLREDUCE"] == 7, (rank, kinds)
    assert list(tmp_path.iterdir()) == [folder]


def test_what_has_no_room_is_counted(tmp_path):
    folder = tmp_path / "trace"
    output = run(
        "-n", "2", "--trace", f"otf2:{folder}", "--trace-limit", "256K", str(PROGRAMS / "traced.py"), "many"
    )  # fmt: skip
    dropped = {
        int(rank): int(count) for count, rank in re.findall(r"(\d+) events of rank (\d) had no room", output)
    }
    trace = read(folder)
    for rank in (0, 1):
        present = trace.regions[rank].total()
        assert 0 < present < 131072 / 48
        assert 20_000 < present + dropped[rank] < 20_200


def test_a_full_disk_ends_the_recording_and_not_the_run(tmp_path):
    folder = tmp_path / "trace"
    output = run("-n", "2", "--trace", f"otf2:{folder}", str(PROGRAMS / "traced.py"), "full")
    assert "The trace of rank 0 is not complete: File too large." in output, output
    trace = read(folder)
    assert trace.regions[1]["forward"] == 20_001
    assert trace.of(0, "MpiCollectiveEnd")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--trace", "otf3:{0}/t"], "'otf3:{0}/t' is not a trace that can be written."),
        (["--trace", "otf2:{0}/there"], "{0}/there exists, and an archive is a new folder."),
        (
            ["--trace", "otf2:/proc/none/t"],
            "The trace cannot be written to /proc/none/t: No such file or directory.",
        ),
        (["--trace", "html:{0}/there"], "{0}/there is a folder, and a page is a file."),
        (
            ["--trace", "html:{0}/p.html", "--trace-limit", "2K"],
            "--trace-limit 2K leaves 1024 bytes for each of 2",
        ),
        (["--trace", "html:{0}/p.html", "--trace-limit", "2X"], "'2X' is not a size"),
        (["--trace-limit", "2G"], "--trace-limit belongs to --trace."),
    ],
)
def test_what_cannot_be_traced_is_refused_before_anything_runs(tmp_path, options, sentence):
    (tmp_path / "there").mkdir()
    program = tmp_path / "program.py"
    program.write_text("print('it runs')")
    output = run("-n", "2", *(text.format(tmp_path) for text in options), str(program), code=2)
    assert sentence.format(tmp_path) in output and "it runs" not in output and "Traceback" not in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["program.py", "there"]


def test_an_archive_that_cannot_be_written_leaves_the_recordings_and_says_so(tmp_path, capfd):
    (tmp_path / "file").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "carme_runtime.traces.convert", str(tmp_path), "1", f"otf2:{tmp_path}/file/t"],
        capture_output=True, text=True, timeout=HANG, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "The archive could not be written" in done.stderr, done.stderr
    assert "Rank 0 left no trace" in done.stderr and "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_clocks_of_nodes_are_corrected(launcher, tmp_path):
    """Rank 1 runs on another node whose clock is a minute behind: its sleeps end at once, and never late."""
    library, hours, folder = tmp_path / "clock.so", tmp_path / "hours", tmp_path / "trace"
    source = Path(__file__).parents[1] / "simulated_clock.c"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True, timeout=HANG
    )
    hours.write_bytes((-60).to_bytes(8, "little", signed=True))
    (tmp_path / "recordings").mkdir()
    behind = {"LD_PRELOAD": str(library), "SIMULATED_HOURS": str(hours)}
    ranks = launcher.start(
        "traced",
        [0, 1],
        environment=lambda rank: {"CARME_TRACE": str(tmp_path / "recordings")} | (behind if rank else {}),
    )
    assert ranks.finish() == [0, 0], ranks.output()
    make = [sys.executable, "-m", "carme_runtime.traces.convert", str(tmp_path / "recordings"), "2"]
    subprocess.run([*make, f"otf2:{folder}"], check=True, timeout=HANG)
    trace = read(folder)
    times = {rank: [event.time for _, event in trace.events[rank]] for rank in (0, 1)}
    minute = 60 * otf2_resolution(folder)
    assert abs(min(times[1]) - min(times[0])) < minute / 2
    for rank in (0, 1):
        arrived = {next(iter(e.attributes.values())): e.time for e in trace.of(1 - rank, "MpiRecv")}
        for send in trace.of(rank, "MpiSend"):
            (number,) = send.attributes.values()
            assert send.time <= arrived[number] < send.time + minute / 2


def otf2_resolution(folder: Path) -> int:
    with otf2.reader.open(str(folder / "traces.otf2")) as trace:
        return trace.timer_resolution


@pytest.fixture
def installed(tmp_path):
    """PyTorch finds the runtime by its entry point; where only the package is there, a loader does."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def test_phases_of_training_are_seen(installed, tmp_path):
    folder = tmp_path / "trace"
    output = run(
        "-n", "2", "--trace", f"otf2:{folder}", str(PROGRAMS / "traced_training.py"), environment=installed
    )  # fmt: skip
    assert "The trace is in" in output
    trace = read(folder)
    for rank in (0, 1):
        regions = trace.regions[rank]
        assert [regions[name] for name in ("forward", "backward", "optimizer")] == [6] * 3, regions
        assert regions["DataLoader"] >= 6
        kinds = Counter(op(event.collective_op) for event in trace.of(rank, "MpiCollectiveEnd"))
        assert kinds["ALLREDUCE"] >= 6


@pytest.mark.timeout(4 * HANG)
def test_passes_of_a_pipeline_name_stage_and_micro_batch(installed, tmp_path):
    folder = tmp_path / "trace"
    program = [str(PROGRAMS / "planned.py"), "--stages"]
    run("-n", "2", "--trace", f"otf2:{folder}", *program, environment=installed)
    trace = read(folder)
    for rank in (0, 1):
        passes = [
            (event.region.name, {key.name: value for key, value in event.attributes.items()})
            for event in trace.of(rank, "Enter")
            if event.region.name in ("forward pass", "backward pass")
        ]
        expected = [(f"{each} pass", micro) for each in ("backward", "forward") for micro in (0, 1)]
        assert sorted((name, of["micro-batch"]) for name, of in passes) == expected
        assert {of["stage"] for _, of in passes} == {rank}


def test_firings_and_what_goes_to_the_disk_are_seen(tmp_path):
    folder = tmp_path / "trace"
    run("-n", "1", "--trace", f"otf2:{folder}", str(PROGRAMS / "traced_net.py"))
    trace = read(folder)
    regions = trace.regions[0]
    assert (regions["draft"], regions["finish"], regions["spill"], regions["fetch"]) == (5, 5, 1, 1), regions
    moves = [event for event in trace.of(0, "Enter") if event.region.name in ("spill", "fetch")]
    assert [next(iter(event.attributes.values())) for event in moves] == [8192, 8192]
