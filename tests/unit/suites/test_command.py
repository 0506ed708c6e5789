"""The test command itself, `./test`: its words, exit codes, files and its end by a signal."""

import os
import signal
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from patience import HANG
from suites import arguments
from suites.running import Stop

from .conftest import LIMIT, Command, has_ended, wait_until

GOOD = "def test_good():\n    pass\n"
BAD = "def test_bad():\n    assert 'left' == 'right'\n"


def test_help_names_all_suites_and_benchmarks(command: Command) -> None:
    done = command("--help")
    assert done.returncode == 0 and not done.stderr
    lines = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")}
    assert set(arguments.SUITES) <= lines
    assert all(name in done.stdout for name in arguments.BENCHMARKS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "there is no suite called 'nothing'. Choose from lint, unit, cluster"),
        (["-k", "name"], "there is no suite called '-k'"),
        (["bench"], "there is no benchmark called ''. Choose from allreduce,"),
        (["bench", "nothing"], "there is no benchmark called 'nothing'"),
        (["two-heads"], "two-heads is a site of the suite 'sites'. Use: ./test sites two-heads"),
    ],
)
def test_a_wrong_call_says_what_is_right(command: Command, words: list[str], message: str) -> None:
    done = command(*words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"test: {message}")
    assert not done.stdout


def test_a_file_of_a_suite_runs_alone(command: Command, tree: Path) -> None:
    (tree / "tests/unit/test_good.py").write_text(GOOD)
    (tree / "tests/unit/test_bad.py").write_text(BAD)
    done = command("unit", "--", "tests/unit/test_good.py", "-q")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nAll passed: unit\n" in done.stdout
    report = ElementTree.parse(tree / "artifacts/results/unit.xml")
    assert [case.get("name") for case in report.iter("testcase")] == ["test_good"]
    assert "1 passed" in (tree / "artifacts/results/unit.txt").read_text()


def test_failures_are_repeated_after_the_table(command: Command, tree: Path) -> None:
    (tree / "tests/unit/test_bad.py").write_text(BAD)
    (tree / "artifacts/results").mkdir(parents=True)
    (tree / "artifacts/results/earlier.xml").touch()
    done = command("unit", "--", "-k", "bad")
    assert done.returncode == 1
    table, failure = done.stdout.split("Results of the suites")[1].split("\n== Failed: unit\n")
    assert table.split("\n")[3].split()[:4] == ["unit", "1", "1", "0"]
    assert "-- tests/unit/test_bad.py::test_bad" in failure and "'left' == 'right'" in failure
    assert done.stderr.endswith("\nFailed: unit; \n")
    assert not (tree / "artifacts/results/earlier.xml").exists()


def test_what_runs_before_a_commit_takes_files_and_leaves_results(command: Command, tree: Path) -> None:
    subprocess.run(["git", "init", "-q", tree], check=True)
    (tree / "artifacts/results").mkdir(parents=True)
    (tree / "artifacts/results/earlier.xml").touch()
    (tree / "good.py").write_text("x = 1\n")
    (tree / "bad.py").write_text("import os\n")
    good, bad = command("lint", "--quick", "good.py"), command("lint", "--quick", "bad.py")
    assert good.returncode == 0, good.stdout + good.stderr
    assert bad.returncode == 1 and "`os` imported but unused" in bad.stdout
    assert (tree / "artifacts/results/earlier.xml").exists()


def test_a_signal_leaves_no_process(tree: Path, variables: dict[str, str]) -> None:
    pids = tree / "pid"
    waiting = f"import os, pathlib, time\n\ndef test_long():\n    pathlib.Path({str(pids)!r}).write_text("
    waiting += f"str(os.getpid()))\n    time.sleep({2 * HANG})\n"
    (tree / "tests/unit/test_long.py").write_text(waiting)
    process = subprocess.Popen(
        [tree / "test", "unit", "--", "tests/unit/test_long.py"],
        env=variables | {"CARME_PROCESSES": "2"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: process.poll() is not None or (pids.exists() and pids.read_text()))
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG) == 128 + signal.SIGTERM
        wait_until(lambda: has_ended(int(pids.read_text())))
    finally:
        process.kill()
        process.wait()
        if pids.exists() and not has_ended(int(pids.read_text())):
            os.kill(int(pids.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("words", [["--help"], ["unit", "--", "tests/unit/test_good.py"]])
def test_the_command_ends_quietly_where_nobody_reads_its_output(
    tree: Path, variables: dict[str, str], words: list[str]
) -> None:
    (tree / "tests/unit/test_good.py").write_text(GOOD)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [tree / "test", *words],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT,
        )
    finally:
        os.close(writing)
    assert done.returncode == 128 + signal.SIGPIPE
    assert "Broken" not in done.stderr, done.stderr  # neither a traceback nor a message of Python at its end


def test_the_command_runs_without_an_output_for_errors(tree: Path, variables: dict[str, str]) -> None:
    (tree / "tests/unit/test_good.py").write_text(GOOD)
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" unit -- -q 2>&-', tree / "test"],
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0 and "All passed: unit" in done.stdout, done.stdout


@pytest.mark.parametrize("words", [[], ["cluster"], ["unit", "faults"], ["sites"], ["bench", "exporter"]])
def test_what_starts_hosts_needs_root(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Stop, match=r"starts real hosts and needs root\. Run it with sudo") as stopped:
        arguments.parse(words)
    assert stopped.value.code == 2


def test_words_are_read_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert arguments.parse([]).suites == ("lint", "unit", "cluster", "browser", "security")
    part = arguments.parse(["unit", "cluster", "--", "-k", "name", "--help"])
    assert (part.suites, part.arguments) == (("unit", "cluster"), ("-k", "name", "--help"))
    assert not part.runs_beside_cluster("unit")
    assert arguments.parse(["unit", "cluster"]).runs_beside_cluster("unit")
    assert not arguments.parse(["unit"]).runs_beside_cluster("unit")
    benchmark = arguments.parse(["bench", "petri", "--quick", "--json", "file"])
    assert (benchmark.benchmark, benchmark.arguments) == ("petri", ("--quick", "--json", "file"))
    assert arguments.parse(["sites"]).sites == ("existing-22.05",)
    assert arguments.parse(["sites", "two-heads"]).sites == ("two-heads",)
    assert arguments.parse(["lint", "--quick"]).quick == (".",)


def test_an_earlier_name_of_a_suite_works_and_warns(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert arguments.parse(["showings"]).suites == ("end-to-end",)
    assert capfd.readouterr().err == "test: the suite showings is end-to-end now. Use the new name.\n"


def test_each_benchmark_has_a_file() -> None:
    folder = Path(arguments.__file__).parents[1] / "benchmarks"
    for name, benchmark in arguments.BENCHMARKS.items():
        assert (folder / f"{benchmark.script or name}.py").exists(), name
