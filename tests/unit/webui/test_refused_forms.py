"""What was written into a form is not lost where the form is refused."""

from datetime import timedelta
from typing import Any

import pytest
from bs4 import BeautifulSoup
from django.utils import timezone

from carme.errors import SlurmError
from carme_webui.accounts.models import User
from carme_webui.bookings.models import Booking
from carme_webui.jobs.models import Job

from .conftest import Browser, text
from .fake_broker import FakeBroker, make_job


def value(answer: Any, field: str) -> str:
    """What a field of a page has."""
    found = BeautifulSoup(text(answer), "html.parser").select_one(field)
    assert found is not None
    return str(found.get("value", ""))


def booked(owner: User, state: str) -> Booking:
    begins = timezone.now().replace(microsecond=0) + timedelta(hours=5)
    return Booking.objects.create(
        owner=owner, partition="gpu", gpu_type="a100", gpus_per_node=4, node_names=["n1"], state=state,
        start=begins, end=begins + timedelta(hours=1),
    )  # fmt: skip


def test_a_job_of_which_the_broker_says_nothing_now_is_not_called_missing(browser: Browser) -> None:
    answer = browser.get("/jobs/9/new/")
    assert answer.status_code == 302
    assert "does not answer" in text(browser.get(answer["Location"]))


def test_a_job_that_the_broker_does_not_know_is_missing(browser: Browser, broker: FakeBroker) -> None:
    assert browser.get("/jobs/9/new/").status_code == 404


def test_the_session_of_a_booking_is_planned_once_more_with_what_was_written(
    browser: Browser, alice: User, broker: FakeBroker, rules: Any
) -> None:
    address = booked(alice, "approved").get_absolute_url()
    fields = {"image": "torch", "stage": "/data/x nothing-like-it", "results": "/home/alice/out"}
    answer = browser.send(address, f"{address}session/", **fields)
    assert answer.status_code == 422 and "There is no dataset" in text(answer)
    assert value(answer, "#image option[selected]") == "torch"
    assert (value(answer, "#stage"), value(answer, "#results")) == (fields["stage"], fields["results"])
    assert not Booking.objects.get().session_image


def test_the_message_to_the_owner_of_a_job_stays_where_it_cannot_be_stopped(
    root: Browser, broker: FakeBroker
) -> None:
    Job.store([broker.put(make_job(7))])
    token = root.token("/admin/jobs/7/stop/")
    del broker.queue[7]  # it ends meanwhile
    answer = root.send_with(token, "/admin/jobs/7/stop/", message="The room gets <b>hot</b>.")
    assert answer.status_code == 422 and 'role="alert"' in text(answer)
    assert value(answer, "#message") == "The room gets <b>hot</b>."


def test_the_reason_to_drain_a_node_stays(root: Browser, broker: FakeBroker) -> None:
    broker.refusal = SlurmError("Slurm does not answer.", "Wait.")
    answer = root.send("/admin/nodes/", "/admin/nodes/n1/", do="drain", reason="a & b")
    page = root.get(answer["Location"])
    assert "Slurm does not answer." in text(page)
    assert value(page, "#node-n1 input[name=reason]") == "a & b"
    assert value(page, "#node-n3 input[name=reason]") == ""
    assert answer["Location"] == "/admin/nodes/", "the reason is in no log"
    assert value(root.get("/admin/nodes/"), "#node-n1 input[name=reason]") == ""


def test_a_link_writes_nothing_into_a_form(
    root: Browser, alice: User, broker: FakeBroker, rules: Any
) -> None:
    row = booked(alice, "requested")
    page = root.get(f"/admin/approvals/?refused={row.name}&reason=Never")
    assert value(page, f"#reason-{row.name}") == ""


def test_a_refused_decision_leads_back_to_its_page(
    root: Browser, alice: User, broker: FakeBroker, rules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carme_webui.administration.views.PER_PAGE", 1)
    rows = [booked(alice, "requested"), booked(alice, "requested")]
    page = BeautifulSoup(text(root.get("/admin/approvals/?page=2")), "html.parser")
    row = next(each for each in rows if page.select_one(f"#reason-{each.name}"))
    sent = {str(each["name"]): str(each["value"]) for each in page.select("form.approval input[type=hidden]")}
    broker.refusal = SlurmError("Slurm refuses.", "Look at the nodes.")
    fields = {**sent, "answer": "approve", "reason": "Only <this> once."}
    fields.pop("csrfmiddlewaretoken", None)
    answer = root.send_with(root.own_token(), f"/bookings/{row.name}/decide/", **fields)
    assert answer["Location"] == "/admin/approvals/?page=2"
    assert value(root.get(answer["Location"]), f"#reason-{row.name}") == "Only <this> once."


def test_the_message_about_a_decision_stays(
    root: Browser, alice: User, broker: FakeBroker, rules: Any
) -> None:
    row = booked(alice, "requested")
    token = root.token("/admin/approvals/")
    broker.refusal = SlurmError("Slurm refuses.", "Look at the nodes.")
    fields = {"answer": "approve", "back": "queue", "reason": "Only <this> once."}
    answer = root.send_with(token, f"/bookings/{row.name}/decide/", **fields)
    page = root.get(answer["Location"])
    assert "Slurm refuses." in text(page)
    assert value(page, f"#reason-{row.name}") == "Only <this> once."
