"""The comparison of frameworks: figures, what is void, what is marked, reports and bad input."""

import dataclasses
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import simulated_gpus

from carme_runtime.compare import (
    checks,
    command,
    differences,
    drawings,
    energy,
    entries,
    figures,
    report,
    results,
    verdict,
)
from carme_runtime.compare.contestants import CONTESTANTS
from carme_runtime.compare.machine import busy_seconds, probe
from carme_runtime.compare.results import DISTURBED, MEASURED, VOID, Result, Row, Turn
from carme_runtime.compare.tasks import BATCHES
from carme_runtime.errors import CarmeRuntimeError
from patience import HANG

ROUNDS = 20
ROOT = Path(__file__).resolve().parents[3]
OUTSIDE = re.compile(
    r"""(?:src|url)\s*[=(]|href\s*=(?!"#)|https?://(?!www\.w3\.org/2000/svg)|<script|@import"""
)


def timings(times: float, seed: int, noise: float = 0.05) -> dict[int, float]:
    """Milliseconds by round: the machine's speed changes with rounds, and they vary a little."""
    machine, own = random.Random(0), random.Random(seed)
    return {number: 100 * times * machine.uniform(0.8, 1.3) * own.gauss(1, noise) for number in range(ROUNDS)}


def row(contestant: str, network: str, ranks: int, times: float, **changes: Any) -> Row:
    turns = [Turn(number, ms) for number, ms in timings(times, seed=hash((ranks, times)) % 1000).items()]
    base = Row(contestant, CONTESTANTS[contestant].title, network, ranks, batch=64, turns=turns)
    base.parts_ms = {"forward": 20 * times, "optimizer": 5 * times}
    base.versions, base.user_lines, base.peak_bytes = {"torch": "2.0"}, 12, 300 << 20
    return dataclasses.replace(base, **changes)


@pytest.fixture
def result() -> Result:
    rows = [
        row("torch-gloo", "mlp", 1, 1.0),
        row("torch-gloo", "mlp", 2, 0.7),
        row("parallelize", "mlp", 1, 1.0),
        row("parallelize", "mlp", 2, 0.55),
        row("jax", "mlp", 1, 0, turns=[], void="not installed: jax"),
        row("jax", "mlp", 2, 0, turns=[], void="not installed: jax"),
        row("horovod", "mlp", 2, 0, turns=[], void="unequal work: the loss of its first step is <wrong>"),
    ]
    noise = {"turns": 80, "disturbed_turns": 3, "probe_spread": 0.012}
    about = {"host": "n1", "processor": "A & B", "cores": 2, "threads": 1}
    return Result("2026-01-02T03:04:05+00:00", 7, about, {"rounds": ROUNDS}, "digits", noise, rows)


# Figures


def test_a_contestant_that_is_slower_by_a_tenth_is_found() -> None:
    found = figures.ratio(timings(1.1, seed=1), timings(1.0, seed=2))
    assert found is not None and figures.is_different(found)
    assert 1.06 < found.median < 1.14
    same = figures.ratio(timings(1.0, seed=1), timings(1.0, seed=2))
    assert same is not None and not figures.is_different(same)
    # The rounds' own differences would hide it.
    spread = figures.spread(list(timings(1.0, seed=1).values()))
    assert spread > 0.15


@pytest.mark.parametrize("shape", [0.05, 1.0])
@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7, 8, 10, 15, 25])
def test_an_interval_holds_the_true_median_about_as_often_as_it_says(count: int, shape: float) -> None:
    """Of few values as of many; a lopsided distribution is no excuse."""
    generator, held, both = random.Random(3), 0, 0
    for _ in range(1000):
        first, second = ([math.exp(generator.gauss(1, shape)) for _ in range(count)] for _ in range(2))
        found, changed = figures.estimate(first), figures.change(first, second)
        assert found.low <= found.median <= found.high and changed.low <= changed.median <= changed.high
        held += found.low <= math.e <= found.high
        both += changed.low <= 1 <= changed.high
    # All of five values hold it 938 times, and a thousand tries differ by 7 as a rule.
    assert 915 <= held <= 975
    assert both >= 940


