"""Grafana's dashboards: each question can be asked and answered, and nothing lies on something else."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from carme_monitoring.dashboards import BOARDS, WIDTH, main, render

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
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; ./test unit fetches it")
    rules = [
        {"record": f"query:{number}", "expr": re.sub(r"\$\w+", "7", expression)}
        for number, expression in enumerate(expressions(render(uid, BOARDS[uid])))
    ]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "x", "rules": rules}]}))
    done = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout


def test_every_query_asks_for_what_is_exported(start: Starts, tmp_path: Path):
    known = exported(start, tmp_path)
    for uid, board in BOARDS.items():
        queries = [*expressions(render(uid, board)), *board.variables.values()]
        names = {name for query in queries for name in re.findall(r"\bcarme_\w+", query)}
        assert names <= known, f"{uid}: {sorted(names - known)}"


@boards
def test_panels_are_in_the_grid_and_on_top_of_no_other(uid: str):
    panels = render(uid, BOARDS[uid])["panels"]
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= WIDTH for place in places)
    for one, other in itertools.combinations(places, 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)
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


def test_files_are_written_once(tmp_path: Path):
    assert main(tmp_path) == [f"{uid}.json" for uid in BOARDS]
    assert main(tmp_path) == []
    assert json.loads((tmp_path / "carme-job.json").read_text())["title"] == "Carme: job"
