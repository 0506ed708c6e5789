"""Fixtures of the tests that use the running demo cluster."""

import os
from collections.abc import Iterator

import pytest
from bs4 import BeautifulSoup

from demo_site import DemoSite


@pytest.fixture(scope="session")
def demo() -> DemoSite:
    """The demo; with users of their own for those tests that ./test runs beside the others."""
    return DemoSite.with_second_users() if os.environ.get("CARME_SECOND_USERS") else DemoSite()


@pytest.fixture(autouse=True)
def no_job_left(demo: DemoSite) -> Iterator[None]:
    """Restore the state of the cluster after each test, even if it failed."""
    yield
    demo.end_all_jobs()


@pytest.fixture
def project(demo: DemoSite) -> Iterator[str]:
    """The name of a project of this test alone, which user1 manages and user2 is a member of."""
    name = f"test-{os.urandom(4).hex()}"
    page = f"projects/at/{name}/"
    with demo.visitor("admin") as admin, demo.visitor("user1") as manager, demo.visitor("user2") as member:
        shown = admin.fetch(f"{admin.url}projects/new/")
        wanted = {"name": name, "title": f"Cluster test {name}", "manager": "user1"}
        assert admin.send(shown, admin.form(shown, "manager"), wanted).status_code == 200
        try:
            shown = manager.fetch(f"{manager.url}{page}")
            manager.send(shown, manager.form(shown, "user"), {"user": "user2"})
            shown = member.fetch(f"{member.url}projects/")
            soup = BeautifulSoup(shown.text, "html.parser")
            form = soup.select_one('form[action^="/projects/invitations/"]')
            assert form is not None, shown.text
            member.send(shown, form, {"answer": "yes"})
            yield name
        finally:
            demo.end_all_jobs()
            shown = admin.fetch(f"{admin.url}{page}")
            soup = BeautifulSoup(shown.text, "html.parser")
            form = soup.select_one(f'form[action="/{page}state/"]')
            assert form is not None, shown.text
            admin.send(shown, form, {"do": "close"})
