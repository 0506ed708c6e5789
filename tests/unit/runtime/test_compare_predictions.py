"""What is predicted of a contestant's steps stands beside what they take."""

import dataclasses
import os
import re
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from carme_runtime.compare import entries, report, results
from carme_runtime.compare.door import Door
from carme_runtime.compare.entries import Entry
from carme_runtime.compare.predictions import note_predictions
from carme_runtime.compare.results import MEASURED, Result, Row, Turn
from carme_runtime.graph import Links, Timing
from carme_runtime.scaling import Gradient, Machine, Profile, predict

TIMINGS = (Timing(16, 10.0, 20.0), Timing(32, 18.0, 38.0), Timing(64, 35.0, 75.0))
PROFILE = Profile("Sequential", "cpu", 64, TIMINGS, 2.0, (Gradient("a", 4 << 20, (0.9, 0.9, 0.9)),), 0.02)
LINKS = Links(((0, 20.0), (1 << 20, 1000.0)), "measured between nodes")
MACHINE = Machine(LINKS)


def entry(contestant: str, ranks: int, precision: str = "float32") -> Entry:
    turns = [Turn(number, 100.0 / ranks) for number in range(5)]
    return Entry(Row(contestant, contestant, "mlp", ranks, batch=64, turns=turns), 1, precision=precision)


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The entries that were probed; ranks answer as theirs do."""
    probed: list[str] = []

    def answer(self: Entry, _: float) -> dict[str, Any]:
        probed.append(self.name)
        if self.row.ranks > 1:
            return {"machine": as_json(MACHINE)}
        return {"profile": as_json(PROFILE)}

    monkeypatch.setattr(Entry, "probe", answer)
    return probed


def as_json(given: Any) -> Any:
    """A dataclass as it comes over the line: JSON has no tuples."""
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        return as_json(dataclasses.asdict(given))
    if isinstance(given, dict):
        return {name: as_json(each) for name, each in given.items()}
    return [as_json(each) for each in given] if isinstance(given, (list, tuple)) else given


def test_rows_with_several_ranks_of_who_can_be_predicted_get_a_prediction(probes: list[str]) -> None:
    several = [entry(name, ranks) for name in ("parallelize", "torch-gloo") for ranks in (1, 2, 4)]
    note_predictions(several, False, lambda _: None)
    expected = {point.ranks: point for point in predict(PROFILE, MACHINE, 4).strong}
    for each in several:
        if each.row.contestant == "parallelize" and each.row.ranks > 1:
            point = expected[each.row.ranks]
            assert each.row.predicted == {
                "ms": point.step.ms, "low": point.low, "high": point.high, "speedup": point.speedup
            }  # fmt: skip
        else:
            assert not each.row.predicted
    assert probes == ["parallelize on 1 rank", "parallelize on 2 ranks", "parallelize on 4 ranks"]


def test_weak_scaling_is_predicted_as_such(probes: list[str]) -> None:
    several = [entry("parallelize", ranks) for ranks in (1, 2)]
    note_predictions(several, True, lambda _: None)
    assert several[1].row.predicted["ms"] == predict(PROFILE, MACHINE, 2).weak[-1].step.ms
    assert len(probes) == 2


def test_nothing_is_probed_where_nothing_can_be_predicted(probes: list[str]) -> None:
    for several in (
        [entry("parallelize", 2)],
        [entry("parallelize", 1)],
        [entry("parallelize", ranks, "bf16") for ranks in (1, 2)],
        [entry("torch-gloo", ranks) for ranks in (1, 2)],
    ):
        note_predictions(several, False, lambda _: None)
        assert not any(each.row.predicted for each in several)
    assert not probes


def test_what_cannot_be_measured_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Entry, "probe", lambda *_: {"why": "A step of the model cannot be made again."})
    several, lines = [entry("parallelize", ranks) for ranks in (1, 2)], list[str]()
    note_predictions(several, False, lines.append)
    assert lines == [
        "parallelize on 1 rank: its steps cannot be predicted: A step of the model cannot be made again."
    ]
    assert not any(each.row.predicted for each in several)


def test_the_report_draws_the_prediction_beside_what_came(probes: list[str], tmp_path: Any) -> None:
    several = [entry("parallelize", ranks) for ranks in (1, 2)]
    rows = [each.row for each in several]
    result = Result("2026-01-02T03:04:05+00:00", 1, {}, {}, rows=rows)
    assert "predicted: " not in report.page(result) and "<th>predicted</th>" not in report.page(result)
    note_predictions(several, False, lambda _: None)
    found = rows[1].predicted
    cell = f"{found['ms']:.2f} ({found['low']:.2f} to {found['high']:.2f})"
    page = unescape(report.page(result))
    assert f"<td>{cell}</td>" in page and cell in report.text(result)
    assert "predicted: parallelize</text>" in page
    # Both lines have the contestant's color, and one of them is dashed.
    color = re.search(r'<circle [^>]* fill="(#\w+)"', page)
    assert color
    lines = re.findall(rf'<path d="M[^"]* L[^"]*" fill="none" stroke="{color[1]}"[^>]*>', page)
    assert [("stroke-dasharray" in line) for line in lines] == [False, True]
    results.save(result, tmp_path / "compare.json")
    assert results.load(tmp_path / "compare.json").rows[1].predicted == found
    assert len(probes) == 2


#: A worker's own loop, with a program that ends in the probe as its argument says.
PROBED = """
import os, signal, sys
from types import SimpleNamespace
from carme_runtime.compare import worker
from carme_runtime.compare.door import come_in
ends, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def end(*_):
    if ends == "killed":
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does where memory runs out
    raise ValueError("no such link")
program = SimpleNamespace(profile=end, machine=end)
work = SimpleNamespace(ranks=ranks)
steps = worker.Steps(lambda number, mark: 1.0, 0.0, set())
line = come_in("parallelize", rank)
line.send(ready=True, host="nowhere", cores=[], versions={})
probe = lambda seconds: worker.probed(program, work, seconds, ranks)
worker.serve(line, steps, probe, lambda reference: {})
"""


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("ends", "why"), [("killed", "the probe did not go on: "), ("raises", "ValueError: no such link")]
)
def test_a_probe_that_fails_leaves_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ends: str, why: str, ranks: int
) -> None:
    workers = " & ".join(f'"$0" -c "$1" {ends} {rank} {ranks}' for rank in range(ranks))
    line = ["sh", "-c", f"{workers} & wait", sys.executable, PROBED]
    monkeypatch.setattr(entries, "command", lambda *_: line)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    door, tried = Door("127.0.0.1"), entry("parallelize", ranks)
    try:
        tried.start(door, tmp_path / "none.npz", tmp_path)
        assert len(tried.make(2)) == ranks
        answer = tried.probe(0.1)
        assert answer["why"].startswith(why)
        tried.end()
    finally:
        entries.stop_all([tried])
        door.close()
    assert (tried.row.void, tried.row.status) == ("", MEASURED)
    assert tried.row.peak_bytes > 1 << 20


def test_links_that_cannot_be_measured_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(self: Entry, _: float) -> dict[str, Any]:
        return {"why": "ValueError: no such link"} if self.row.ranks > 1 else {"profile": as_json(PROFILE)}

    monkeypatch.setattr(Entry, "probe", answer)
    several, lines = [entry("parallelize", ranks) for ranks in (1, 2)], list[str]()
    note_predictions(several, False, lines.append)
    assert lines == ["parallelize on 2 ranks: its steps cannot be predicted: ValueError: no such link"]