def test_a_single_value_has_no_interval() -> None:
    assert figures.estimate([4.0]) == figures.Estimate(4.0, 4.0, 4.0, has_interval=False)


def test_rounds_that_only_one_has_do_not_count() -> None:
    assert figures.ratio({1: 4.0, 2: 100.0}, {1: 2.0, 3: 1.0}) == figures.Estimate(
        2.0, 2.0, 2.0, has_interval=False
    )
    assert figures.ratio({1: 4.0}, {2: 4.0}) is None


# Equal work


def losses(contestant: str, *values: float) -> Row:
    return Row(contestant, contestant, "mlp", 2, losses=list(values))


def test_unequal_work_is_void_and_says_why() -> None:
    rows = [
        losses("a", 2.30260, 2.25, 2.2),
        losses("b", 2.30261, 2.25002, 2.20001),
        losses("first", 2.3050, 2.25, 2.2),
        losses("gradient", 2.3026, 2.2510, 2.2),
        losses("nothing", float("nan"), 2.25, 2.2),
    ]
    checks.void_unequal(rows, 2.3026)
    assert [bool(each.void) for each in rows] == [False, False, True, True, True]
    assert "first step is 2.305000, and with these weights it is 2.302600" in rows[2].void
    assert "step 2 is 2.251000, and that of most is 2.25" in rows[3].void


def test_the_first_loss_decides_where_most_are_wrong() -> None:
    rows = [losses("right", 1.0, 0.9), losses("wrong", 1.5, 1.2), losses("wrong too", 1.5, 1.2)]
    checks.void_unequal(rows, 1.0)
    assert [each.contestant for each in rows if not each.void] == ["right"]


def test_wrong_gradients_do_not_decide_what_later_losses_are_usual() -> None:
    wrong, right = losses("wrong", 1.0, 1.2), losses("right", 1.0, 0.9)
    for row, distance in ((wrong, 2.0), (right, 0.0)):  # of the first one the sign is wrong
        row.gradients = {"d1.kernel": {"norm": 1.0, "expected": 1.0, "distance": distance, "rounding": 0.0}}
    checks.void_unequal([wrong, right], 1.0)
    assert "the gradient of d1.kernel in its first step" in wrong.void and not right.void


def test_bf16_may_round_more() -> None:
    def rows() -> list[Row]:
        return [losses("a", 2.3026, 2.25), losses("b", 2.3100, 2.26), losses("wrong", 2.3026, 2.40)]

    strict, rounded = rows(), rows()
    checks.void_unequal(strict, 2.3026)
    checks.void_unequal(rounded, 2.3026, "bf16")
    assert [bool(each.void) for each in strict] == [False, True, True]
    assert [bool(each.void) for each in rounded] == [False, False, True]


def test_the_precision_reaches_the_ranks_and_the_report(result: Result) -> None:
    plan = command.plan_of(command.parser().parse_args(["--precision", "bf16", "torch-gloo"]))
    assert plan.precision == "bf16"
    assert entries.environment("torch-gloo", 1, 0.0, "bf16")["CARME_COMPARE_PRECISION"] == "bf16"
    assert "in float32." in report.page(result), "of results that do not say so"
    result.environment["precision"] = "bf16"
    page = report.page(result)
    assert "in bf16." in page and "agree to 0.02" in page
    with pytest.raises(SystemExit):
        command.parser().parse_args(["--precision", "int8"])


def test_the_time_to_half_the_loss_is_that_of_its_steps(result: Result, tmp_path: Path) -> None:
    def descent(steps: int) -> list[float]:
        return [4 * 0.95**number for number in range(steps)]

    reached = checks.steps_to_half(descent(100))
    assert reached is not None
    assert sum(descent(reached)[-BATCHES:]) / BATCHES <= 2 < sum(descent(reached - 1)[-BATCHES:]) / BATCHES
    assert checks.steps_to_half(descent(reached)) == reached
    assert checks.steps_to_half(descent(reached - 1)) is None
    # One batch that is easy does not do, nor does a training that has lost its way.
    assert checks.steps_to_half([4.0, 0.1, *[4.0] * 20]) is None
    assert checks.steps_to_half([4.0, *[float("nan")] * 20]) is None
    assert checks.steps_to_half([]) is None

    result.rows[0].half_loss_steps = 250
    seconds = 250 * result.rows[0].step.median / 1000
    assert (
        result.rows[0].half_loss_s == result.rows[0].step.times(0.25) and result.rows[1].half_loss_s is None
    )
    assert f"<td>{seconds:.3g}</td>" in report.page(result) and "s to half the loss" in report.text(result)
    found = results.as_dict(result)["rows"]
    assert found[0]["half_loss_s"]["median"] == pytest.approx(seconds) and found[1]["half_loss_s"] is None
    results.save(result, tmp_path / "compare.json")
    assert results.load(tmp_path / "compare.json").rows[0].half_loss_steps == 250


