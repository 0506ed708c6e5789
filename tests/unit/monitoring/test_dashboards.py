"""Grafana's dashboards: each query can be sent and answered, and nothing lies on something else."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from pydantic import ConfigDict, TypeAdapter, ValidationError
from real_prometheus import promtool

from carme_monitoring.dashboards import BOARDS, WIDTH, main, render
from patience import HANG

from .conftest import Starts
from .metrics import exported

# Of Grafana's units and kinds of panels, those that are used.
UNITS = {"short", "percentunit", "s", "watt", "celsius", "bytes", "Bps"}
KINDS = {"timeseries", "stat"}

boards = pytest.mark.parametrize("uid", BOARDS)


def expressions(board: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


@boards
def test_every_query_is_promql(uid: str, tmp_path: Path):
    checker = promtool()
    rules = [
        {"record": f"query:{number}", "expr": re.sub(r"\$\w+", "7", expression)}
        for number, expression in enumerate(expressions(render(uid, BOARDS[uid])))
    ]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "x", "rules": rules}]}))
    done = subprocess.run([checker, "check", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout


def test_every_query_requests_what_is_exported(start: Starts, tmp_path: Path):
    known = exported(start, tmp_path)
    for uid, board in BOARDS.items():
        queries = [*expressions(render(uid, board)), *board.variables.values()]
        names = {name for query in queries for name in re.findall(r"\bcarme_\w+", query)}
        assert names <= known, f"{uid}: {sorted(names - known)}"


def values(folder: Path, expression: str, series: dict[str, str], at: str, expected: dict[str, float]) -> str:
    """What promtool says against an expression's values, by their labels; empty: these are the values.

    Args:
        series: Samples half a minute apart, in promtool's notation.
        at: The time of the values.
    """
    checker = promtool()
    samples = [{"labels": labels, "value": value} for labels, value in expected.items()]
    test = {
        "interval": "30s",
        "input_series": [{"series": name, "values": text} for name, text in series.items()],
        "promql_expr_test": [{"expr": expression, "eval_time": at, "exp_samples": samples}],
    }
    file = folder / "test.json"
    file.write_text(json.dumps({"rule_files": [], "tests": [test]}))
    done = subprocess.run(
        [checker, "test", "rules", file], capture_output=True, text=True, check=False, timeout=HANG
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def queries(uid: str, title: str) -> list[str]:
    """The expressions of a panel, with 7 for each variable."""
    (panel,) = (panel for panel in BOARDS[uid].panels if panel.title.startswith(title))
    return [re.sub(r"\$\w+", "7", expression) for expression in panel.queries]


def test_gpus_that_did_nothing_are_those_of_jobs_that_run_and_did_for_so_long(tmp_path: Path):
    """Not of one that ended within the quarter of an hour, or began in it."""
    labels = 'account="7",user="ada",node="n1",gpu="0"'
    series = {
        f'carme_job_gpu_utilization_ratio{{jobid="{job}",{labels}}}': text
        for job, text in {"1": "0x120", "2": "0x100 stale", "3": "_x100 0x20", "4": "0x100 1x20"}.items()
    }
    (expression,) = queries("carme-project", "GPUs that did nothing")
    expected = {'{jobid="1",user="ada"}': 1.0, '{jobid="4",user="ada"}': 0.0}
    assert not values(tmp_path, expression, series, "59m", expected)


def test_the_work_of_a_job_that_has_ended_is_not_shown(tmp_path: Path):
    labels = 'user="ada",node="7",mode="user"'
    series = {
        f'carme_job_cpu_seconds_total{{jobid="{job}",{labels}}}': text
        for job, text in {"1": "0+30x40", "2": "0+30x36 stale"}.items()
    }
    (expression,) = queries("carme-node", "Processors by job")
    assert not values(tmp_path, expression, series, "19m", {'{jobid="1",user="ada"}': 1.0})


def test_a_number_is_of_now_and_not_the_last_one_that_was_known():
    for uid, board in BOARDS.items():
        for panel in render(uid, board)["panels"]:
            for target in panel["targets"]:
                assert target.get("instant", False) is (panel["type"] == "stat"), (uid, panel["title"])
                assert target.get("range", True) is (panel["type"] != "stat"), (uid, panel["title"])


@boards
def test_panels_are_in_the_grid_and_on_top_of_no_other(uid: str):
    panels = render(uid, BOARDS[uid])["panels"]
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= WIDTH for place in places)
    for first, second in itertools.combinations(places, 2):
        apart = (
            first["x"] + first["w"] <= second["x"]
            or second["x"] + second["w"] <= first["x"]
            or first["y"] + first["h"] <= second["y"]
            or second["y"] + second["h"] <= first["y"]
        )
        assert apart, (first, second)
    assert len({panel["id"] for panel in panels}) == len(panels)


@boards
def test_a_board_is_what_grafana_reads(uid: str):
    board = render(uid, BOARDS[uid])
    assert board["uid"] == uid and len(uid) <= 40
    names = {variable["name"] for variable in board["templating"]["list"]}
    for panel in board["panels"]:
        assert panel["type"] in KINDS
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board["panels"])))
    assert used <= names
    assert names - {"source"} <= used


@boards
def test_a_board_fits_grafana_s_schema(uid: str):
    """By the types that Grafana makes from its schema: nothing is unknown, missing, or of another type."""
    register_default_plugins()
    board = render(uid, BOARDS[uid])
    read = Dashboard.from_json(board)
    assert read.panels and len(read.panels) == len(BOARDS[uid].panels)
    wrong = list(misfits(read, uid))
    assert not wrong, wrong
    again = json.loads(JSONEncoder().encode(read))
    for place, panel in enumerate(again["panels"]):
        for part in ("options", "fieldConfig", "targets", "gridPos", "datasource"):
            assert panel[part] == board["panels"][place][part], (place, part)
    assert again["time"] == board["time"] and again["links"][0]["tags"] == ["carme"]
    unknown = set(board) - set(again)
    assert not unknown


def test_a_board_that_does_not_fit_the_schema_is_found():
    register_default_plugins()
    board = render("carme-job", BOARDS["carme-job"])
    panel = board["panels"][0]
    panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] = "sideways"
    panel["title"] = 7
    wrong = "".join(misfits(Dashboard.from_json(board), "x"))
    assert "mode" in wrong and "title" in wrong
    panel["options"]["legnd"] = {}
    again = json.loads(JSONEncoder().encode(Dashboard.from_json(board)))
    assert again["panels"][0]["options"] != panel["options"]


def misfits(part: Any, where: str) -> Iterator[str]:
    """Values in an object of Grafana's types that do not have the declared types."""
    if isinstance(part, list):
        for place, item in enumerate(part):
            yield from misfits(item, f"{where}[{place}]")
    elif type(part).__module__.startswith("grafana_foundation_sdk.models"):
        if isinstance(part, Enum):
            return
        for name, hint in get_type_hints(type(part)).items():
            value = getattr(part, name, None)
            try:
                TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
            except ValidationError as error:
                yield f"{where}.{name}: {error}"
            yield from misfits(value, f"{where}.{name}")


def test_files_are_written_once(tmp_path: Path):
    assert main(tmp_path) == [f"{uid}.json" for uid in BOARDS]
    assert main(tmp_path) == []
    assert json.loads((tmp_path / "carme-job.json").read_text())["title"] == "Carme: job"
