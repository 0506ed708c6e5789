"""The rules that raise alerts, with cases in which each fires and in which it must not: by promtool."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from patience import HANG

from .conftest import ROOT, Starts
from .metrics import exported

RULES = ROOT / "ansible/roles/prometheus/files/rules"
FILES = sorted(RULES.glob("*.yml"))
PROMTOOL = shutil.which("promtool")

pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed; ./test unit fetches it")

GPU = 'jobid="7",user="ada",node="n1",gpu="{}",uuid="GPU-{}"'
GPU_0, GPU_1 = GPU.format(0, 0), GPU.format(1, 1)
JOB = 'jobid="7",user="ada",node="n1"'
BUSY = f"carme_job_gpu_utilization_ratio{{{GPU_0}}}"
SECOND = f"carme_job_gpu_utilization_ratio{{{GPU_1}}}"
CPU = f'carme_job_cpu_seconds_total{{{JOB},mode="user"}}'
CPUS = f"carme_job_cpus{{{JOB}}}"
TRAINED = f'carme_training_seconds_total{{{JOB},rank="0"}}'
WAITED = f'carme_training_wait_seconds_total{{{JOB},rank="0",cause="data"}}'
PEAK, LIMIT = f"carme_job_memory_peak_bytes{{{JOB}}}", f"carme_job_memory_limit_bytes{{{JOB}}}"
CARD = 'node="n1",gpu="0",uuid="GPU-0"'
SHOWN = f"carme_gpu_up{{{CARD}}}"
XID_79, XID_31 = (f'carme_gpu_xid_errors_total{{{CARD},xid="{number}"}}' for number in (79, 31))
ECC = f'carme_gpu_ecc_errors_total{{{CARD},kind="uncorrected"}}'
ROWS = f'carme_gpu_remapped_rows{{{CARD},kind="failed"}}'
LIBRARY = 'carme_gpu_library_state{node="n1",state="hanging",vendor="nvidia"}'
OOM = f"carme_job_oom_kills_total{{{JOB}}}"
STARTS_FAIL = 'carme_sessions_ended_total{ending="died_at_start"}'
BOB = 'carme:exempt_user{user="bob"}'
HEAT = f'carme_gpu_throttled{{{CARD},reason="hardware_thermal"}}'
NODE = 'carme_node_available{node="n1"}'
POWER = 'carme_node_powered_on{node="n1"}'
UP = 'up{job="carme-nodes",node="n1"}'
FREE = 'carme_cluster_gpus_usable{gpu_type="a100"}'
HELD = 'carme_cluster_gpus_allocated{gpu_type="a100"}'
WANTED = 'carme_queue_pending_gpus{gpu_type="a100",partition="gpu"}'
EXEMPT = 'carme:exempt_user{user="ada"}'
#: GPUs of the same job on another node.
ELSEWHERE = [f"carme_job_gpu_utilization_ratio{{{GPU.format(n, n + 2)}}}".replace("n1", "n2") for n in (0, 1)]
GIB = 1 << 30

# A burst of half an hour a day, in samples five minutes apart.
BURSTS = " ".join(["1x5 0x281"] * 3)
# Five hours a day: enough for each day, too little for a week.
MORNINGS = " ".join(["1x59 0x227"] * 10)
Case = tuple[str, dict[str, str], str, set[str]]

# The case; series in samples one minute apart ("5m:" before a series: five); time; alerts that fire then.
# With five, rules are evaluated each quarter of an hour, too seldom for CarmeGpuNeverUsed.
CASES: list[Case] = [
    ("never used", {BUSY: "0x90"}, "70m", {"CarmeGpuNeverUsed"}),
    ("not yet an hour", {BUSY: "0x90"}, "50m", set()),
    ("used at the beginning", {BUSY: "1x20 0x70"}, "60m", set()),
    ("not known for most of the hour", {BUSY: "0x5 _x50 0x40"}, "70m", set()),
    ("one of two idle", {BUSY: "0.9x90", SECOND: "0x90"}, "70m", {"CarmeGpuNeverUsed", "CarmeGpusUneven"}),
    ("ended before its hour", {BUSY: "0x15 stale"}, "68m", set()),
    ("exempt", {BUSY: "0x90", EXEMPT: "1x90"}, "70m", set()),
    ("another is exempt", {BUSY: "0x90", BOB: "1x90"}, "70m", {"CarmeGpuNeverUsed"}),
    ("a burst a day", {f"5m:{BUSY}": BURSTS}, "47h", {"CarmeGpuIdle"}),
    ("an idle week", {f"5m:{BUSY}": MORNINGS}, "194h", {"CarmeGpuIdle"}),
    ("idle, and ended yesterday", {f"5m:{BUSY}": "0x24 stale"}, "24h45m", set()),
    ("idle for a day, and ended", {f"5m:{BUSY}": "0x300 stale"}, "26h", set()),
    ("idle for a week, and ended", {f"5m:{BUSY}": "0x2030 stale"}, "170h", set()),
    ("idle around a gap", {f"5m:{BUSY}": "0x24 _x250 0x24"}, "24h30m", set()),
    ("idle around a gap of a week", {f"5m:{BUSY}": "0x24 _x1990 0x40"}, "169h30m", set()),
    ("a day of work with pauses", {f"5m:{BUSY}": " ".join(["0.8x5 0x5"] * 40)}, "30h", set()),
    ("even ranks", {BUSY: "0.9x90", SECOND: "0.8x90"}, "70m", set()),
    ("uneven ranks", {BUSY: "0.95x90", SECOND: "0.2x90"}, "70m", {"CarmeGpusUneven"}),
    ("uneven, and ended", {BUSY: "0.9x15 stale", SECOND: "0x15 stale"}, "42m", set()),
    (
        "a second run elsewhere",
        {BUSY: "0.5x40 stale", SECOND: "0.5x40 stale"}
        | {ELSEWHERE[0]: "_x42 0.9x15", ELSEWHERE[1]: "_x42 0x15"},
        "56m",
        set(),
    ),
    (
        "loader, and ended",
        {BUSY: "0.3x15 stale", CPU: "0+240x15 stale", CPUS: "4x15 stale"},
        "42m",
        set(),
    ),
    ("loader", {BUSY: "0.3x90", CPU: "0+240x90", CPUS: "4x90"}, "70m", {"CarmeLoaderBound"}),
    ("busy GPUs and processors", {BUSY: "0.9x90", CPU: "0+240x90", CPUS: "4x90"}, "70m", set()),
    ("idle processors", {BUSY: "0.3x90", CPU: "0+60x90", CPUS: "4x90"}, "70m", set()),
    ("waits for data", {TRAINED: "0+60x90", WAITED: "0+36x90"}, "70m", {"CarmeWaitsForData"}),
    ("waits for data at first", {TRAINED: "0+60x20", WAITED: "0+36x20"}, "20m", set()),
    ("has its data", {TRAINED: "0+60x90", WAITED: "0+6x90"}, "70m", set()),
    ("a shell left open", {CPU: "0+1x400", CPUS: "8x400"}, "365m", {"CarmeCpusIdle"}),
    ("GPUs not shown now", {CPU: "0+1x400", CPUS: "8x400", BUSY: "0.9x350 stale"}, "365m", set()),
    ("a job at work", {CPU: "0+400x400", CPUS: "8x400"}, "365m", set()),
    ("memory far below", {PEAK: f"{2 * GIB}x150", LIMIT: f"{64 * GIB}x150"}, "130m", {"CarmeMemoryUnused"}),
    ("memory well used", {PEAK: f"{40 * GIB}x150", LIMIT: f"{64 * GIB}x150"}, "130m", set()),
    ("little memory anyway", {PEAK: f"{GIB}x150", LIMIT: f"{8 * GIB}x150"}, "130m", set()),
    ("memory of a young job", {PEAK: f"{2 * GIB}x150", LIMIT: f"{64 * GIB}x150"}, "110m", set()),
    (
        "memory of a second run",
        {
            PEAK: f"{40 * GIB}x100 stale _x5 {2 * GIB}x40",
            LIMIT: f"{64 * GIB}x100 stale _x5 {64 * GIB}x40",
        },
        "130m",
        set(),
    ),
    ("killed", {OOM: "0x5 1x5"}, "7m", {"CarmeOutOfMemory"}),
    ("killed at once", {UP: "1x30", OOM: "_x12 1x9"}, "15m", {"CarmeOutOfMemory"}),
    ("killed before a gap", {UP: "1x20 0x20 1x20", OOM: "1x20 stale _x20 1x20"}, "45m", set()),
    ("killed long ago", {OOM: "1x60"}, "50m", set()),
    ("lost", {f"carme_gpu_up{{{CARD}}}": "1x5 0x20"}, "10m", {"CarmeGpuLost"}),
    ("lost for a moment", {f"carme_gpu_up{{{CARD}}}": "1x5 0 1x20"}, "10m", set()),
    ("hanging", {LIBRARY: "1x20"}, "10m", {"CarmeGpuLibraryFailed"}),
    ("no such library", {LIBRARY.replace("hanging", "missing"): "1x20"}, "10m", set()),
    ("fallen off the bus", {XID_79: "_x5 1x5"}, "7m", {"CarmeGpuXid"}),
    ("once more", {XID_79: "1x40 2x5"}, "43m", {"CarmeGpuXid"}),
    ("an old one", {XID_79: "1x60"}, "50m", set()),
    ("an old one after a gap", {SHOWN: "1x60 stale _x20 1x20", XID_79: "1x60 stale _x20 1x20"}, "85m", set()),
    ("one of the gap", {SHOWN: "1x60 stale _x20 1x20", XID_79: "_x82 1x20"}, "85m", {"CarmeGpuXid"}),
    ("after a restart", {SHOWN: "1x90", XID_79: "1x20 stale _x20 1x20"}, "45m", {"CarmeGpuXid"}),
    ("a program's mistake", {XID_31: "_x5 1x5"}, "7m", {"CarmeGpuXidOfAProgram"}),
    ("uncorrected", {ECC: "0x5 2x9"}, "10m", {"CarmeGpuMemoryErrors"}),
    ("corrected", {f'carme_gpu_ecc_errors_total{{{CARD},kind="corrected"}}': "0x5 2x9"}, "10m", set()),
    ("no spare rows", {ROWS: "1x9"}, "8m", {"CarmeGpuMemoryWearsOut"}),
    ("replaced rows", {f'carme_gpu_remapped_rows{{{CARD},kind="corrected"}}': "3x9"}, "8m", set()),
    ("throttled by heat", {HEAT: "1x20"}, "10m", {"CarmeGpuTooHot"}),
    ("throttled by heat, and gone", {HEAT: "1x3 stale"}, "9m", set()),
    ("now and then", {HEAT: "1 0 0 0 1 0 0 0 1 0 0 0 1 0 0 0"}, "12m", set()),
    ("hot", {f'carme_gpu_temperature_celsius{{{CARD},sensor="gpu"}}': "96x20"}, "10m", {"CarmeGpuTooHot"}),
    ("left behind", {f"carme_gpu_foreign_processes{{{CARD}}}": "2x20"}, "15m", {"CarmeGpuForeignProcesses"}),
    ("drained", {NODE: "0x20"}, "15m", {"CarmeNodeUnavailable"}),
    ("exporter away", {NODE: "1x20", UP: "0x20"}, "10m", {"CarmeNodeExporterDown"}),
    ("node and exporter away", {NODE: "0x20", UP: "0x20"}, "8m", set()),
    ("switched off", {NODE: "1x20", UP: "0x20", POWER: "0x20"}, "10m", set()),
    ("on, exporter away", {NODE: "1x20", UP: "0x20", POWER: "1x20"}, "10m", {"CarmeNodeExporterDown"}),
    ("portal away", {'carme_service_up{service="portal"}': "0x5"}, "4m", {"CarmeServiceDown"}),
    ("portal restarts", {'carme_service_up{service="portal"}': "1 0 1 1 1"}, "4m", set()),
    ("cluster exporter away", {'up{job="carme-cluster"}': "0x9"}, "8m", {"CarmeClusterExporterDown"}),
    ("Slurm away", {"carme_slurm_up": "0x5"}, "4m", {"CarmeSlurmAway"}),
    ("sessions fail", {STARTS_FAIL: "0+1x20"}, "16m", {"CarmeSessionsFail"}),
    ("sessions end", {STARTS_FAIL.replace("died_at_start", "stopped"): "0+9x20"}, "16m", set()),
    ("free", {FREE: "8x90", HELD: "2x90", WANTED: "4x90"}, "70m", {"CarmeGpusFreeWhileJobsWait"}),
    ("free before Slurm was away",
     {FREE: "8x90", HELD: "2x90", WANTED: "4x90", "carme_slurm_up": "1x5 0x90"}, "70m", {"CarmeSlurmAway"}),
    ("full", {FREE: "8x90", HELD: "8x90", WANTED: "4x90"}, "70m", set()),
    (
        "slow starts",
        {
            'carme_session_start_seconds_bucket{le="60"}': "0+1x90",
            'carme_session_start_seconds_bucket{le="120"}': "0+9x90",
            'carme_session_start_seconds_bucket{le="+Inf"}': "0+9x90",
            "carme_session_start_seconds_count": "0+9x90",
        },
        "70m",
        {"CarmeSessionsStartSlowly"},
    ),
    ("slow exporter", {'carme_exporter_pass_seconds{node="n1"}': "9x20"}, "15m", {"CarmeExporterSlow"}),
]  # fmt: skip


def promtool(folder: Path, *tests: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Run `promtool test rules` over all rules with these tests."""
    assert PROMTOOL is not None
    files: list[str] = []
    for step, every in (("1m", "1m"), ("5m", "15m")):
        if chosen := [test for test in tests if test["interval"] == step]:
            rules = [str(file) for file in FILES]
            content = {"rule_files": rules, "evaluation_interval": every, "tests": chosen}
            files.append(str(folder / f"{step}.json"))
            Path(files[-1]).write_text(json.dumps(content))
    return subprocess.run(
        [PROMTOOL, "test", "rules", *files],
        capture_output=True,
        text=True,
        check=False,
        timeout=5 * HANG,
        # Go collects garbage only when there is much.
        env=os.environ | {"GOGC": "off", "GOMEMLIMIT": "1GiB"},
    )


