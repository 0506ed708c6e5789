"""`carme-run --profile`: what the summary says of the ranks' files."""

import json
from pathlib import Path

from carme_runtime import profile


def test_the_table_sums_up_what_each_rank_wrote(tmp_path: Path) -> None:
    recorder = profile.Recorder(tmp_path, 0)
    began = recorder._begin
    recorder.add(profile.WAITING, "allreduce", began)
    recorder.add(profile.COLLECTIVE, "allreduce", began, 3_000_000)
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
