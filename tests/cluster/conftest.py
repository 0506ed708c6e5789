"""Fixtures of the tests that use the running demo cluster."""

from collections.abc import Iterator

import pytest

from demo_site import DemoSite


@pytest.fixture(scope="session")
def demo() -> DemoSite:
    return DemoSite()


@pytest.fixture(autouse=True)
def no_job_left(demo: DemoSite) -> Iterator[None]:
    """Each test leaves the cluster as it found it, also when it failed."""
    yield
    demo.end_all_jobs()
