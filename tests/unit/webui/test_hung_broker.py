"""Pages while the broker hangs: it accepts connections and answers nothing."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone
from hanging_broker import HangingBroker

from carme_webui.accounts.models import User
from carme_webui.announcements.models import Maintenance
from carme_webui.bookings.models import Booking
from carme_webui.cluster import broker_silence
from carme_webui.images.models import OwnImage
from carme_webui.jobs.models import Job
from carme_webui.projects.models import Membership, Project
from patience import HANG

from .conftest import Browser, program_of, text
from .fake_broker import make_job


@pytest.fixture
def hung(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingBroker]:
    """Answers nothing; who has found that out asks no more in this test."""
    monkeypatch.setattr(broker_silence, "patience", 0.01)
    monkeypatch.setattr(broker_silence, "check_seconds", 0.01)
    monkeypatch.setattr(broker_silence, "rest", HANG)
    running = HangingBroker(folder / "broker.sock")
    yield running
    running.close()


@pytest.fixture
def site(admin: User) -> None:
    """The administrator has a job, a project and an image that is being built."""
    now = timezone.now()
    Job.store([make_job(7, user=admin.username, state="RUNNING", started=now, submitted=now)])
    project = Project.objects.create(name="vision", title="Vision", granted=now)
    Membership.objects.create(project=project, user=admin, manager=True)
    OwnImage.objects.create(owner=admin, name="mine", kind="requirements", text="x", file="/x", job_id=7)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/", "does not answer"),
        ("/live/", "does not answer"),
        ("/admin/", "does not answer"),
        ("/admin/?by=memory", "does not answer"),
        ("/admin/nodes/", "does not answer"),
        ("/admin/jobs/", "does not answer"),
        ("/admin/jobs/?q=x", "does not answer"),
        ("/admin/approvals/", ""),
        ("/bookings/", "does not answer"),
        ("/bookings/new/", "does not answer"),
        ("/datasets/", ""),
        ("/files/", "does not answer"),
        ("/files/quota/", ""),
        ("/images/", ""),
        ("/images/at/mine@root1/", "does not answer"),
        ("/jobs/", ""),
        ("/jobs/7/", "does not answer"),
        ("/jobs/7/facts/", "does not answer"),
        ("/jobs/7/net/", ""),
        ("/jobs/7/recipe/", "does not answer"),
        ("/jobs/7/use/", "does not answer"),
        ("/jobs/month/", ""),
        ("/jobs/submit/", "does not answer"),
        ("/maintenance/new/", ""),
        ("/projects/", ""),
        ("/projects/at/vision/", ""),
        ("/projects/at/vision/limits/", ""),
        ("/projects/at/vision/use/", ""),
        ("/sessions/probes/", ""),
    ],
)
def test_a_page_waits_once_and_says_why(
    root: Browser, site: None, hung: HangingBroker, path: str, sentence: str
) -> None:
    answer = root.get(path)
    assert answer.status_code in (200, 204, 503), text(answer)
    assert sentence in text(answer)
    requests = [data for data in hung.received() if data]
    assert len(requests) <= 1, requests


@pytest.mark.parametrize("path", ["cluster", "jobs/7", "jobs/7/log", "files", "admin/nodes"])
def test_a_program_waits_once_too(admin: User, site: None, hung: HangingBroker, path: str) -> None:
    answer = program_of(admin).ask("GET", path)
    assert answer.status_code in (200, 503), text(answer)
    assert len([data for data in hung.received() if data]) <= 1


def test_what_a_form_requests_is_not_sent_to_a_broker_that_hangs(
    root: Browser, site: None, hung: HangingBroker
) -> None:
    token = root.own_token()
    assert "does not answer" in text(root.get("/admin/"))
    hung.received()
    answer = root.send_with(token, "/jobs/7/cancel/")
    assert answer.status_code == 302
    assert "does not answer" in text(root.get(answer["location"]))
    assert hung.received() == [], "it rests"


def test_what_slurm_does_later_is_not_called_done(root: Browser, admin: User, hung: HangingBroker) -> None:
    start = timezone.now() + timedelta(hours=5)
    common = {"start": start, "end": start + timedelta(hours=1), "node_names": ["n1"]}
    maintenance = Maintenance.objects.create(title="New cooling", by=admin, **common)
    booking = Booking.objects.create(
        owner=admin, partition="gpu", gpu_type="a100", gpus_per_node=4, state="approved", **common
    )
    token = root.own_token()
    for address in (f"/maintenance/{maintenance.pk}/cancel/", f"/bookings/{booking.name}/delete/"):
        page = text(root.get(root.send_with(token, address)["Location"]))
        assert "as soon as the reservation can be deleted; this is tried again." in page
        assert "Its nodes take jobs again.<" not in page and "are free for others.<" not in page
