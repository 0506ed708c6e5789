"""Fixtures of the suite of real sites: what was done there, and how long it took.

Each step of an administrator's is a fixture and is done once. Tests look at what a step has left, so that
they pass in any order. Hosts stay after a run when CARME_KEEP_SITE is set.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts/sites"


class Record:
    """What was done on a site and how long it took; written to artifacts/sites/NAME.json after each step."""

    def __init__(self, site: str) -> None:
        self._path = ARTIFACTS / f"{site}.json"
        self.versions: dict[str, str] = {}
        self.steps: dict[str, dict[str, object]] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time a step, and note whether it came to its end."""
        begun = time.monotonic()
        outcome = "failed"
        try:
            yield
            outcome = "ok"
        finally:
            self.steps[name] = {"seconds": round(time.monotonic() - begun), "outcome": outcome}
            print(f"{name}: {outcome} after {self.steps[name]['seconds']} s")
            self.write()

    def write(self) -> None:
        """Write all that is known so far."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        known = {"versions": self.versions, "steps": self.steps}
        self._path.write_text(json.dumps(known, indent=2) + "\n")


@pytest.fixture(scope="session")
def keep_site() -> bool:
    """Whether the hosts stay when the suite ends, to look at them."""
    return bool(os.environ.get("CARME_KEEP_SITE"))
