"""Predictions of a probe's result: read from its file, kept with jobs, and compared with what came."""

import argparse
import asyncio
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from scaling_results import write_result

from carme.broker.records import Record, Records
from carme.cli import main, predictions
from carme.config import Settings
from carme.config.settings import ScalingSettings
from carme.errors import InvalidRequest
from carme.jobs import JobRequest, SessionOptions
from carme.reports import Report, TrainingUse, Usage
from carme.reports.text import as_html, as_text
from carme.scaling import MOST_BYTES, VERSIONS, Curve, Prediction, check_efficiency, choices, marks, read_file
from carme.translation import follow, translated
from carme_runtime.scaling import profiles
from carme_runtime.scaling.curves import table_of

from .conftest import carme
from .test_reports import BEGIN, job


@pytest.fixture
def result(tmp_path: Path) -> Path:
    return write_result(tmp_path / "scale.json")


@pytest.fixture
def curve(result: Path) -> Curve:
    return read_file(result)


def test_the_table_is_that_of_the_model(result: Path, curve: Curve) -> None:
    profile = profiles.load(result)
    assert VERSIONS == profiles.VERSIONS
    assert (curve.model, curve.device, curve.batch) == ("Net", "one GPU", 256)
    assert [row.model_dump() for row in curve.rows] == table_of(profile)["rows"]
    single, eight, spread = curve.row(1, 1), curve.row(1, 8), curve.row(8, 1)
    assert single.speedup == pytest.approx(1) and single.ranks == 1 and single.step_ms == pytest.approx(1000)
    assert 1 < spread.speedup < eight.speedup <= 8.1, "eight GPUs of a node have no network between them"
    assert eight.low_ms <= eight.step_ms <= eight.high_ms
    assert curve.row(2, 0) == curve.row(2, 1), "a node without GPUs has one rank"
    assert max(row.ranks for row in curve.rows) <= 256


def test_results_of_both_versions_have_a_table(tmp_path: Path, curve: Curve) -> None:
    for version in VERSIONS:
        assert read_file(write_result(tmp_path / "scale.json", version=version)).rows == curve.rows


def test_choices_have_the_cheapest_and_the_fastest(curve: Curve) -> None:
    found = choices(curve, most_nodes=4, most_gpus=4, chosen=(3, 2), steps=36_000)
    assert [(choice.nodes, choice.gpus_per_node) for choice in found] == [
        (1, 1), (1, 2), (1, 4), (3, 2), (2, 4), (4, 4),
    ]  # fmt: skip
    cheapest, fastest = marks(found)
    assert (cheapest.gpus, fastest.gpus) == (1, 16)
    assert cheapest.hours == pytest.approx(10) and cheapest.cost == pytest.approx(10)
    assert fastest.hours is not None and fastest.cost == pytest.approx(16 * fastest.hours)
    (alone,) = choices(curve, most_nodes=1, most_gpus=0, chosen=(1, 0))
    assert alone.hours is None and alone.cost == pytest.approx(1)
    assert len(choices(curve, most_nodes=1024, most_gpus=16, chosen=(1, 1))) <= 8
    # What is requested is shown, also where no node has a GPU.
    (chosen,) = choices(curve, most_nodes=1, most_gpus=0, chosen=(1, 1))
    assert (chosen.nodes, chosen.gpus_per_node) == (1, 1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"{", "scale.json is not a result of a probe: it is not JSON. Name a file that a probe wrote."),
        (b"\xff\xfe", "scale.json is not a result of a probe: it is not JSON."),
        (b"[" * 100_000, "scale.json is not a result of a probe: it is not JSON."),
        (b"[]", "scale.json is not a result of a probe. Name"),
        (b'{"format": "carme graph"}', "scale.json is not a result of a probe. Name"),
        (b" " * (MOST_BYTES + 1), "scale.json is not a result of a probe: it has more than 4 MiB."),
    ],
)
def test_a_file_that_is_not_a_result_is_refused(tmp_path: Path, text: bytes, sentence: str) -> None:
    path = tmp_path / "scale.json"
    path.write_bytes(text)
    with pytest.raises(InvalidRequest) as refusal:
        read_file(path)
    assert str(refusal.value).startswith(sentence) and refusal.value.field == "scaling"
    for text_of in (refusal.value.message, refusal.value.remedy):
        assert translated(text_of, "de") != text_of


