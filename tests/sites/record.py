"""What was done on a site, how long it took and how it ended."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts/sites"
#: Of a playbook's tasks so many are noted: those that took longest.
SLOWEST = 12


class Record:
    """What was done on a site and how long it took; written when a step begins and when it ends.

    Args:
        site: the site's name.
        resume: go on from what an earlier run has written.
        folder: takes the file NAME.json.
    """

    def __init__(self, site: str, resume: bool = False, folder: Path = ARTIFACTS) -> None:
        self._path = folder / f"{site}.json"
        self.resumed = resume
        known = json.loads(self._path.read_text()) if resume and self._path.exists() else {}
        self.versions: dict[str, str] = known.get("versions", {})
        self.steps: dict[str, dict[str, Any]] = known.get("steps", {})
        #: How each test ended, by its name.
        self.tests: dict[str, str] = known.get("tests", {})
        #: What steps have left, for tests that look at it after the site has gone on.
        self.results: dict[str, Any] = known.get("results", {})

    def is_done(self, name: str) -> bool:
        """Whether an earlier run, which this one goes on from, has done a step."""
        return self.resumed and self.steps.get(name, {}).get("outcome") == "ok"

    @contextmanager
    def step(self, name: str, code: int = 0) -> Iterator[dict[str, Any]]:
        """Time a step, and note whether it came to its end.

        Args:
            name: of the step.
            code: how its program is to end, where it notes its own under "code".

        Yields what is noted of the step, to which its own figures may be added.
        """
        begun = time.monotonic()
        noted: dict[str, Any] = {
            "outcome": "running",
            "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self.steps[name] = noted
        self.write()
        try:
            yield noted
            noted["outcome"] = "ok" if noted.get("code", 0) == code else f"ended with {noted['code']}"
        except BaseException as error:
            noted["outcome"] = f"failed: {_first_line(error)}"
            raise
        finally:
            noted["seconds"] = round(time.monotonic() - begun)
            print(f"{name}: {noted['outcome']} after {noted['seconds']} s", flush=True)
            self.write()

    def keep(self, name: str, result: Any) -> None:
        """Note what a step has left; what JSON can say."""
        self.results[name] = result
        self.write()

    def note_test(self, name: str, outcome: str) -> None:
        """Note how a test ended."""
        self.tests[name] = outcome
        self.write()

    def write(self) -> None:
        """Write all that is known so far."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        known = {
            "versions": self.versions,
            "steps": self.steps,
            "tests": self.tests,
            "results": self.results,
        }
        self._path.write_text(json.dumps(known, indent=2) + "\n")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def slowest_tasks(times: Path) -> dict[str, float]:
    """Seconds of the tasks of a playbook that took longest, the slowest first.

    Args:
        times: what the callback `task_times` has written; tasks of one name count together.
    """
    if not times.exists():
        return {}
    total: dict[str, float] = {}
    for task in json.loads(times.read_text()):
        if task["seconds"] is not None:
            total[task["task"]] = total.get(task["task"], 0) + task["seconds"]
    by_time = sorted(total.items(), key=lambda pair: -pair[1])
    return {name: round(seconds, 1) for name, seconds in by_time[:SLOWEST]}


def attempt(request: pytest.FixtureRequest, *steps: str) -> None:
    """Do steps that others can do without: one that fails fails its own tests, and no others.

    Args:
        request: of the step that comes after them.
        steps: names of fixtures.
    """
    for step in steps:
        try:
            request.getfixturevalue(step)
        except (Exception, pytest.fail.Exception) as error:
            print(f"{step}: failed before {request.fixturename}: {_first_line(error)}", flush=True)
