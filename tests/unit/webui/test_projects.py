"""Projects: who may do what, and what Slurm gets."""

import json
from datetime import timedelta
from typing import Any

import pytest
from bs4 import BeautifulSoup
from django.core.cache import cache
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from carme.errors import SlurmError
from carme.projects import Use
from carme_webui.accounts.models import User
from carme_webui.cluster import broker as site_broker
from carme_webui.jobs.models import Job
from carme_webui.projects import services, use
from carme_webui.projects.models import Invitation, Membership, Project
from carme_webui.projects.reconcile import reconcile
from carme_webui.sessions.models import Session

from .conftest import Browser, text
from .fake_broker import FakeBroker, make_job

AWAY = SlurmError("Slurm does not answer.", "Wait.", code="slurm-away")
REFUSED = SlurmError("Slurm refused: it says no.", "Correct it.")
VISION = "carme-vision"
PAGE = "/projects/at/vision/"


@pytest.fixture
def vision(admin: User, alice: User, broker: FakeBroker) -> Project:
    """A project that alice manages."""
    return services.create(admin, "vision", "Computer vision", alice, site_broker())


# --- the journey -----------------------------------------------------------------------------------------


def test_an_admin_makes_a_project_its_manager_invites_and_slurm_follows(
    root: Browser, browser: Browser, bobs_browser: Browser, broker: FakeBroker
) -> None:
    answer = root.send(
        "/projects/new/", "/projects/new/", name="vision", title="Computer vision", manager="alice"
    )
    assert (answer.status_code, answer["Location"]) == (302, f"{PAGE}limits/")
    limits = {"title": "Computer vision", "partitions": ["gpu"], "gpus": 2, "minutes": "2h", "type-a100": 2}
    answer = root.send(f"{PAGE}limits/", f"{PAGE}limits/", **limits)
    assert answer.status_code == 302
    granted = broker.granted[VISION]
    assert granted.members == {"alice": ["gpu"]}
    assert (granted.resources, granted.minutes) == ({"gres/gpu": 2, "gres/gpu:a100": 2}, 120)

    assert browser.send(PAGE, PAGE, user="bob").status_code == 302
    assert set(broker.granted[VISION].members) == {"alice"}, "nobody is a member who has not agreed"
    assert "You are invited" in text(bobs_browser.get("/projects/"))
    number = Invitation.objects.get().pk
    answer = bobs_browser.send("/projects/", f"/projects/invitations/{number}/", answer="yes")
    assert (answer.status_code, answer["Location"]) == (302, PAGE)
    assert set(broker.granted[VISION].members) == {"alice", "bob"}
    assert broker.requests_of("grant")[-1].user == "bob"

    answer = browser.send(PAGE, f"{PAGE}members/bob/", do="remove")
    assert answer.status_code == 302
    assert set(broker.granted[VISION].members) == {"alice"}
    assert "bob is no longer a member of" in text(browser.get(PAGE))
    assert bobs_browser.get(PAGE).status_code == 404


def test_an_invitation_can_be_declined_and_withdrawn(
    browser: Browser, bobs_browser: Browser, vision: Project, bob: User
) -> None:
    browser.send(PAGE, PAGE, user="bob")
    number = Invitation.objects.get().pk
    bobs_browser.send("/projects/", f"/projects/invitations/{number}/", answer="no")
    assert not Invitation.objects.exists() and vision.memberships.count() == 1
    browser.send(PAGE, PAGE, user="bob")
    number = Invitation.objects.get().pk
    browser.send(PAGE, f"{PAGE}invitations/bob/")
    assert not Invitation.objects.exists()
    assert bobs_browser.send("/profile/", f"/projects/invitations/{number}/", answer="yes").status_code == 404


# --- who may not -----------------------------------------------------------------------------------------


def test_unauthenticated_peers_see_nothing(bobs_browser: Browser, vision: Project) -> None:
    assert "vision" not in text(bobs_browser.get("/projects/"))
    for page in (PAGE, f"{PAGE}limits/", "/projects/new/"):
        assert bobs_browser.get(page).status_code == 404
    for page in (PAGE, f"{PAGE}limits/", f"{PAGE}state/", f"{PAGE}members/alice/", f"{PAGE}invitations/x/"):
        assert bobs_browser.send("/profile/", page, do="remove", user="bob").status_code == 404
    assert vision.memberships.get().user.username == "alice"


