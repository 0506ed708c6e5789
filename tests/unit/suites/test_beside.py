"""Suites beside each other on one demo: whole runs of `./test`, with a demo and tests of this file."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

import results
from patience import HANG

from .conftest import Command, has_ended, wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, as ./test does for these suites")

#: Comes up at once, and notes how it was called.
DEMO = """\
#!/bin/sh
echo "Look for remains of a sudden end"
echo "$@" >>{top}/demo-calls
exit {code}
"""
#: Two tests that wait for each other, in suites that run beside each other.
MEETS = """\
import pathlib, time

def test_meets():
    top = pathlib.Path({top!r})
    (top / {mine!r}).touch()
    until = time.monotonic() + 400
    while not (top / {other!r}).exists():
        assert time.monotonic() < until, "the other suite has not begun"
        time.sleep(0.05)
"""
ALONE = """\
import os, pathlib, pytest

@pytest.mark.alone
def test_alone():
    assert (pathlib.Path({top!r}) / "second-users").exists()
    assert "CARME_SECOND_USERS" not in os.environ
"""
SECOND = """\
import os, pathlib

def test_second_users():
    assert os.environ["CARME_SECOND_USERS"]
    (pathlib.Path({top!r}) / "second-users").touch()
"""
#: Brings nothing up; where it is ended, it waits until the test of the suite beside has been, too.
WAITING_DEMO = """\
#!/bin/sh
trap 'touch {top}/asked; until [ -e {top}/ended ]; do sleep 0.1; done; exit 1' TERM
echo "Look for remains of a sudden end"
while :; do sleep 0.1; done
"""
WAITING_TEST = """\
import os, pathlib, signal, time

def test_waits():
    top = pathlib.Path({top!r})

    def end(*_):
        (top / "ended").touch()
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    (top / "new").write_text(str(os.getpid()))
    (top / "new").rename(top / "pid")
    time.sleep(3600)
