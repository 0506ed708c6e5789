"""What tests do to sessions: fill the form in, pass some time, read a page."""

import re
from datetime import timedelta

import pytest

from carme_webui.cluster import broker as site_broker
from carme_webui.jobs.mirror import follow
from carme_webui.sessions.models import Session

from .conftest import Browser, tend_all
from .fake_broker import NOW, FakeBroker, make_job, make_session
from .fake_hub import FakeHub

FORM = {
    "name": "s0123abcd", "title": "My run", "image": "torch", "partition": "gpu", "gpu_type": "a100",
    "gpus_per_node": "2", "nodes": "1", "minutes": "60",
}  # fmt: skip
NAME, PAGE = "s0123abcd", "/sessions/s0123abcd/"


def start(browser: Browser, **fields: object):
    return browser.send_with(browser.own_token(), "/sessions/start/", **(FORM | fields))


def the_session() -> Session:
    return Session.objects.get()


def shown(browser: Browser, page: str = PAGE) -> str:
    return browser.get(page).content.decode()


def without_times(page: str) -> str:
    """The page with its moments as plain text."""
    return re.sub(r"</?time[^>]*>", "", page)


def sync_all(*, seconds: float = 0) -> None:
    """Run all background tasks of the portal once, after a while."""
    for session in Session.objects.all():
        for field in ("created", "changed", "requested_at"):
            if value := getattr(session, field):
                setattr(session, field, value - timedelta(seconds=seconds))
        session.save()
    follow(site_broker())
    tend_all()


@pytest.fixture
def ready(browser: Browser, broker: FakeBroker, hub: FakeHub) -> Session:
    """Alice's session with its Slurm job 7, ready."""
    start(browser)
    broker.put(make_job(7, name="session-s0123abcd", kind="session", started=NOW))
    broker.publish(make_session(NAME, steps=8, node_list="n1"))
    sync_all()
    assert (the_session().state, the_session().job_id) == ("ready", 7)
    return the_session()
