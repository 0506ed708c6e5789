"""The results of the suites of ./test, at its end: one table, then each failure again.

    python tests/results.py FOLDER

In the folder, `suites` has a line for each suite that ran: its name, its seconds, its exit code and the name
of its files, separated by tabs. FILE.xml is what pytest wrote (JUnit's format), FILE.txt what the suite
printed; a suite may lack either.
"""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Case", "Suite", "failures", "read", "report", "table"]

SLOWEST = 5
#: The number of last lines of a failure, and of failures of a suite.
LINES, FAILURES = 40, 20


@dataclass(frozen=True)
class Case:
    """A test: its id as pytest takes it, its seconds, how it ended, and the text of a failure."""

    name: str
    seconds: float
    outcome: str  # passed, failed or skipped
    text: str = ""


@dataclass(frozen=True)
class Suite:
    """A suite that ran. `cases` is None where it reports no tests; `output` is the end of what it printed."""

    name: str
    seconds: int
    code: int
    cases: list[Case] | None
    output: str = ""

    def count(self, outcome: str) -> int:
        """How many of its tests ended so."""
        return sum(case.outcome == outcome for case in self.cases or ())


def read(folder: Path) -> list[Suite]:
    """The suites that ran, in the order of their ends.

    Raises:
        OSError: The folder has no list of suites.
    """
    found = []
    for line in (folder / "suites").read_text().splitlines():
        name, seconds, code, file = line.split("\t")
        printed = folder / f"{file}.txt"
        message = _end(printed.read_text(errors="replace")) if printed.exists() else ""
        found.append(Suite(name, int(seconds), int(code), _cases(folder / f"{file}.xml"), message))
    return found


def table(suites: list[Suite]) -> Iterator[str]:
    """Lines: a row for each suite, and below it the tests that took longest."""
    width = max([len("suite"), *(len(suite.name) for suite in suites)])
    yield f"{'suite':{width}}  {'tests':>6} {'failed':>6} {'skipped':>7} {'seconds':>7}"
    for suite in suites:
        if suite.cases is None:
            tests, failed, skipped = "", "yes" if suite.code else "", ""
        else:
            tests, skipped = str(len(suite.cases)), str(suite.count("skipped"))
            failed = str(suite.count("failed") or ("yes" if suite.code else 0))
        yield f"{suite.name:{width}}  {tests:>6} {failed:>6} {skipped:>7} {suite.seconds:>7}"
        slowest = sorted(suite.cases or (), key=lambda case: -case.seconds)[:SLOWEST]
        yield from (f"    {case.seconds:6.1f} s  {case.name}" for case in slowest)


def failures(suites: list[Suite]) -> Iterator[str]:
    """Lines: the failures of each suite that failed; where none is known, the end of what it printed."""
    for suite in suites:
        if not suite.code:
            continue
        yield ""
        yield f"== Failed: {suite.name}"
        failed = [case for case in suite.cases or () if case.outcome == "failed"]
        if not failed:
            yield suite.output or f"It ended with exit code {suite.code}; its output is above."
        for case in failed[:FAILURES]:
            yield ""
            yield f"-- {case.name}"
            yield _end(case.text)
        if more := failed[FAILURES:]:
            yield ""
            yield f"-- and {len(more)} more:"
            yield from (case.name for case in more)


def report(folder: Path) -> None:
    """Print the table, then the failures.

    Raises:
        OSError: The folder has no list of suites.
    """
    suites = read(folder)
    print("\n".join(["", *table(suites), *failures(suites)]))


def _cases(file: Path) -> list[Case] | None:
    """The tests in pytest's report; None if there is none, or pytest was killed while it wrote."""
    try:
        elements = ElementTree.parse(file).iter("testcase")
        return list(_joined(_case(element) for element in elements))
    except (OSError, ElementTree.ParseError):
        return None


def _case(element: ElementTree.Element) -> Case:
    file, name = element.get("file", ""), element.get("name", "")
    inner = element.get("classname", "").removeprefix(file.removesuffix(".py").replace("/", "."))
    parts = [file, *inner.strip(".").split("."), name]
    outcome, texts = "passed", []
    for kind, meaning in (("skipped", "skipped"), ("failure", "failed"), ("error", "failed")):
        for problem in element.findall(kind):
            outcome = meaning
            texts.append(problem.text or problem.get("message", ""))
    seconds = float(element.get("time") or 0)
    return Case("::".join(part for part in parts if part), seconds, outcome, "\n\n".join(texts))


def _joined(cases: Iterator[Case]) -> Iterator[Case]:
    """One case for each test: pytest reports twice a test that failed in its body and at its end."""
    known: dict[str, Case] = {}
    for case in cases:
        if before := known.get(case.name):
            worst = max(before.outcome, case.outcome, key=("passed", "skipped", "failed").index)
            text = "\n\n".join(filter(None, (before.text, case.text)))
            case = Case(case.name, before.seconds + case.seconds, worst, text)
        known[case.name] = case
    yield from known.values()


def _end(text: str) -> str:
    lines = text.rstrip().splitlines()
    return "\n".join(["[...]"] * (len(lines) > LINES) + lines[-LINES:])


def main() -> None:
    """Read the command line, and report."""
    parser = argparse.ArgumentParser(description="Print the results of the suites of ./test again.")
    parser.add_argument("folder", type=Path)
    report(parser.parse_args().folder)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    main()
