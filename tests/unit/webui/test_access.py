"""What Slurm lets a user use, at bookings, images, projects and for programs."""

from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings
from django.utils import timezone

from carme.jobs import Access, Association, JobRequest, Node, Partition
from carme_webui.accounts.models import User
from carme_webui.bookings.models import Booking
from carme_webui.cluster import fitted
from carme_webui.projects.models import Membership, Project, access_for
from patience import HANG

from .conftest import Browser, Program, words
from .fake_broker import FakeBroker


@pytest.fixture
def limited(broker: FakeBroker, rules: Any) -> FakeBroker:
    """Alice may use the account physics, and the partition `gpu` is for another one."""
    broker.cluster = broker.cluster.model_copy(
        update={
            "partitions": [
                Partition(name="gpu", default=True, accounts=["vision"], node_names=["n1", "n2"]),
                Partition(name="open", node_names=["n2"]),
                Partition(name="mine", hidden=True, accounts=["physics"], node_names=["n2"]),
                Partition(name="secret", hidden=True, accounts=["vision"], node_names=["n1"]),
            ],
            "nodes": [Node(name=name, cpus=16, memory_mb=64_000, gpus={"a100": 4}) for name in ("n1", "n2")],
        }
    )
    broker.accesses["alice"] = Access(
        user="alice",
        enforced=["associations"],
        associations=[
            Association(account="root", default=True, stopped=True),
            Association(account="physics", qos=["normal"]),
        ],
    )
    return broker


def test_only_nodes_that_take_my_jobs_can_be_booked(limited: FakeBroker, program: Program) -> None:
    kinds = program.ask("get", "bookings/kinds").json()
    assert sorted(kind["partition"] for kind in kinds) == ["mine", "open"]
    start = (timezone.now() + timedelta(days=1)).replace(microsecond=0).isoformat()
    proposed = {"partition": "gpu", "gpu_type": "a100", "gpus_per_node": 4, "start": start, "minutes": 60}
    answer = program.ask("post", "bookings", proposed)
    assert answer.status_code == 422
    assert answer.json()["field"] == "partition" and "does not take jobs" in answer.json()["detail"]
    assert not Booking.objects.exists() and not limited.reservations
    assert program.ask("post", "bookings", proposed | {"partition": "open"}).status_code == 201


def test_a_user_who_just_lost_a_partition_books_nothing_in_it(
    limited: FakeBroker, program: Program, alice: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carme_webui.cluster.ACCESS_SECONDS", HANG)
    start = (timezone.now() + timedelta(days=1)).replace(microsecond=0).isoformat()
    proposed = {"partition": "mine", "gpu_type": "a100", "gpus_per_node": 4, "start": start, "minutes": 60}
    known = access_for(alice)
    limited.accesses["alice"] = known.model_copy(update={"associations": known.associations[:1]})
    assert access_for(alice) == known, "pages may show what was"
    answer = program.ask("post", "bookings", proposed)
    assert answer.status_code == 422 and answer.json()["field"] == "partition"
    assert not Booking.objects.exists() and not limited.reservations


def test_a_booking_for_a_project_needs_a_partition_that_takes_its_account(
    limited: FakeBroker, program: Program, alice: User
) -> None:
    project = Project.objects.create(name="speech", title="Speech")
    Membership.objects.create(project=project, user=alice)
    limited.accesses["alice"] = Access(user="alice")
    start = (timezone.now() + timedelta(days=1)).replace(microsecond=0).isoformat()
    proposed = {"partition": "gpu", "gpu_type": "a100", "gpus_per_node": 4, "start": start, "minutes": 60}
    answer = program.ask("post", "bookings", proposed | {"project": "speech"})
    assert answer.status_code == 422 and "of the account 'carme-speech'" in answer.json()["detail"]
    assert (
        program.ask("post", "bookings", proposed | {"project": "speech", "partition": "open"}).status_code
        == 201
    )


def test_what_the_portal_runs_for_somebody_goes_where_slurm_takes_it(limited: FakeBroker) -> None:
    request = JobRequest(name="image-a", kind="batch", command=["a"], minutes=10)
    placed = fitted(request, limited.cluster, "alice", 2, 1000)
    assert (placed.partition, placed.account) == ("open", "physics")
    limited.accesses["alice"] = Access(user="alice")
    everywhere = limited.cluster.model_copy(
        update={"partitions": [Partition(name="gpu", default=True, node_names=["n1"])]}
    )
    same = fitted(request, everywhere, "alice", 2, 1000)
    assert (same.partition, same.account) == (None, None)


def test_partitions_that_refuse_a_projects_account_are_named(
    limited: FakeBroker, browser: Browser, program: Program, alice: User
) -> None:
    project = Project.objects.create(name="speech", title="Speech")
    Membership.objects.create(project=project, user=alice)
    page = words(browser.get(project.get_absolute_url()))
    assert "do not take jobs of the account carme-speech: gpu." in page and "AllowAccounts" in page
    assert program.ask("get", "projects/speech").json()["refused_partitions"] == ["gpu"]
    Project.objects.update(partitions=["open"])
    assert "do not take jobs of the account" not in words(browser.get(project.get_absolute_url()))
    assert program.ask("get", "projects/speech").json()["refused_partitions"] == []


def test_programs_learn_accounts_and_hidden_partitions_of_their_user(
    limited: FakeBroker, program: Program
) -> None:
    known = program.ask("get", "profile").json()["associations"]
    assert [(entry["account"], entry["stopped"]) for entry in known] == [("root", True), ("physics", False)]
    shown = program.ask("get", "cluster").json()["partitions"]
    assert [partition["name"] for partition in shown] == ["gpu", "open", "mine"]
    job = {"command": ["a"], "partition": "open", "account": "physics", "qos": "normal", "minutes": 5}
    assert program.ask("post", "jobs", job).status_code == 201
    (sent,) = limited.requests_of("submit")
    assert (sent.request.account, sent.request.qos) == ("physics", "normal")
    assert settings.SITE.slurm.default_account is None  # else that would pay


def test_a_project_that_was_joined_just_now_can_pay_at_once(
    limited: FakeBroker, alice: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this process remembers of a user lacks the new account."""
    monkeypatch.setattr("carme_webui.cluster.ACCESS_SECONDS", 3600.0)
    assert access_for(alice).accounts == access_for(alice).accounts == ["physics"]
    assert len(limited.requests_of("access")) == 1
    project = Project.objects.create(name="speech", title="Speech", granted=timezone.now())
    Membership.objects.create(project=project, user=alice)
    known = limited.accesses["alice"]
    joined = [*known.associations, Association(account=project.account)]
    limited.accesses["alice"] = known.model_copy(update={"associations": joined})
    again = User.objects.get(pk=alice.pk)
    assert access_for(again).accounts == ["physics", "carme-speech"]
    assert access_for(again).accounts == ["physics", "carme-speech"]
    assert len(limited.requests_of("access")) == 2