def test_members_change_nothing_but_may_leave(
    browser: Browser, bobs_browser: Browser, vision: Project, bob: User, broker: FakeBroker
) -> None:
    Membership.objects.create(project=vision, user=bob)
    assert "Invite a user" not in text(bobs_browser.get(PAGE))
    assert bobs_browser.send(PAGE, PAGE, user="alice").status_code == 404
    bobs_browser.send(PAGE, f"{PAGE}members/alice/", do="member")
    bobs_browser.send(PAGE, f"{PAGE}members/bob/", do="manager")
    bobs_browser.send(PAGE, f"{PAGE}members/alice/", do="remove")
    assert "Only managers" in text(bobs_browser.get(PAGE))
    assert {member.user.username: member.manager for member in vision.memberships.all()} == {
        "alice": True,
        "bob": False,
    }
    assert bobs_browser.get(f"{PAGE}limits/").status_code == 404
    answer = bobs_browser.send(PAGE, f"{PAGE}members/bob/", do="remove")
    assert (answer.status_code, answer["Location"]) == (302, "/projects/")
    assert set(broker.granted[VISION].members) == {"alice"}


def test_managers_may_not_raise_limits(browser: Browser, vision: Project) -> None:
    token = browser.token(PAGE)
    assert browser.send_with(token, f"{PAGE}limits/", title="x", gpus=1000).status_code == 404
    assert browser.send_with(token, f"{PAGE}state/", do="close").status_code == 404
    assert browser.send_with(token, "/projects/new/", name="x", title="x", manager="alice").status_code == 404
    vision.refresh_from_db()
    assert vision.gpus is None and vision.closed is None and Project.objects.count() == 1


def test_a_project_keeps_a_manager(browser: Browser, vision: Project, bob: User) -> None:
    for what in ("remove", "member"):
        browser.send(PAGE, f"{PAGE}members/alice/", do=what)
        assert "only manager" in text(browser.get(PAGE))
    Membership.objects.create(project=vision, user=bob, manager=True)
    browser.send(PAGE, f"{PAGE}members/alice/", do="remove")
    assert [member.user.username for member in vision.memberships.all()] == ["bob"]


@pytest.mark.parametrize("name", ["", "A", "1x", "x y", "x,root", "-x", "x" * 33, "../x", "x\ny"])
def test_a_bad_name_gets_a_sentence(root: Browser, alice: User, broker: FakeBroker, name: str) -> None:
    answer = root.send("/projects/new/", "/projects/new/", name=name, title="t", manager="alice")
    assert answer.status_code == 422 and 'aria-invalid="true"' in text(answer)
    assert not Project.objects.exists() and not broker.granted


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"gpus": "-1"}, "greater than or equal to 0"),
        ({"gpus": "x"}, "whole number"),
        ({"gpus": "99999999999999999999"}, "less than or equal to"),
        ({"minutes": "soon"}, "&#x27;soon&#x27;"),
        ({"partitions": ["secret"]}, "secret"),
        ({"type-a100": "-2"}, "greater than or equal to 0"),
        ({"title": "a\u202eb"}, "cannot be seen"),
    ],
)
def test_bad_limits_get_a_sentence(root: Browser, vision: Project, fields: Any, sentence: str) -> None:
    answer = root.send(f"{PAGE}limits/", f"{PAGE}limits/", **({"title": "t"} | fields))
    assert answer.status_code == 422 and sentence in text(answer)


def test_markup_is_shown_as_it_is(root: Browser, browser: Browser, vision: Project) -> None:
    root.send(f"{PAGE}limits/", f"{PAGE}limits/", title="<script>alert(1)</script>")
    for page in ("/projects/", PAGE, "/"):
        assert "<script>alert" not in text(browser.get(page))


# --- when Slurm refuses or is away -----------------------------------------------------------------------


