"""Fixtures of the suite of real sites: what was done there, and how long it took.

Each step of an administrator's is a fixture and is done once. Tests look at what a step has left, so that
they pass in any order. With CARME_KEEP_SITE the hosts stay after a run; with CARME_RESUME_SITE a run goes on
with hosts that stayed and does no step of an administrator's again that came to its end.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts/sites"


class Record:
    """What was done on a site and how long it took; written to artifacts/sites/NAME.json after each step.

    Args:
        site: the site's name.
        resume: go on from what an earlier run has written.
    """

    def __init__(self, site: str, resume: bool = False) -> None:
        self._path = ARTIFACTS / f"{site}.json"
        self.resumed = resume
        known = json.loads(self._path.read_text()) if resume and self._path.exists() else {}
        self.versions: dict[str, str] = known.get("versions", {})
        self.steps: dict[str, dict[str, object]] = known.get("steps", {})
        #: What steps have left, for tests that look at it after the site has gone on.
        self.results: dict[str, Any] = known.get("results", {})

    def is_done(self, name: str) -> bool:
        """Whether an earlier run, which this one goes on from, has done a step."""
        return self.resumed and self.steps.get(name, {}).get("outcome") == "ok"

    @contextmanager
    def step(self, name: str, code: int = 0) -> Iterator[dict[str, object]]:
        """Time a step, and note whether it came to its end.

        Args:
            name: of the step.
            code: how its program is to end, where it notes its own under "code".

        Yields what is noted of the step, to which its own figures may be added.
        """
        begun = time.monotonic()
        noted: dict[str, object] = {"outcome": "failed"}
        self.steps[name] = noted
        try:
            yield noted
            noted["outcome"] = "ok" if noted.get("code", 0) == code else f"ended with {noted['code']}"
        finally:
            noted["seconds"] = round(time.monotonic() - begun)
            print(f"{name}: {noted['outcome']} after {noted['seconds']} s")
            self.write()

    def keep(self, name: str, result: Any) -> None:
        """Note what a step has left; what JSON can say."""
        self.results[name] = result
        self.write()

    def write(self) -> None:
        """Write all that is known so far."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        known = {"versions": self.versions, "steps": self.steps, "results": self.results}
        self._path.write_text(json.dumps(known, indent=2) + "\n")


@pytest.fixture(scope="session")
def keep_site() -> bool:
    """Whether the hosts stay when the suite ends, to look at them."""
    return bool(os.environ.get("CARME_KEEP_SITE"))


@pytest.fixture(scope="session")
def resume_site() -> bool:
    """Whether this run goes on with hosts that stayed."""
    return bool(os.environ.get("CARME_RESUME_SITE"))
