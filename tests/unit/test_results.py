"""The end of ./test: what pytest itself writes is read, and summed up."""

import subprocess
import sys
from pathlib import Path

import pytest

import results

TESTS = """
import pytest

def test_good():
    pass

class TestGroup:
    @pytest.mark.parametrize("kind", ["a b"])
    def test_bad(self, kind):
        assert kind == "left\\x1b"

@pytest.fixture
def broken():
    yield
    raise OSError("cannot be cleaned")

def test_twice_bad(broken):
    for number in range(100):
        print(number)
    raise ValueError("the body")

def test_left_out():
    pytest.skip("not here")
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Run pytest on these tests; return its output, and its report."""
    top = tmp_path_factory.mktemp("some")
    (top / "tests").mkdir()
    (top / "tests/test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1"]
    done = subprocess.run(
        [*command, "--rootdir=.", "--junitxml=some.xml", "tests"],
        cwd=top,
        env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 1
    return done.stdout, (top / "some.xml").read_text()


@pytest.fixture
def folder(tmp_path: Path, outputs: tuple[str, str]) -> Path:
    """Results of three suites: a failed one of pytest, a failed one without tests, and a passed one."""
    (tmp_path / "unit--some.txt").write_text(outputs[0])
    (tmp_path / "unit--some.xml").write_text(outputs[1])
    (tmp_path / "lint.txt").write_text("".join(f"line {number}\n" for number in range(60)))
    (tmp_path / "suites").write_text(
        "unit: some\t7\t1\tunit--some\nlint\t61\t2\tlint\ncluster: ./demo up\t103\t0\tcluster----demo-up\n"
    )
    return tmp_path


def test_the_table_counts_tests_and_names_the_slowest(folder: Path) -> None:
    lines = list(results.table(results.read(folder)))
    assert lines[0].split() == ["suite", "tests", "failed", "skipped", "seconds"]
    assert lines[1].split() == ["unit:", "some", "4", "2", "1", "7"]
    slowest = [line.split(" s  ")[1] for line in lines[2:6]]
    assert sorted(slowest) == [
        "tests/test_some.py::TestGroup::test_bad[a b]",
        "tests/test_some.py::test_good",
        "tests/test_some.py::test_left_out",
        "tests/test_some.py::test_twice_bad",
    ]
    assert [line.split() for line in lines[6:]] == [
        ["lint", "yes", "61"],
        ["cluster:", "./demo", "up", "103"],
    ]


def test_failures_come_last_and_short(folder: Path) -> None:
    program = [sys.executable, results.__file__, str(folder)]
    reported = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True).stdout
    table, *suites = reported.split("\n== Failed: ")
    assert table.startswith("\nsuite") and len(suites) == 2
    tests = suites[0].split("\n-- ")
    assert tests[0].strip() == "unit: some"
    assert [test.partition("\n")[0] for test in tests[1:]] == [
        "tests/test_some.py::TestGroup::test_bad[a b]",
        "tests/test_some.py::test_twice_bad",
    ]
    assert "AssertionError" in tests[1] and "the body" in tests[2] and "cannot be cleaned" in tests[2]
    assert all(len(test.splitlines()) < results.LINES + 5 for test in tests)
    # A suite whose output names no tests: the end of its output.
    assert "line 59" in suites[1] and "line 20" in suites[1] and "line 19\n" not in suites[1]


def test_a_suite_that_was_killed_is_reported_as_well(folder: Path) -> None:
    whole = (folder / "unit--some.xml").read_text()
    (folder / "unit--some.xml").write_text(whole[: len(whole) // 2])
    suites = results.read(folder)
    assert suites[0].cases is None
    assert "FAILED tests/test_some.py::test_twice_bad" in "\n".join(results.failures(suites))
    (folder / "unit--some.txt").unlink()
    assert "It ended with exit code 1" in "\n".join(results.failures(results.read(folder)))


def test_further_failures_are_only_named() -> None:
    cases = [results.Case(f"t.py::test_{number}", 0.1, "failed", f"text {number}") for number in range(25)]
    reported = list(results.failures([results.Suite("unit", 1, 1, cases)]))
    assert "text 19" in reported and "text 20" not in reported and "t.py::test_24" in reported
    assert "-- and 5 more:" in reported