def test_what_slurm_refuses_leaves_all_as_it_was(root: Browser, vision: Project, broker: FakeBroker) -> None:
    broker.refusal = REFUSED
    answer = root.send(f"{PAGE}limits/", f"{PAGE}limits/", title="Other", gpus=7)
    assert answer.status_code == 422 and "it says no" in text(answer)
    vision.refresh_from_db()
    assert (vision.title, vision.gpus) == ("Computer vision", None)
    answer = root.send("/projects/new/", "/projects/new/", name="other", title="t", manager="alice")
    assert answer.status_code == 422 and not Project.objects.filter(name="other").exists()


def test_a_user_whom_slurm_refuses_stays_invited(
    browser: Browser, bobs_browser: Browser, vision: Project, bob: User, broker: FakeBroker
) -> None:
    browser.send(PAGE, PAGE, user="bob")
    broker.refusal = REFUSED
    answer = bobs_browser.send(
        "/projects/", f"/projects/invitations/{Invitation.objects.get().pk}/", answer="yes"
    )
    assert answer["Location"] == "/projects/" and "it says no" in text(bobs_browser.get("/projects/"))
    assert Invitation.objects.filter(user=bob).exists() and vision.memberships.count() == 1


def test_while_slurm_is_away_the_change_waits(
    root: Browser, vision: Project, broker: FakeBroker, alice: User
) -> None:
    broker.refusal = AWAY
    root.send(f"{PAGE}limits/", f"{PAGE}limits/", title="t", gpus=3)
    assert "keeps trying" in text(root.get(PAGE))
    assert broker.granted[VISION].resources == {}
    broker.refusal = None
    assert reconcile(site_broker())
    assert broker.granted[VISION].resources == {"gres/gpu": 3}
    vision.refresh_from_db()
    assert vision.granted and not vision.problem


def test_a_sync_changes_nothing_where_all_match(vision: Project, broker: FakeBroker) -> None:
    before = len(broker.requests_of("grant"))
    use = Use(gpus=1, jobs=1, gpu_hours=12.5)
    broker.granted[VISION] = broker.granted[VISION].model_copy(update={"use": use})
    reconcile(site_broker())
    assert len(broker.requests_of("grant")) == before
    vision.refresh_from_db()
    assert vision.use == use


def test_what_slurm_lost_or_somebody_changed_is_made_again(vision: Project, broker: FakeBroker) -> None:
    broker.granted[VISION] = broker.granted[VISION].model_copy(update={"members": {"mallory": [""]}})
    reconcile(site_broker())
    assert set(broker.granted[VISION].members) == {"alice"}
    broker.granted.clear()
    reconcile(site_broker())
    assert set(broker.granted[VISION].members) == {"alice"}


def test_a_closed_project_has_nobody_and_opens_again(
    root: Browser, browser: Browser, vision: Project, broker: FakeBroker
) -> None:
    root.send(PAGE, f"{PAGE}state/", do="close")
    assert broker.granted[VISION].members == {}
    assert "Computer vision" not in text(browser.get("/")), "the start form offers it no more"
    root.send(PAGE, f"{PAGE}state/", do="reopen")
    assert set(broker.granted[VISION].members) == {"alice"}


def test_a_disabled_user_may_not_use_a_project(vision: Project, broker: FakeBroker, alice: User) -> None:
    alice.is_active = False
    alice.save()
    reconcile(site_broker())
    assert broker.granted[VISION].members == {}


# --- starting in a project -------------------------------------------------------------------------------

START: dict[str, Any] = {"image": "torch", "gpus_per_node": 1, "nodes": 1, "minutes": 60, "app": "lab"}


def test_a_session_runs_in_a_project(browser: Browser, vision: Project, hub, at_once) -> None:
    page = text(browser.get("/"))
    assert f'value="{VISION}"' in page and "Computer vision" in page
    answer = browser.send("/", "/sessions/start/", account=VISION, partition="gpu", **START)
    assert answer.status_code == 302
    assert Session.objects.get().requested_options.account == VISION


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ({"partitions": ["cpu"]}, "may use cpu, not"),
        ({"minutes": 30}, "for 30 minutes at most"),
        ({"gpus": 0}, "may use 0 GPUs at a time; 1 were requested"),
        ({"nodes": 0}, "may use 0 nodes"),
        ({"gpu_types": {"a100": 4}}, "so one must be named"),
        ({"gpu_hours": 0}, "has used up"),
    ],
)
def test_what_the_project_forbids_is_reported_at_once(
    browser: Browser, vision: Project, limits: dict[str, Any], sentence: str
) -> None:
    Project.objects.update(**limits)
    answer = browser.send("/", "/sessions/start/", account=VISION, partition="gpu", **START)
    assert answer.status_code == 422 and sentence in text(answer), text(answer)


