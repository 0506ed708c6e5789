"""Clocks of processors, and heat that slows them down, by files as the kernel has them."""

import dataclasses
from pathlib import Path

import pytest

from carme_runtime.compare import checks, report
from carme_runtime.compare.clocks import megahertz, slowdowns, slowdowns_since
from carme_runtime.compare.results import Result

LISTED = """processor\t: 0
model name\t: some
cpu MHz\t\t: 2596.132

processor\t: 1
cpu MHz\t\t: 2600.000

"""


def core(folder: Path, number: int, name: str, text: str) -> None:
    file = folder / f"cpu{number}" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_the_clock_is_what_the_kernel_has_set(tmp_path: Path) -> None:
    listed = tmp_path / "cpuinfo"
    listed.write_text(LISTED)
    assert megahertz([0, 1], tmp_path, listed) == pytest.approx(2598.066), "a virtual machine lists it alone"
    assert megahertz([1], tmp_path, listed) == 2600
    for number, text in enumerate(("1800000\n", "2000000\n")):
        core(tmp_path, number, "cpufreq/scaling_cur_freq", text)
    assert megahertz([0, 1], tmp_path, listed) == 1900
    assert megahertz([7], tmp_path, listed) is None
    listed.write_text("processor : 0\n")
    assert megahertz([7], tmp_path, listed) is None and megahertz([7], tmp_path, tmp_path / "none") is None


def test_heat_disturbs_a_turn(tmp_path: Path) -> None:
    assert slowdowns([0, 1], tmp_path) is None
    for number, text in enumerate(("3\n", "4\n")):
        core(tmp_path, number, "thermal_throttle/core_throttle_count", text)
    assert slowdowns([0, 1], tmp_path) == 7 and slowdowns([1], tmp_path) == 4
    core(tmp_path, 1, "thermal_throttle/core_throttle_count", "many\n")
    assert slowdowns([0, 1], tmp_path) is None
    assert slowdowns_since(4, 7) == 3
    assert slowdowns_since(None, 7) == slowdowns_since(4, None) == 0, "not all since the machine started"
    assert checks.disturbances(0.0, (10.0, 10.0), 10.0) == ()
    assert checks.disturbances(0.0, (10.0, 10.0), 10.0, slowdowns=1) == ("heat slowed a processor down",)


def test_the_report_has_the_clocks_where_they_are_known() -> None:
    result = Result("2026-01-02T03:04:05+00:00", 7, {}, {})
    assert "MHz" not in report.page(result)
    noise = {"least_mhz": 2596.1, "most_mhz": 2600.0}
    assert "2596 to 2600 MHz" in report.page(dataclasses.replace(result, noise=noise))