def as_test(number: int, case: Case) -> dict[str, Any]:
    """A case as a test of promtool, which names the expression where it fails: the number is in it."""
    _, series, at, fires = case
    step = "5m" if any(name.startswith("5m:") for name in series) else "1m"
    return {
        "interval": step,
        "input_series": [
            {"series": name.removeprefix("5m:"), "values": text} for name, text in series.items()
        ],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (count by (alertname) (ALERTS{alertstate="firing"}))'
                f" # case {number}",
                "eval_time": at,
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(fires)],
            }
        ],
    }


#: A wrong case, which must fail; its number is not that of another case.
WRONG: tuple[int, Case] = (len(CASES), ("", {BUSY: "0x90"}, "70m", set()))


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The messages of promtool about failed cases, by their numbers.

    All are in one run: most of the time of one with a single case is that of promtool's start.
    """
    done = promtool(
        tmp_path_factory.mktemp("rules"),
        *(as_test(number, case) for number, case in enumerate(CASES)),
        as_test(*WRONG),
    )
    text = done.stdout + done.stderr
    found = re.findall(r"(?ms)^[^\n]* # case (\d+)\"(.*?)(?=^[^\n]* # case |\Z)", text)
    assert done.returncode and found, text
    # Rules that cannot be loaded or computed end a case before its expression, and no number is there.
    assert not re.search(r"\b(rule|err): ", text), text
    return {int(number): reported for number, reported in found}


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: CASES[number][0])
def test_exactly_the_expected_alerts_fire(failures: dict[int, str], number: int) -> None:
    assert number not in failures, failures[number]


def test_a_wrong_case_fails(failures: dict[int, str]) -> None:
    assert WRONG[0] in failures


def all_rules() -> list[dict[str, Any]]:
    groups = [group for file in FILES for group in yaml.safe_load(file.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    assert {rule["alert"] for rule in all_rules() if "alert" in rule} == set().union(
        *(case[3] for case in CASES)
    )


def test_labels_and_texts_of_an_alert_are_filled_in(tmp_path: Path) -> None:
    """Labels and texts are filled in."""
    labels = {"jobid": "7", "user": "ada", "node": "n1", "gpu": "0", "uuid": "GPU-0"}
    done = promtool(
        tmp_path,
        {
            "interval": "1m",
            "input_series": [{"series": BUSY, "values": "0x90"}],
            "alert_rule_test": [
                {
                    "eval_time": "70m",
                    "alertname": "CarmeGpuNeverUsed",
                    "exp_alerts": [
                        {
                            "exp_labels": labels | {"severity": "warning", "audience": "user"},
                            "exp_annotations": {
                                "summary": "Job 7: GPU 0 of n1 has not been used for an hour.",
                                "advice": "Ask for fewer GPUs next time, or start one process for each: "
                                "carme-run does. End the job if it waits for you: carme cancel 7",
                            },
                        }
                    ],
                }
            ],
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_says_whom_it_concerns_how_bad_it_is_and_what_to_do() -> None:
    for rule in all_rules():
        if "alert" in rule:
            assert rule["labels"]["audience"] in ("user", "admin"), rule["alert"]
            assert rule["labels"]["severity"] in ("info", "warning", "critical"), rule["alert"]
            assert set(rule["annotations"]) == {"summary", "advice"}, rule["alert"]


def test_rules_use_only_what_is_exported(start: Starts, tmp_path: Path) -> None:
    """A series with another name would never be there, and its alert never fire."""
    known = exported(start, tmp_path)
    for rule in all_rules():
        names = set(re.findall(r"\b(?<!:)carme_\w+", rule["expr"]))
        assert names <= known, f"{rule.get('alert') or rule['record']}: {sorted(names - known)}"