def row(**changes: Any) -> dict[str, Any]:
    values = {"nodes": 1, "ranks_per_node": 1, "step_ms": 2.0, "low_ms": 1.0, "high_ms": 3.0, "speedup": 1.0}
    return {"batch": 8, "links": "given", "rows": [values | {"efficiency": 1.0} | changes]}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"version": 1},
            "scale.json is a result of version 1, and this site reads versions 2 to 4. Measure",
        ),
        (
            {"version": 5},
            "scale.json is a result of version 5, and this site reads versions 2 to 4. Measure",
        ),
        ({"version": "x" * 99}, f"scale.json is a result of version {'x' * 20}, and"),
        ({"curve": None}, "scale.json has no predictions. Measure again with: carme-run"),
        ({"curve": {"batch": 8, "links": "given", "rows": []}}, "scale.json has no predictions."),
        ({"curve": row(step_ms=-1)}, "scale.json is damaged at rows.0.step_ms."),
        ({"curve": row(step_ms=float("nan"))}, "scale.json is damaged at rows.0.step_ms."),
        ({"curve": row(low_ms=2.5)}, "scale.json is damaged at rows.0."),
        ({"curve": row(speedup="fast")}, "scale.json is damaged at rows.0.speedup."),
        ({"curve": row(step_ms=1e13, high_ms=1e13)}, "scale.json is damaged at rows.0.step_ms."),
        ({"curve": row(high_ms=1e13)}, "scale.json is damaged at rows.0.high_ms."),
        ({"curve": row(speedup=1e9)}, "scale.json is damaged at rows.0.speedup."),
        ({"curve": row(efficiency=1e4)}, "scale.json is damaged at rows.0.efficiency."),
        ({"curve": row(limit="a\nb")}, "scale.json is damaged at rows.0.limit."),
        ({"model": 7}, "scale.json is damaged at model."),
        ({"model": "a\nb"}, "scale.json is damaged at model."),
        ({"device": "a\x1b[2J"}, "scale.json is damaged at device."),
    ],
)
def test_a_result_that_cannot_be_used_is_refused(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    path = write_result(tmp_path / "scale.json", **changes)
    with pytest.raises(InvalidRequest) as refusal:
        read_file(path)
    assert str(refusal.value).startswith(sentence)
    for text_of in (refusal.value.message, refusal.value.remedy):
        assert translated(text_of, "de") != text_of


def test_a_prediction_that_the_result_lacks_is_refused(curve: Curve) -> None:
    with pytest.raises(InvalidRequest, match="A batch of 256 cannot be shared by 512 ranks"):
        curve.prediction(64, 8)
    with pytest.raises(InvalidRequest, match="no prediction for 9 nodes with 5 ranks each"):
        curve.prediction(9, 5)
    with pytest.raises(InvalidRequest, match="0 is not a valid number of steps"):
        curve.prediction(1, 1, steps=0)


def request(prediction: Prediction | None) -> JobRequest:
    return JobRequest(name="n", kind="batch", command=["true"], minutes=5, prediction=prediction)


def test_below_the_floor_a_reason_is_needed(curve: Curve, settings: Settings) -> None:
    prediction = curve.prediction(16, 1)
    assert prediction.efficiency < 0.9
    check_efficiency(prediction, settings)  # no floor is set
    strict = settings.model_copy(update={"scaling": ScalingSettings(efficiency_percent=90)})
    with pytest.raises(InvalidRequest, match="Below 90\xa0% this site asks for a reason") as refusal:
        check_efficiency(prediction, strict)
    assert refusal.value.field == "reason"
    with pytest.raises(InvalidRequest):
        check_efficiency(prediction.model_copy(update={"reason": "  "}), strict)
    check_efficiency(curve.prediction(16, 1, reason="The deadline is tomorrow"), strict)
    check_efficiency(curve.prediction(1, 1), strict)
    check_efficiency(None, strict)


@pytest.mark.parametrize("change", [{"step_ms": 0}, {"reason": "a\nb"}, {"reason": "x" * 501}, {"more": 1}])
def test_an_invalid_prediction_is_refused(curve: Curve, change: dict[str, Any]) -> None:
    values = curve.prediction(1, 1).model_dump() | change
    with pytest.raises(InvalidRequest, match=r"prediction\." + next(iter(change))):
        JobRequest.read(request(None).model_dump() | {"prediction": values})
    with pytest.raises(InvalidRequest):
        SessionOptions.read({"image": "torch", "minutes": 5, "prediction": values})


def test_a_prediction_stays_with_its_job(curve: Curve) -> None:
    prediction = curve.prediction(2, 4, reason="it is urgent")
    records = Records()
    records.begin(
        Record(
            key="k", user="ada", kind="batch", name="train", job_id=7, submitted=BEGIN, prediction=prediction
        )
    )
    saved, _ = records.take_changes()
    again = Records()
    again.load(BEGIN - timedelta(days=1), [Record.model_validate_json(saved[0].model_dump_json())])
    assert again.known(job(key="k")).prediction == prediction
    assert again.known(job(key="other", id=8)).prediction is None


@pytest.mark.parametrize(
    ("step_seconds", "words"),
    [
        (0.5, "500 ms for a step, as predicted, inside the 80 % interval"),
        (0.65, "650 ms for a step, 30\xa0% more, outside the 80 % interval"),
        (0.49, "490 ms for a step, 2\xa0% less, inside the 80 % interval"),
        (None, "not measured: no rank reported its steps"),
    ],
)
def test_the_report_says_what_was_predicted_and_what_came(step_seconds: float | None, words: str) -> None:
    prediction = Prediction(
        file="/home/ada/scale.json", ranks=2, step_ms=500, low_ms=450, high_ms=550, speedup=1.9,
        efficiency=0.95, reason="<it is urgent>",
    )  # fmt: skip
    training = TrainingUse(ranks=2, step_seconds=step_seconds)
    report = Report(job=job(prediction=prediction), usage=Usage(seconds=60, training=training))
    text, page = as_text(report), as_html(report)
    assert "500 ms for a step (450 to 550), 1.9 times as fast as one rank, efficiency 95\xa0%" in text
    assert words in text and words in page
    assert "<it is urgent>" in text and "&lt;it is urgent&gt;" in page
    assert "Predicted" not in as_text(Report(job=job()))
    assert "extrapolated" not in text


def test_the_report_says_where_a_prediction_was_extrapolated(result: Path, curve: Curve) -> None:
    """By the row of the choice, also from the record that the broker keeps."""
    measured, beyond = curve.prediction(1, 1), curve.prediction(4, 1)
    assert not measured.extrapolated and beyond.extrapolated
    again = Prediction.model_validate_json(beyond.model_dump_json())
    report = Report(job=job(prediction=again), usage=Usage(seconds=60))
    label = f"efficiency {beyond.efficiency * 100:.0f}\xa0%, extrapolated beyond what was measured"
    assert label in as_text(report) and label in as_html(report)
    follow(lambda: "de")
    try:
        assert ", über das Gemessene hinaus extrapoliert" in as_text(report)
    finally:
        follow(lambda: None)
    assert "extrapolated" not in as_text(Report(job=job(prediction=measured)))
    # Records of before know nothing of it.
    values = beyond.model_dump(exclude={"extrapolated"})
    assert not Prediction.model_validate(values).extrapolated


async def test_submit_keeps_and_shows_a_prediction(
    site: Any, file: Path, result: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["submit", "--gpus", "2", "--scaling", str(result), "--steps", "36000"]
    assert await carme(*arguments, "--", "true") == 0
    output = capsys.readouterr()
    assert "carme: Predicted: 1 node, 2 GPUs: 2.0 times as fast as one, 5.0" in output.err
    assert output.err.count(" (beyond what was measured).\n") == 1
    assert "Job 100 is in the queue" in output.out
    found = (await site.client.job(100)).prediction
    assert found is not None and found.ranks == 2 and found.steps == 36_000 and found.file == str(result)
    entry = site.audit()[-1]
    assert entry["prediction"]["efficiency"] == found.efficiency
    recipe = await site.client.recipe(100)
    assert recipe.request.prediction == found


async def test_submit_below_the_floor_needs_a_reason(
    site: Any, file: Path, result: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site.settings.__dict__["scaling"] = ScalingSettings(efficiency_percent=100)
    arguments = ["submit", "--nodes", "2", "--scaling", str(result)]
    try:
        assert await carme(*arguments, "--", "true") == 1
        assert "Below 100\xa0% this site asks for a reason. Choose fewer" in capsys.readouterr().err
        assert await carme(*arguments, "--reason", "A deadline", "--", "true") == 0
        found = (await site.client.job(100)).prediction
        assert found is not None and found.reason == "A deadline"
        assert site.audit()[-1]["prediction"]["reason"] == "A deadline"
    finally:
        site.settings.__dict__["scaling"] = ScalingSettings()


async def test_choices_are_shown_and_nothing_is_started(
    site: Any, file: Path, result: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["submit", "--gpus", "2", "--scaling", str(result), "--choices"]
    assert await carme(*arguments, "--steps", "36000") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "CHOICE" and "EXPECTED START" in lines[0] and "GPU-HOURS" in lines[0]
    assert any("1 node, 1 GPU " in line and "cheapest" in line and "10" in line for line in lines)
    assert any("1 node, 2 GPUs* " in line and "chosen" in line for line in lines)
    assert lines[-1] == "* Beyond what was measured.", "as copies between two GPUs are"
    assert sum("fastest" in line for line in lines) == 1
    assert await carme(*arguments, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [choice["cheapest"] for choice in found].count(True) == 1 and found[0]["hours"] is None
    assert site.slurm.jobs == []


async def test_a_choice_that_slurm_refuses_does_not_hide_the_others(
    site: Any, file: Path, result: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (site.slurm.state / "most-nodes").write_text("1")
    arguments = ["submit", "--nodes", "2", "--gpus", "2", "--cpus", "3", "--memory", "100"]
    assert await carme(*arguments, "--scaling", str(result), "--choices", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    starts = {(choice["nodes"], choice["gpus_per_node"]): choice["expected_start"] for choice in found}
    assert starts[2, 2] == "not possible" != starts[1, 2]
    marked = [choice["expected_start"] for choice in found if choice["cheapest"] or choice["fastest"]]
    assert marked and "not possible" not in marked, "nobody is sent to what cannot start"
    capsys.readouterr()
    huge = [*arguments[:-1], "100000000", "--scaling", str(result), "--choices", "--json"]
    assert await carme(*huge) == 0
    found = json.loads(capsys.readouterr().out)
    assert {choice["expected_start"] for choice in found} == {"not possible"}
    assert not any(choice["cheapest"] or choice["fastest"] for choice in found)
    # Slurm is queried for the processors and the memory that the job would have.
    calls = site.slurm.calls("sbatch")
    assert calls and all({"--cpus-per-task=3", "--mem=100M"} <= set(call["arguments"]) for call in calls)
    assert site.slurm.jobs == []


def test_what_cannot_start_leaves_room_for_what_can(
    result: Path, curve: Curve, capsys: pytest.CaptureFixture[str]
) -> None:
    """The result has more choices than a table shows, and an account may have no more than eight nodes."""
    assert (8, 16) not in [
        (choice.nodes, choice.gpus_per_node) for choice in choices(curve, 1024, 16, (1, 1))
    ]
    options = argparse.Namespace(scaling=result, nodes=1, gpus=1, steps=None, reason="", json=True)
    requested: list[tuple[int, int]] = []

    def start(nodes: int, gpus: int) -> str:
        requested.append((nodes, gpus))
        return "now" if nodes <= 8 else predictions.NOT_POSSIBLE

    assert predictions.show(options, start) == 0
    found = {
        (choice["nodes"], choice["gpus_per_node"]): choice for choice in json.loads(capsys.readouterr().out)
    }
    assert found[8, 16]["fastest"] and found[8, 16]["expected_start"] == "now"
    assert len(requested) == len(set(requested)), "Slurm is asked for a choice once"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--scaling", "gone.json"], "gone.json cannot be read (No such file or directory). Name a file"),
        (["--steps", "5"], "--steps belongs to --scaling. Add --scaling RESULT.json."),
        (["--reason", "x"], "--reason belongs to --scaling."),
        (["--choices"], "--choices needs the result of a probe."),
    ],
)
async def test_scaling_options_without_a_result_are_refused(
    site: Any, file: Path, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await asyncio.to_thread(main, ["submit", *arguments, "--", "true"]) == 1
    assert sentence in capsys.readouterr().err
    assert site.slurm.jobs == []
