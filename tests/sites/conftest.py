"""Fixtures of the suite of real sites.

Each step of an administrator's is a fixture and is done once; a step that only follows another one is done
also where that one failed. Tests look at what a step has left. With CARME_KEEP_SITE the hosts stay after a
run; with CARME_RESUME_SITE a run goes on with hosts that stayed and does no step of an administrator's again
that came to its end.
"""

import os
import signal
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from .own_slurm_steps import (
    again,
    batch_job,
    booking,
    images,
    installed,
    main_job,
    picture,
    prechecked,
    removed,
    validated,
    visit,
)
from .record import Record

__all__ = [
    "again",
    "batch_job",
    "booking",
    "images",
    "installed",
    "main_job",
    "picture",
    "prechecked",
    "removed",
    "validated",
    "visit",
]


@pytest.fixture(scope="session", autouse=True)
def interrupted_by_sigterm() -> Iterator[None]:
    """Take the hosts away also where the suite is ended by SIGTERM, as by timeout(1)."""
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, former)


@pytest.fixture(scope="session")
def keep_site() -> bool:
    """Whether the hosts stay when the suite ends, to look at them."""
    return bool(os.environ.get("CARME_KEEP_SITE"))


@pytest.fixture(scope="session")
def resume_site() -> bool:
    """Whether this run goes on with hosts that stayed."""
    return bool(os.environ.get("CARME_RESUME_SITE"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    """Note each test's outcome in the record of its site, as soon as it is known."""
    report = yield
    if report.when == "call" or report.failed:
        for value in getattr(item, "funcargs", {}).values():
            record = value if isinstance(value, Record) else getattr(value, "record", None)
            if isinstance(record, Record):
                record.note_test(item.name, report.outcome)
                break
    return report