def test_json_has_what_deep500_has_a_metric_for_under_its_name(result: Result) -> None:
    first, *_, void = results.as_dict(result)["rows"]
    step = {"WallclockTime": pytest.approx(result.rows[0].step.median / 1000)}
    assert first["deep500"] == step
    assert "deep500" not in void
    alike = {"norm": 2.0, "expected": 2.0, "rounding": 0.0}
    result.rows[0].gradients = {"first": alike | {"distance": 3e-6}, "second": alike | {"distance": 0.0}}
    assert results.as_dict(result)["rows"][0]["deep500"] == step | {"L2Error": [3e-6, 0.0]}


# Energy


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that simulated GPUs of NVIDIA show."""
    if shutil.which("gcc") is None:
        pytest.skip("The simulated driver library needs gcc.")
    shown = tmp_path / "gpus"
    monkeypatch.setenv("SIMULATED_NVML", str(shown))
    monkeypatch.setattr(energy, "_NVML", str(simulated_gpus.build(tmp_path)))
    energy._nvml.cache_clear()
    yield shown
    energy._nvml.cache_clear()


def test_energy_is_what_all_gpus_drew(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "_processors", lambda: None)
    library.write_text("gpu uuid=a energy=100\ngpu uuid=b energy=50.5\n")
    before = energy.energy()
    assert before == {"gpus": 150.5}
    library.write_text("gpu uuid=a energy=130\ngpu uuid=b energy=60.5\n")
    assert energy.drawn(before, energy.energy(), 8) == {"gpus": 5.0}
    library.write_text("gpu uuid=a energy=130\ngpu uuid=b lost=1\n")
    assert energy.energy() == {}, "of one GPU nobody knows"
    assert energy.drawn(before, {}, 8) == {}
    assert energy.drawn({"gpus": 9.0}, {"gpus": 1.0}, 8) == {}, "the counter has begun anew"


@pytest.mark.parametrize("text", ["fail=9\n", ""])
def test_without_gpus_there_is_no_energy_of_them(library: Path, text: str) -> None:
    library.write_text(text)
    assert "gpus" not in energy.energy()


def test_without_nvml_there_is_no_energy_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "_NVML", "libno-such-library.so.1")
    energy._nvml.cache_clear()
    assert "gpus" not in energy.energy()
    energy._nvml.cache_clear()


def test_energy_of_processors_is_that_of_their_packages(tmp_path: Path) -> None:
    assert energy._processors(tmp_path) is None
    for zone, name, microjoules in (
        ("intel-rapl:0", "package-0", "2500000"),
        ("intel-rapl:1", "package-1", "1500000"),
        ("intel-rapl:0:0", "core", "7"),
        ("intel-rapl:2", "psys", "9000000"),  # of the whole platform, packages included
    ):
        (tmp_path / zone).mkdir()
        (tmp_path / zone / "name").write_text(name + "\n")
        (tmp_path / zone / "energy_uj").write_text(microjoules + "\n")
    assert energy._processors(tmp_path) == 4.0
    (tmp_path / "intel-rapl:1/energy_uj").write_text("no number")
    assert energy._processors(tmp_path) is None


def test_the_energy_of_a_step_is_in_the_report_and_in_json(result: Result, tmp_path: Path) -> None:
    result.rows[0].step_joules = {"gpus": 2.0, "processors": 0.5}
    found = results.as_dict(result)["rows"]
    assert found[0]["joules"] == 2.5 and found[1]["joules"] is None
    assert "<td>2.5</td>" in report.page(result)
    results.save(result, tmp_path / "compare.json")
    assert results.load(tmp_path / "compare.json").rows[0].joules == 2.5


# Disturbed turns


def test_disturbed_turns_are_marked() -> None:
    usual = checks.usual_probe([10.0, 10.1, 10.2, 10.1, 14.0, 10.0])
    assert checks.disturbances(0.02, (10.1, 10.3), usual) == ()
    assert checks.disturbances(None, (10.1, 10.3), usual) == ()
    assert checks.disturbances(0.4, (10.1, 10.3), usual) == ("other processes had 40 % of its cores",)
    (reason,) = checks.disturbances(0.0, (10.1, 14.0), usual)
    assert re.fullmatch(r"the probe took (39|40) % longer than usual", reason)


def test_disturbed_turns_do_not_move_the_median() -> None:
    quiet = row("parallelize", "mlp", 2, 1.0)
    extra = [Turn(number, 900.0, ("a neighbour",)) for number in range(6)]
    busy = dataclasses.replace(quiet, turns=[*quiet.turns, *extra])
    assert (busy.status, busy.step) == (MEASURED, quiet.step)
    few = dataclasses.replace(quiet, turns=[*quiet.turns[:2], *extra])
    assert few.status == DISTURBED and few.step.median == 900
    assert dataclasses.replace(quiet, turns=[]).status == VOID


def test_work_beside_is_seen() -> None:
    """Of one core: a process that computes there is in its busy time."""
    core = min(os.sched_getaffinity(0))
    before = busy_seconds([core])
    if before is None:
        pytest.skip("the kernel does not say how busy cores are")
    program = f"import os; os.sched_setaffinity(0, [{core}])\nwhile sum(os.times()[:2]) < 0.5: pass"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=HANG)
    after = busy_seconds([core])
    assert after is not None and after - before >= 0.4
    assert busy_seconds([100_000]) is None
    assert probe([core]) > 0


# Reports


def test_the_report_names_all_and_needs_no_other_file(result: Result) -> None:
    page = report.page(result)
    for title in {each.title for each in result.rows}:
        assert title in page
    assert "not installed: jax" in page and page.count("not installed: jax") == 1
    assert "&lt;wrong&gt;" in page and "<wrong>" not in page
    assert (
        "2026-01-02 03:04:05 UTC" in page
        and "A &amp; B" in page
        and "option rounds" in page
        and "version of torch" in page
    )
    assert page.count("<svg") == 3 and "ideal" in page  # bars of two numbers of ranks, and the curves
    assert not OUTSIDE.search(page)
    assert page.startswith("<!doctype html>") and page.count("<table>") == page.count("</table>")
    # Who cannot see pictures hears what they are of, and links lead to headings that are there.
    assert page.count("<svg") == page.count('role="img" aria-label="')
    places = re.findall(r'href="#([^"]+)"', page)
    assert len(places) == len(set(places)) == 5 and all(f'<h2 id="{place}">' in page for place in places)


def cut_off(picture: str, letter: float = 7.5) -> list[str]:
    """The texts of a picture that do not lie within it, if a letter is as wide as in DejaVu Sans."""
    found = re.search(r'viewBox="(\S+) \S+ (\S+) ', picture)
    assert found
    begin = float(found[1])
    end = begin + float(found[2])
    cut = []
    for x, rest, text in re.findall(r'<text x="([\d.-]+)"([^>]*)>([^<]*)</text>', picture):
        long = letter * len(unescape(text))
        left = float(x) - long * (0.5 if '"middle"' in rest else 1 if '"end"' in rest else 0)
        if left < begin or left + long > end:
            cut.append(text)
    return cut


def test_no_name_is_cut_at_a_pictures_edge(result: Result) -> None:
    name = "Keras on TensorFlow & PyTorch, carme_runtime.keras"
    several = [dataclasses.replace(each, title=name) for each in result.rows]
    pictures = re.findall(r"<svg.*?</svg>", report.page(dataclasses.replace(result, rows=several)), re.DOTALL)
    assert len(pictures) == 3 and all(name.replace("&", "&amp;") in picture for picture in pictures)
    assert [cut_off(picture) for picture in pictures] == [[]] * 3
    wide = drawings.bars([("short", "red", figures.Estimate(123456.78, 123456.0, 123457.0))], "ms", "time")
    assert cut_off(wide) == []


def test_the_picture_in_the_documentation_is_that_of_the_recorded_run() -> None:
    folder = ROOT / "docs/benchmarks"
    recorded = results.load(folder / "compare-demo.json")
    assert (folder / "compare-demo.html").read_text() == report.page(recorded)
    shown = (ROOT / "docs/pictures/compare-steps.svg").read_text()
    for each in verdict.standings(recorded, recorded.networks()[-1], max(recorded.ranks())):
        assert each.row.title in shown and f"{each.row.step.median:.2f} ms" in shown
    assert cut_off(shown) == []


def test_the_report_lists_options_as_they_are_typed(result: Result) -> None:
    result.options |= {"networks": ["mlp", "tiny"], "slower": {}}
    page = report.page(result)
    assert "mlp, tiny" in page and "[&#x27;mlp" not in page and "option slower" not in page


def test_the_verdict_is_three_sentences(result: Result) -> None:
    fastest, scaling, trust = verdict.sentences(result)
    named = r"With MLP of three layers on 2 ranks, PyTorch \(parallelize\) is fastest"
    assert re.fullmatch(named + r"; PyTorch DDP \(Gloo\) needs 1\.[23]\d times its time\.", fastest)
    begin = "On 2 ranks, PyTorch (parallelize) with MLP of three layers gains most, 1.77 times the speed"
    assert scaling.startswith(begin) and "2 times would be ideal" in scaling
    counts = "Of 7 rows 4 are measured, 0 disturbed, 0 uncertain and 3 void; 3 of 80 turns were disturbed"
    assert trust.startswith(counts)
    alone = dataclasses.replace(result, rows=result.rows[:1])
    assert "alone was measured on 1 rank" in verdict.sentences(alone)[0]
    assert "was not measured" in verdict.sentences(alone)[1]
    assert verdict.sentences(dataclasses.replace(result, rows=[]))[0].startswith("Nothing was measured")


def test_the_verdict_names_all_that_it_judges(result: Result) -> None:
    """Over several networks, with those that are as fast, and the span of those that are not."""
    result.rows += [row("torch-carme", "mlp", 2, 0.8), row("horovod-face", "mlp", 2, 0.5501)]
    medians = (("torch-gloo", 1.4), ("torch-carme", 1.6), ("horovod-face", 1.1001), ("parallelize", 1.1))
    result.rows += [row(name, "tiny", 2, times) for name, times in medians]
    places = verdict.overall(result)
    titles = [place.title for place in places]
    assert sorted(titles[:2]) == ["PyTorch (carme_runtime.horovod)", "PyTorch (parallelize)"]
    assert titles[2:] == ["PyTorch DDP (Gloo)", "PyTorch DDP (backend carme)"]
    assert places[0].behind == 1 and places[2].behind == pytest.approx(1.27, abs=0.04)
    fastest = verdict.sentences(result)[0]
    begin = f"Over all networks on 2 ranks, {titles[0]} is fastest; {titles[1]} is not measurably slower; "
    assert fastest.startswith(begin)
    assert f"{places[2].behind:.2f} to {places[3].behind:.2f} times its time, {titles[3]} most." in fastest
    page = report.page(result)
    assert "Time of a step over all networks on 2 ranks" in page
    assert all(f"{place.behind:.2f} times</text>" in page for place in places)
    # Anyone who lacks a network is not judged over all.
    result.rows = [each for each in result.rows if (each.contestant, each.network) != ("torch-carme", "tiny")]
    assert titles[3] not in [place.title for place in verdict.overall(result)]


def test_contestants_that_cannot_be_distinguished_are_level(result: Result) -> None:
    result.rows += [row("torch-carme", "mlp", 2, 0.5501)]
    assert "is not measurably slower" in verdict.sentences(result)[0]
    assert "level)" in report.text(result)


def test_equal_contestants_are_seldom_called_different_after_three_rounds() -> None:
    """Of two equal ones, one is the faster in all of three rounds every fourth time."""
    generator, apart = random.Random(5), 0
    for _ in range(400):
        left, right = ({number: generator.gauss(10, 1) for number in range(3)} for _ in range(2))
        found = figures.ratio(left, right)
        assert found is not None
        apart += figures.is_different(found)
    assert apart <= 40


def test_most_rows_that_are_uncertain_make_a_rough_machine(result: Result) -> None:
    assert "rough" not in verdict.sentences(result)[2]
    for each in result.rows[1:4]:
        each.limit_percent = 1e-6
    trust = verdict.sentences(result)[2]
    assert "1 are measured, 0 disturbed, 3 uncertain" in trust and trust.endswith("take figures as rough.")


def test_nodes_that_others_use_too_are_named(result: Result) -> None:
    assert "others may work" not in verdict.sentences(result)[2]
    result.environment["allocation"] = "shares its nodes: 4 of 16 cores"
    assert verdict.sentences(result)[2].endswith("; others may work on its nodes at the same time.")
    assert "<td class=text>shares its nodes: 4 of 16 cores</td>" in report.page(result)
    result.environment["allocation"] = "alone on its nodes"
    assert "others may work" not in verdict.sentences(result)[2]


def test_uncertain_rows_say_how_many_rounds_they_need(result: Result) -> None:
    assert verdict.rounds_needed(result) is None and "rounds would" not in verdict.sentences(result)[2]
    first = result.rows[0]
    assert first.step.percent is not None
    first.limit_percent = first.step.percent / 2  # half as wide takes four times as many
    needed = verdict.rounds_needed(result)
    # Half of them are the further rounds that such rows get.
    assert needed is not None and 2 * ROUNDS <= needed <= 2 * ROUNDS + 1
    assert f"(about --rounds {needed} would make most certain)" in verdict.sentences(result)[2]
    first.limit_percent = first.step.percent / 20
    needed = verdict.rounds_needed(result)
    assert needed is not None and needed > results.MOST_ROUNDS
    trust = verdict.sentences(result)[2]
    assert "(not even --rounds 1000 would make most certain: find a quieter machine)" in trust
    assert str(needed) not in trust


def test_a_noisy_machine_is_named_in_the_verdict_and_at_its_rows(result: Result) -> None:
    assert "not quiet" not in report.page(result)
    result.noise |= {"turns": 80, "disturbed_turns": 41}
    first = result.rows[0]
    first.turns = [dataclasses.replace(turn, reasons=("a neighbour",)) for turn in first.turns]
    trust = verdict.sentences(result)[2]
    assert "3 are measured, 1 disturbed, 0 uncertain and 3 void; 41 of 80 turns were disturbed" in trust
    assert trust.endswith("the machine was not quiet, take figures as rough.")
    assert trust in report.text(result) and trust in unescape(report.page(result))
    assert "<td>disturbed</td>" in report.page(result) and "a neighbour" in report.page(result)
    found = results.as_dict(result)
    assert [each["status"] for each in found["rows"]][:2] == [DISTURBED, MEASURED]


def test_columns_without_a_figure_are_left_out(result: Result) -> None:
    assert "s to half the loss" not in report.page(result) and "J a step</th>" not in report.page(result)
    result.rows[0].half_loss_steps, result.rows[1].step_joules = 250, {"gpus": 2.0}
    page = report.page(result)
    assert page.count("<th>s to half the loss</th>") == 1 and page.count("<th>J a step</th>") == 1
    assert "s to half the loss" in report.text(result)


def test_one_round_gives_no_interval(result: Result) -> None:
    for each in result.rows:
        each.turns = each.turns[:1]
    fastest, _, trust = verdict.sentences(result)
    assert "PyTorch (parallelize) is fastest; PyTorch DDP (Gloo) is not measurably slower." in fastest
    assert "one round gives no spread, so no difference is certain (give more with --rounds)" in trust
    assert "known to" not in trust
    assert "1.33 (unknown, level)" in report.text(result)
    assert "faster" not in (shown := differences.difference(result, result)) and "slower" not in shown


def test_a_result_survives_its_file(result: Result, tmp_path: Path) -> None:
    results.save(result, tmp_path / "compare.json")
    found = results.load(tmp_path / "compare.json")
    assert found == result
    shown = json.loads((tmp_path / "compare.json").read_text())
    assert shown["version"] == 1 and shown["rows"][0]["status"] == MEASURED
    assert shown["rows"][0]["samples_per_s"]["median"] == pytest.approx(result.rows[0].rate.median)
    assert [path.name for path in tmp_path.iterdir()] == ["compare.json"]


def test_nothing_half_written_stays_behind(result: Result, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(CarmeRuntimeError, match=r"taken cannot be written \(Is a directory\)"):
        results.save(result, tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_the_differences_of_two_results_are_shown(result: Result) -> None:
    after = dataclasses.replace(
        result,
        environment={**result.environment, "host": "n2"},
        rows=[row("torch-gloo", "mlp", 1, 1.0), row("parallelize", "mlp", 2, 0.7), result.rows[4]],
    )
    text = differences.difference(result, after)
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    assert lines["torch-gloo"].endswith("level") and lines["parallelize"].endswith("slower")
    assert "host: n1 -> n2" in text and "only before: parallelize with mlp on 1" in text
    with pytest.raises(CarmeRuntimeError, match="share no row with figures"):
        differences.difference(result, dataclasses.replace(result, rows=[]))


# Bad input


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["pytorch"], "There is no contestant 'pytorch'. Choose from torch-gloo, "),
        (["--networks", "mlp,vgg"], "There is no network 'vgg'. Choose from mlp, "),
        (["--ranks", "1,two"], "--ranks 1,two cannot be read."),
        (["--ranks", "0"], "--ranks 0 cannot be read."),
        (["--rounds", "0"], "--rounds 0 is not possible. Give 1 to 1000."),
        (["--seed", "-1"], "--seed -1 is not possible."),
        (["--networks", ""], "There is no network ''. Choose from mlp, "),
        (["--data", "cats"], "There is no data set 'cats'. Choose from digits, faces, imagenet."),
        (["--size", "0"], "--size 0 is not possible. Give 1 to 1024."),
        (["--width", "0"], "--width 0 is not possible. Give more than 0 and up to 8."),
        (["--width", "nan"], "--width nan is not possible."),
        (
            ["--networks", "mlp,resnet50", "--size", "48"],
            "The network 'resnet50' takes no images with a side of 48 pixels. Use --size with a",
        ),
        (["--slower", "jax"], "--slower jax cannot be read."),
        (["--slower", "jax=-5"], "--slower jax=-5 cannot be read."),
        (["--ranks", "3", "--batch", "32"], "A batch of 32 cannot be shared by 3 ranks."),
        (["--diff", "none.json", "none.json"], "none.json cannot be read (No such file or directory)."),
    ],
)
def test_an_error_is_one_sentence(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(arguments) == 1
    found = capsys.readouterr()
    assert f"carme_runtime.compare: {sentence}" in found.err and not found.out
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def with_step(milliseconds: str) -> str:
    about = '"created": "", "seed": 1, "environment": {}, "options": {}'
    row = '"contestant": "jax", "title": "JAX", "network": "mlp", "ranks": 1'
    turn = f'{{"round": 1, "ms": {milliseconds}, "reasons": []}}'
    return f'{{"version": 1, {about}, "rows": [{{{row}, "turns": [{turn}]}}]}}'


def test_a_file_with_a_turn_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "some.json").write_text(with_step("2.5"))
    assert results.load(tmp_path / "some.json").rows[0].step.median == 2.5


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("no JSON", "is not a result of carme compare"),
        ("[]", "is not a result of carme compare"),
        ('{"rows": []}', "is not a result of carme compare"),
        ('{"version": 1, "rows": [{}]}', "is not a result of carme compare"),
        (with_step("0"), "is not a result of carme compare"),
        (with_step('"fast"'), "is not a result of carme compare"),
        (with_step("Infinity"), "is not a result of carme compare"),
        ('{"version": 7, "rows": []}', "holds a result of version 7, and this carme_runtime reads version 1"),
    ],
)
def test_a_file_that_is_not_a_result_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "some.json").write_text(text)
    with pytest.raises(CarmeRuntimeError, match=sentence):
        results.load(tmp_path / "some.json")