"""
#: Of the portal's tests, those that run on PostgreSQL.
PORTAL = ("administration", "bookings_at_once", "jobs", "migrations")
PORTAL += ("own_images", "projects", "reconcile", "upgrade")


@pytest.fixture
def suites(tree: Path) -> Path:
    """The tree, with tests of each suite; the first ones of cluster, browser and unit wait for each other."""
    top = str(tree)
    for folder in ("cluster", "browser", "unit/webui", "security"):
        (tree / "tests" / folder).mkdir(parents=True)
    (tree / "demo").write_text(DEMO.format(top=top, code=0))
    (tree / "demo").chmod(0o755)
    files = {
        "cluster/test_first.py": MEETS.format(top=top, mine="cluster", other="browser"),
        "browser/test_first.py": MEETS.format(top=top, mine="browser", other="unit"),
        "unit/test_first.py": MEETS.format(top=top, mine="unit", other="cluster"),
        "cluster/test_alone.py": ALONE.format(top=top),
        "cluster/test_bad_input.py": SECOND.format(top=top),
        "cluster/test_training_backends.py": SECOND.replace("test_second", "test_more").format(top=top),
        "security/test_attacks.py": "def test_attack():\n    pass\n",
        "unit/webui/test_processes.py": "def test_open_pages_hold_no_connection_to_the_database(): pass\n",
        "unit/webui/test_page_cost.py": "def test_bookings_are_found_by_indexes_in_a_table_of_many(): pass\n",
        "real_postgresql.py": "import subprocess, sys\nsys.exit(subprocess.call(sys.argv[1:]))\n",
    }
    files |= {f"unit/webui/test_{name}.py": "def test_portal():\n    pass\n" for name in PORTAL}
    for name, text in files.items():
        (tree / "tests" / name).write_text(text)
    return tree


def results_of(tree: Path) -> dict[str, results.Suite]:
    return {suite.name: suite for suite in results.read(tree / "artifacts/results")}


def test_suites_run_beside_the_cluster_and_are_reported_together(command: Command, suites: Path) -> None:
    done = command("unit", "cluster", "browser", "security")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\nAll passed: unit cluster browser security\n")
    found = results_of(suites)
    names = list(found)
    assert names[0] == "cluster: ./demo up"
    assert names.index("cluster and browser: alone") > max(
        names.index(name) for name in ("cluster", "browser")
    )
    assert names.index("browser") < names.index("cluster: second users")
    parts = {
        "unit": 11,
        "cluster": 1,
        "browser": 1,
        "cluster: second users": 2,
        "cluster and browser: alone": 1,
    }
    counts = {name: found[name].count("passed") for name in parts}
    assert counts == parts
    assert found["security"].count("passed") == 1
    # The hosts came up once, with Prometheus; the suite of attacks found that they had not been made.
    calls = (suites / "demo-calls").read_text().splitlines()
    assert calls == ["up --no-run --monitoring"] * 2
    # Suites beside the cluster are shown after the cluster's suites.
    headings = [line[3:].split(" (")[0] for line in done.stdout.splitlines() if line.startswith("== ")]
    assert headings.index("cluster") < headings.index("browser") < headings.index("unit")


def test_what_needs_no_cluster_begins_while_the_hosts_come_up(command: Command, suites: Path) -> None:
    begun = suites / "unit"
    waits = f"until [ -e {begun} ]; do sleep 0.1; done\nexit"
    (suites / "demo").write_text(DEMO.format(top=suites, code=0).replace("exit", waits))
    done = command("unit", "cluster", "browser")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_failure_beside_the_cluster_fails_the_run(command: Command, suites: Path) -> None:
    (suites / "tests/browser/test_bad.py").write_text("def test_bad():\n    assert 'left' == 'right'\n")
    done = command("unit", "cluster", "browser")
    assert done.returncode == 1
    assert done.stderr.endswith("\nFailed: what the second users do; \n")
    assert "-- tests/browser/test_bad.py::test_bad" in done.stdout.split("Results of the suites")[1]


def test_a_demo_that_does_not_come_up_fails_the_run(command: Command, suites: Path) -> None:
    (suites / "demo").write_text(DEMO.format(top=suites, code=7))
    done = command("security")
    assert done.returncode == 1
    assert results_of(suites)["security: ./demo up"].code == 7
    assert done.stderr.endswith("\nFailed: security: ./demo up; \n")


def test_a_part_of_a_suite_runs_by_itself(command: Command, suites: Path) -> None:
    (suites / "tests/cluster/test_part.py").write_text("def test_part():\n    pass\n")
    done = command("cluster", "--", "tests/cluster/test_part.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(results_of(suites)) == ["cluster: ./demo up", "cluster"]
    assert results_of(suites)["cluster"].count("passed") == 1


def test_with_attacks_made_already_the_demo_is_not_brought_up_again(command: Command, suites: Path) -> None:
    leaves = "import os, pathlib\n\ndef test_leaves():\n"
    leaves += "    (pathlib.Path(os.environ['CARME_RESULTS']) / 'attacks.json').touch()\n"
    (suites / "tests/cluster/test_first.py").write_text(leaves)
    done = command("cluster", "security")
    assert "./demo up" in done.stdout
    assert len((suites / "demo-calls").read_text().splitlines()) == 1


def test_further_signals_hold_up_no_end(suites: Path, variables: dict[str, str]) -> None:
    """Hosts and suites beside them end at the same time, however often a signal interrupts."""
    (suites / "demo").write_text(WAITING_DEMO.format(top=suites))
    (suites / "tests/unit/test_first.py").write_text(WAITING_TEST.format(top=str(suites)))
    pids = suites / "pid"
    with (suites / "printed").open("wb") as printed:
        # Programs that a shell starts in the background ignore that signal.
        command = ["env", "--default-signal=INT", suites / "test", "unit", "cluster"]
        process = subprocess.Popen(command, env=variables, stdout=printed, stderr=printed)
    try:
        wait_until(lambda: process.poll() is not None or pids.exists())
        process.send_signal(signal.SIGINT)
        wait_until(lambda: process.poll() is not None or (suites / "asked").exists())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process.send_signal(number)
        assert process.wait(HANG) == 128 + signal.SIGINT, (suites / "printed").read_text()
        assert (suites / "ended").exists()
        wait_until(lambda: has_ended(int(pids.read_text())))
    finally:
        process.kill()
        process.wait()
        if pids.exists() and not has_ended(int(pids.read_text())):
            os.kill(int(pids.read_text()), signal.SIGKILL)