def test_anothers_project_cannot_be_used(bobs_browser: Browser, vision: Project) -> None:
    answer = bobs_browser.send("/", "/sessions/start/", account=VISION, partition="gpu", **START)
    # Without projects the form has no such field and ignores it; Slurm would refuse it as well.
    assert answer.status_code == 302
    assert Session.objects.get().requested_options.account is None


# --- many rows -------------------------------------------------------------------------------------------


def test_no_page_asks_more_with_more_rows(
    root: Browser, admin: User, vision: Project, broker: FakeBroker
) -> None:
    def queries(act: Any) -> int:
        with CaptureQueriesContext(
            connection,
        ) as found:
            act()
        return len(found)

    acts = [
        lambda: root.get("/projects/"),
        lambda: root.get(PAGE),
        lambda: root.get("/"),
        lambda: reconcile(site_broker()),
    ]
    for act in acts:
        act()
    before = [queries(act) for act in acts]
    users = User.objects.bulk_create([User(username=f"u{number}") for number in range(30)])
    Membership.objects.bulk_create([Membership(project=vision, user=user) for user in users[:15]])
    Invitation.objects.bulk_create([Invitation(project=vision, user=user, by=admin) for user in users[15:]])
    more = Project.objects.bulk_create([Project(name=f"p{number}", title="t") for number in range(30)])
    Membership.objects.bulk_create([Membership(project=project, user=admin) for project in more])
    reconcile(site_broker())
    assert [queries(act) for act in acts] == before


# --- use by member and month -----------------------------------------------------------------------------


def _parts(browser: Browser) -> dict[str, list[float]]:
    """What the chart of the project's use shows, by part."""
    page = BeautifulSoup(text(browser.get(f"{PAGE}use/")), "html.parser")
    assert page.find("carme-chart"), page
    spec = json.loads(str(page.find("carme-chart")["data-chart"]))  # type: ignore[index]
    assert spec["unit"] == "GPU-hours" and len(spec["labels"]) == 6
    return {series["name"]: series["values"] for series in spec["series"]}


def test_a_project_s_use_is_shown_by_member_and_month(
    root: Browser,
    browser: Browser,
    bobs_browser: Browser,
    vision: Project,
    bob: User,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "No job of this project has run" in text(browser.get(f"{PAGE}use/"))
    assert bobs_browser.get(f"{PAGE}use/").status_code == 404
    Membership.objects.create(project=vision, user=bob)
    # In the middle of a month, so that no job runs over its end.
    now = timezone.now()
    middle = (now.replace(day=1, hour=12) - timedelta(days=1)).replace(day=15)

    def job(number: int, user: str, hours: int, gpus: int, account: str = VISION) -> Any:
        end = middle + timedelta(hours=hours)
        return make_job(
            number, user, "COMPLETED", account=account, gpus=gpus, submitted=middle, started=middle, ended=end
        )

    jobs = [job(1, "alice", 2, 4), job(2, "alice", 1, 1), job(3, "bob", 10, 2), job(4, "bob", 9, 4, "other")]
    Job.store(jobs)
    cache.clear()
    last = [0.0, 0.0, 0.0, 0.0]
    assert _parts(browser) == {"bob": [*last, 20.0, 0.0], "alice": [*last, 9.0, 0.0]}, "a manager sees each"
    assert _parts(root) == _parts(browser)
    assert _parts(bobs_browser) == {"bob": [*last, 20.0, 0.0], "the project's total": [*last, 29.0, 0.0]}
    # Past months are summed once a day, the one that runs more often.
    monkeypatch.setattr(use, "REMEMBERED", 0)
    cache.clear()
    assert _parts(browser)["bob"] == [*last, 20.0, 0.0]
    Job.store([job(5, "bob", 3, 2)])
    assert _parts(browser)["bob"] == [*last, 20.0, 0.0]
    cache.clear()
    assert _parts(browser)["bob"] == [*last, 26.0, 0.0]
