"""`carme-run --profile`: what the summary says of the ranks' files."""

import json
from pathlib import Path
from typing import Any

import pytest

from carme_runtime import profile
from carme_runtime.activity import doing
from carme_runtime.pipeline import make


def test_the_table_sums_up_what_each_rank_wrote(tmp_path: Path) -> None:
    recorder = profile.Recorder(tmp_path, 0)
    began = recorder._begin
    recorder.add(profile.WAITING, "allreduce", began)
    recorder.add(profile.COLLECTIVE, "allreduce", began, 3 << 20)
    recorder.write()
    message = profile.table(tmp_path, 2).splitlines()
    assert message[2].split()[0] == "0" and message[2].split()[-2:] == ["1", "3.0"]
    assert "1   left no profile" in message[3]
    trace = json.loads((tmp_path / "rank-0.json").read_text())
    assert [event["ph"] for event in trace["traceEvents"]] == ["M", "X", "b", "e"]
    sums = trace["carme"]
    assert abs(sums["compute"] + sums["waiting"] + sums["loader"] - sums["seconds"]) < 1e-6


def test_an_earlier_run_leaves_nothing_in_the_table(tmp_path: Path) -> None:
    (tmp_path / "rank-0.json").write_text('{"carme": {}}')
    profile.forget(tmp_path, 1)
    assert "left no profile" in profile.table(tmp_path, 1)


def test_a_rank_that_cannot_write_says_so(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    profile.Recorder(tmp_path / "file" / "folder", 3).write()
    assert "The profile of rank 3 cannot be written: Not a directory." in capsys.readouterr().err


def test_the_last_whole_step_of_a_pipeline_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = profile.Recorder(tmp_path, 0)
    monkeypatch.setattr(profile, "recorder", recorder)
    for micro_batches in (1, 3, 2):  # the last batch is smaller
        with profile.pipeline_step(0, make("gpipe", 1, micro_batches)):
            for what in ("forward pass", "backward pass"):
                for micro in range(micro_batches):
                    with doing(0, what, micro):
                        pass
    with doing(0, "forward pass", 0):  # of an evaluation
        pass
    with pytest.raises(KeyError), profile.pipeline_step(0, make("gpipe", 1, 4)):
        raise KeyError  # a step that failed
    recorder.write()
    last = json.loads((tmp_path / "rank-0.json").read_text())["carme"]["pipeline"]["last"]
    assert [(name, micro) for name, micro, _, _ in last["passes"]] == [
        (f"{which} pass", micro) for which in ("forward", "backward") for micro in range(3)
    ]
    picture = tmp_path / profile.SCHEDULE
    assert f"drawn beside its schedule in {picture}." in profile.table(tmp_path, 1)
    assert "Schedule gpipe with even passes: idle at most 0.0 %" in picture.read_text()
    profile.forget(tmp_path, 1)
    assert not picture.exists()


def test_a_picture_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / profile.SCHEDULE).mkdir()
    last: dict[str, Any] = {"schedule": "gpipe", "stages": 1, "micro_batches": 1, "clock": 0.0}
    last["passes"] = [["forward pass", 0, 0.0, 1.0]]
    sums: dict[str, Any] = dict.fromkeys(("seconds", "compute", "waiting", "loader", "calls", "bytes"), 1)
    sums["pipeline"] = {"stage": 0, "idle": 0, "steps": 1, "waited": 0, "last": last}
    profile.file_of(tmp_path, 0).write_text(json.dumps({"carme": sums}))
    assert f"The schedule cannot be drawn into {tmp_path / profile.SCHEDULE}: Is a" in profile.table(
        tmp_path, 1
    )
