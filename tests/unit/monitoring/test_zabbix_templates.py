"""Zabbix' templates, without a Zabbix; tests/monitoring imports them into one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from carme_monitoring import zabbix

from .conftest import Starts
from .metrics import exported


def everything(found: Any) -> Iterator[dict[str, Any]]:
    """All objects in the export."""
    if isinstance(found, dict):
        yield found
    for inner in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
        yield from everything(inner)


def test_every_pattern_requests_what_is_exported(start: Starts, tmp_path: Path) -> None:
    patterns = {
        step["parameters"][0]
        for step in everything(zabbix.render())
        if str(step.get("type", "")).startswith("PROMETHEUS")
    }
    assert {re.split(r"[{]", pattern)[0] for pattern in patterns} <= exported(start, tmp_path)


def test_identifiers_are_unique_stay_and_are_as_zabbix_wants_them() -> None:
    first, second = (
        [item["uuid"] for item in everything(zabbix.render()) if "uuid" in item] for _ in range(2)
    )
    assert first == second
    assert len(set(first)) == len(first)
    assert all(re.fullmatch(r"[0-9a-f]{12}4[0-9a-f]{3}[89ab][0-9a-f]{15}", uuid) for uuid in first)


def figures() -> Iterator[zabbix.Figure]:
    for template in zabbix.TABLE.values():
        yield from template.figures
        for discovery in template.discoveries:
            yield from discovery.figures


def test_a_counter_that_falls_is_no_problem() -> None:
    """It falls when a GPU is reset, which is what the problem's advice is."""
    expressions = {
        figure.key.partition("[")[0]: figure.alarm.expression
        for figure in figures()
        if figure.alarm and "_total" in figure.pattern
    }
    assert expressions == {
        "carme.gpu.xid": "change({})>0",
        "carme.gpu.ecc": 'changecount({},1h,"inc")>0',
    }


def test_when_the_last_job_of_a_node_has_ended_nothing_stays_as_if_it_ran() -> None:
    """A sum of no series is no value in Zabbix, which would go on with the last one."""
    steps = {
        item["key"]: item["preprocessing"][0]
        for item in everything(zabbix.render())
        if item.get("type") == "DEPENDENT" and item["key"].startswith("carme.")
    }
    summed = {
        figure.key
        for figure in figures()
        if figure.how == "sum" and figure.pattern.startswith(("carme_job_", "carme_gpu_xid"))
    }
    assert len(summed) == 4
    for key in summed:
        assert (steps[key]["error_handler"], steps[key]["error_handler_params"]) == ("CUSTOM_VALUE", "0")
    assert steps["carme.gpu.utilization[{#UUID}]"]["error_handler"] == "DISCARD_VALUE"


def test_the_file_is_written_once(tmp_path: Path) -> None:
    file = tmp_path / "new/carme.json"
    assert zabbix.main(file) and not zabbix.main(file)
    assert json.loads(file.read_text()) == zabbix.render()
