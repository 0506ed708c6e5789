"""What is made once for many pages: it is renewed when something is new, and nobody gets another's."""

import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from django.conf import settings
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone, translation

from carme.api import Overview
from carme.bookings import Cause
from carme.errors import BrokerUnavailable
from carme.jobs import Access, Association, Cluster, Partition
from carme_webui import cluster
from carme_webui.accounts.models import User
from carme_webui.announcements.models import Maintenance, News
from carme_webui.api import schemas
from carme_webui.bookings import table
from carme_webui.bookings.models import Booking
from carme_webui.caches import DerivedValues, ObjectCache, cache_key, shared
from carme_webui.cluster import ClusterCache, shown_seconds
from carme_webui.images.models import ImageState, OwnImage
from carme_webui.jobs.mirror import mirror
from carme_webui.jobs.models import OLD_AFTER, Mirror
from carme_webui.notifier import notifier
from carme_webui.projects.models import Membership, Project, usable_by
from carme_webui.sessions.forms import StartForm
from carme_webui.sessions.models import Preset, Session
from patience import HANG

from .conftest import Browser, Program, program_of
from .fake_broker import CLUSTER, FakeBroker, make_job


def page(browser: Browser, path: str = "/") -> str:
    answer = browser.get(path)
    assert answer.status_code == 200
    return answer.content.decode()


def test_a_shared_value_is_queried_again_after_a_change_and_after_a_while(
    monkeypatch: pytest.MonkeyPatch, caching: None
) -> None:
    queried: list[int] = []

    def query() -> int:
        queried.append(1)
        return len(queried)

    assert [shared("test", query), shared("test", query)] == [1, 1]
    notifier.notify(["alice"])  # is nothing that all see
    assert shared("test", query) == 1
    notifier.notify_all()
    assert [shared("test", query), shared("test", query)] == [2, 2]
    monkeypatch.setattr("carme_webui.caches.SHARED_SECONDS", 0.0)
    notifier.notify_all()
    assert [shared("test", query), shared("test", query)] == [3, 4]


def test_what_changes_while_it_is_queried_is_not_missed(caching: None) -> None:
    queried: list[int] = []

    def query() -> int:
        queried.append(1)
        if len(queried) == 1:
            notifier.notify_all()  # after the poll, before the answer
        return len(queried)

    assert [shared("test", query) for _ in range(3)] == [1, 2, 2]


def test_each_language_has_its_own_key() -> None:
    keys = {cache_key("a", 1), cache_key("a", 2), cache_key("b", 1)}
    with translation.override("de"):
        keys.add(cache_key("a", 1))
    assert len(keys) == 4 and cache_key("a", 1) in keys


def test_news_and_maintenance_are_on_pages_at_once_and_go_at_once(
    root: Browser, browser: Browser, broker: FakeBroker, caching: None
) -> None:
    assert "New GPUs" not in page(browser) and "cables" not in page(browser, "/jobs/")
    form = "/announcements/new/"
    root.send(form, form, title="New GPUs", text="Eight")
    assert "New GPUs" in page(browser)
    root.send("/announcements/", f"/announcements/{News.objects.get().pk}/delete/")
    assert "New GPUs" not in page(browser)
    Maintenance.objects.create(
        title="New cables", node_names=["n1"], start=timezone.now(), end=timezone.now() + timedelta(hours=1)
    )
    notifier.notify_all()
    assert "New cables" in page(browser, "/jobs/")


def test_why_the_mirror_is_silent_is_reported_at_once(
    browser: Browser, broker: FakeBroker, caching: None
) -> None:
    Mirror.load()
    assert "is away" not in page(browser)
    Mirror.objects.update(failure="Slurm is away.")
    notifier.notify_all()
    assert "Slurm is away." in page(browser) and "Slurm is away." in page(browser, "/jobs/")


def test_a_broker_that_hangs_holds_up_one_page(broker: FakeBroker) -> None:
    requested, answer = threading.Semaphore(0), threading.Event()

    def ask() -> str:
        requested.release()
        assert answer.wait(HANG)
        return "new"

    shown = ClusterCache()
    shown.seconds = 0.0  # as if the broker took longer than its answers are shown
    assert shown._cached("test", lambda: "old") == "old"
    with ThreadPoolExecutor(2) as pages:
        first = pages.submit(shown._cached, "test", ask)
        assert requested.acquire(timeout=HANG)
        try:
            assert pages.submit(shown._cached, "test", ask).result(HANG) == "old"
        finally:
            answer.set()
        assert first.result(HANG) == "new" and not requested.acquire(blocking=False)


def test_no_page_waits_for_a_broker_that_takes_long_while_there_is_an_answer(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "SLOW_SECONDS", 0.0)
    answer, given = threading.Event(), threading.Event()

    def ask() -> str:
        assert answer.wait(HANG)
        return "new"

    shown = ClusterCache()
    assert shown._cached("test", lambda: "old") == "old"
    cluster.caches["pages"].delete("broker-test-new")  # as if its time were over
    assert shown._cached("test", ask) == shown._cached("test", ask) == "old"
    answer.set()
    while shown._cached("test", ask) == "old":
        assert not given.wait(0.01)


def test_a_short_question_holds_up_no_page_either_while_the_broker_is_busy(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()

    def ask() -> str:
        assert answer.wait(HANG)
        return "new"

    monkeypatch.setattr(cluster, "SLOW_SECONDS", HANG)  # this thread may have had to wait for a processor
    shown = ClusterCache()
    assert shown._cached("test", lambda: "old") == "old"
    monkeypatch.setattr(cluster, "WAIT_SECONDS", HANG)
    cluster.caches["pages"].delete("broker-test-new")  # as if its time were over
    assert shown._cached("test", lambda: "renewed") == "renewed", "an answer that comes at once is shown"
    monkeypatch.setattr(cluster, "WAIT_SECONDS", 0.001)
    cluster.caches["pages"].delete("broker-test-new")
    try:
        assert shown._cached("test", ask) == "renewed"
    finally:
        answer.set()
        assert shown._asking["test"].acquire(timeout=HANG), "it asks no more"


def test_where_no_thread_can_be_made_a_later_page_asks(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(cluster, "WAIT_SECONDS", HANG)
    monkeypatch.setattr(cluster, "SLOW_SECONDS", HANG)
    shown = ClusterCache()
    assert shown._cached("test", lambda: "old") == "old"
    cluster.caches["pages"].delete("broker-test-new")  # as if its time were over
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", fail)
        assert shown._cached("test", lambda: "new") == "old"
    assert shown._cached("test", lambda: "new") == "new"


def test_concurrent_requests_for_a_new_answer_share_one(broker: FakeBroker) -> None:
    waiting, requested, answer = threading.Semaphore(0), threading.Semaphore(0), threading.Event()
    lock, questions = threading.Lock(), list[int]()

    def acquire(blocking: bool = True) -> bool:
        waiting.release()
        return lock.acquire(blocking)

    def ask() -> int:
        questions.append(1)
        number = len(questions)
        requested.release()
        assert answer.wait(HANG)
        return number

    shown = ClusterCache()
    shown._asking["test"] = cast(threading.Lock, SimpleNamespace(acquire=acquire, release=lock.release))
    with ThreadPoolExecutor(4) as pages:
        try:
            first = pages.submit(shown._cached, "test", ask, anew=True)
            assert requested.acquire(timeout=HANG)
            later = [pages.submit(shown._cached, "test", ask, anew=True) for _ in range(3)]
            for _ in range(4):
                assert waiting.acquire(timeout=HANG)
        finally:
            answer.set()
        # The first request was sent before the others came: its answer may be too old for them.
        assert first.result(HANG) == 1 and [future.result(HANG) for future in later] == [2, 2, 2]
    assert shown._cached("test", ask, anew=True) == 3


def test_what_a_user_may_use_holds_up_no_page_but_who_just_joined_a_project_waits_for_it(
    alice: User, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.cluster_cache, "seconds", None)
    monkeypatch.setattr(cluster, "WAIT_SECONDS", 0.0)
    requested, answer = threading.Event(), threading.Event()
    real = cluster.broker

    def busy() -> Any:
        requested.set()
        assert answer.wait(HANG)
        return real()

    before = cluster.access_of("alice")
    broker.accesses["alice"] = Access(user="alice", groups=["staff"])
    monkeypatch.setattr(cluster, "broker", busy)
    assert cluster.access_of("alice") == before != broker.accesses["alice"]
    assert requested.wait(HANG)
    answer.set()
    assert cluster.access_of("alice", anew=True) == broker.accesses["alice"]


def test_an_answer_that_stayed_the_same_is_not_read_again(broker: FakeBroker) -> None:
    broker.cluster = CLUSTER.model_copy(update={"taken": timezone.now()})
    shown = ClusterCache()
    shown.seconds = 0.0
    nodes, jobs = shown.cluster(), shown.running()
    assert shown.cluster() is nodes and shown.running() is jobs == []
    broker.cluster = nodes.model_copy(update={"taken": timezone.now()})
    assert shown.cluster() == broker.cluster != nodes
    broker.queue[7] = make_job(7, state="RUNNING", started=timezone.now(), node_list="n[1-2]")
    ((job, names),) = shown.running()
    assert (job.id, names) == (7, ["n1", "n2"])


def test_what_takes_the_broker_long_is_requested_less_often() -> None:
    assert shown_seconds(1.25, 0.01) == 1.25, "an ordinary site sees each poll of Slurm"
    assert shown_seconds(1.25, 0.2) == pytest.approx(4.0)
    assert shown_seconds(1.25, 9.0) == cluster.REST_SECONDS
    assert shown_seconds(10.0, 9.0) == 10.0


def test_a_failure_is_shown_no_longer_however_long_it_took(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 100, 9))
    monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    shown: dict[str, float] = {}
    cache = SimpleNamespace(
        get=lambda key: None, set=lambda key, _value, seconds: shown.update({key: seconds})
    )
    monkeypatch.setattr(cluster, "caches", {"pages": cache})

    def fail() -> str:
        raise BrokerUnavailable("The broker does not answer.")

    cluster_cache = ClusterCache()
    assert cluster_cache._cached("slow", lambda: "answer") == "answer"
    with pytest.raises(BrokerUnavailable):
        cluster_cache._cached("failed", fail)
    least = settings.SITE.slurm.poll_seconds
    assert shown["broker-slow-new"] == max(least, cluster.REST_SECONDS)
    assert shown["broker-failed-new"] == least < cluster.REST_SECONDS


def test_values_derived_from_a_snapshot_are_computed_once_and_dropped_with_it() -> None:
    values, created = DerivedValues(), list[str]()

    def make(word: str) -> str:
        created.append(word)
        return word

    first, second = CLUSTER.model_copy(), CLUSTER.model_copy()
    assert first == second, "that they are equal does not make them the same"
    for source, key in ((first, "a"), (first, "a"), (first, "b"), (second, "a"), (first, "a")):
        assert values.get(source, key, lambda _source, key=key: make(key)) == key
    assert created == ["a", "b", "a"] and len(values) == 2
    del first, source
    gc.collect()
    assert len(values) == 1
    assert values.get(second, "a", lambda _source: make("new")) == "a"


def test_what_was_used_of_a_snapshot_is_made_of_the_next_one_ahead() -> None:
    values, created = DerivedValues(), list[str]()

    def limited(whole: Cluster) -> Cluster:
        created.append("limited")
        return whole.limited_to(whole.partitions[:1])

    def names(some: Cluster) -> list[str]:
        created.append("names")
        return [node.name for node in some.nodes]

    first, second, third = (CLUSTER.model_copy() for _ in range(3))
    fewer = values.get(first, "limited", limited)
    assert values.get(fewer, "names", names) == ["n1", "n2"]
    values.renew(first, second)
    assert created == ["limited", "names"] * 2
    assert values.get(values.get(second, "limited", limited), "names", names) == ["n1", "n2"]
    assert len(created) == 4, "nobody waits for it"
    values.renew(second, third)
    values.renew(third, CLUSTER.model_copy())
    assert len(created) == 6, "what nobody requested is not made for ever"
    del first, second, third, fewer
    gc.collect()
    assert len(values) == 0


def test_pages_find_what_they_derive_of_a_new_answer(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "BROKER_TIMEOUT", HANG)  # so long the earlier answer stays
    shown = ClusterCache()
    shown.seconds = 0.0
    first = shown.cluster()
    cluster.supplies(first)
    broker.cluster = CLUSTER.model_copy(update={"nodes": CLUSTER.nodes[:1]})
    second = shown.cluster()
    assert second is not first
    created = cluster.derived.get(second, "supplies", lambda _source: pytest.fail("it was to be made ahead"))
    assert created == cluster.supplies(second) != cluster.supplies(first)


def test_a_large_cluster_is_written_once_for_all_readers_and_nobody_sees_anothers_partition(
    program: Program, bob: User, broker: FakeBroker, caching: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = Partition(name="mine", hidden=True, accounts=["physics"], node_names=["n1"])
    partitions = [*broker.cluster.partitions, hidden]
    broker.cluster = broker.cluster.model_copy(update={"partitions": partitions})
    paid = [Association(account="physics", qos=["normal"])]
    broker.accesses["alice"] = Access(user="alice", enforced=["associations"], associations=paid)
    written: list[int] = []
    dump = schemas.dump_nodes
    monkeypatch.setattr(schemas, "dump_nodes", lambda nodes: written.append(len(nodes)) or dump(nodes))
    bobs_program, answers = program_of(bob), list[Any]()
    for _ in range(2):
        answers = [who.ask("get", "cluster") for who in (program, bobs_program)]
        hers, his = (Overview.model_validate_json(answer.content) for answer in answers)
        names, known = ({partition.name for partition in each.partitions} for each in (hers, his))
        assert names - known == {"mine"}
        assert hers.nodes == his.nodes == broker.cluster.nodes and hers.gpus == his.gpus
        assert hers.taken == his.taken
    assert written == [3]
    assert json.loads(answers[0].content).keys() == Overview.model_fields.keys()
    assert answers[0]["Content-Type"].startswith("application/json")
    assert answers[0]["Cache-Control"] == "no-store"


def test_the_same_nodes_are_shared_by_all_who_may_use_the_same_partitions(
    alice: User, bob: User, broker: FakeBroker
) -> None:
    limited = [Partition(name="vision", accounts=["vision"], node_names=["n3"]), *CLUSTER.partitions]
    whole = CLUSTER.model_copy(update={"partitions": limited})
    for name, accounts in (("alice", ["physics"]), ("bob", ["physics"]), ("carol", ["vision"])):
        paid = [Association(account=account, qos=["normal"]) for account in accounts]
        broker.accesses[name] = Access(user=name, enforced=["associations"], associations=paid)
    carol = User.objects.create_user("carol")
    hers, his = usable_by(alice, whole), usable_by(bob, whole)
    assert (
        hers is his
        and hers is not None
        and [partition.name for partition in hers.partitions] == ["gpu", "cpu"]
    )
    assert usable_by(carol, whole) is whole


def test_a_mirror_that_nobody_reads_is_reported(
    browser: Browser, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    Mirror.load()
    Mirror.objects.update(updated=timezone.now() - OLD_AFTER / 2)
    with monkeypatch.context() as patient:
        patient.setattr("carme_webui.jobs.models.OLD_AFTER", timedelta(seconds=HANG))
        assert "carme-sync" not in page(browser)
    Mirror.objects.update(updated=timezone.now() - 2 * OLD_AFTER)
    assert "carme-sync" in page(browser) and "carme-sync" in page(browser, "/jobs/")


def test_pages_say_at_once_that_the_mirror_is_read_again(
    browser: Browser, broker: FakeBroker, caching: None
) -> None:
    Mirror.load()
    Mirror.objects.update(updated=timezone.now() - 2 * OLD_AFTER, cursor="", swept=timezone.now())
    assert "carme-sync" in page(browser)
    mirror(cluster.broker())
    assert "carme-sync" not in page(browser)


def test_links_for_administrators_are_theirs_alone(
    root: Browser, browser: Browser, broker: FakeBroker, caching: None
) -> None:
    for path, here in (("/", "/"), ("/jobs/", "/jobs/"), ("/images/", "/images/")):
        for who, staff in ((root, True), (browser, False), (root, True)):
            text = page(who, path)
            assert ('href="/admin/"' in text) is staff
            assert text.count('aria-current="page"') == 1 and f'href="{here}" aria-current="page"' in text


def test_what_only_one_may_start_in_is_in_no_other_form(
    browser: Browser, bobs_browser: Browser, alice: User, broker: FakeBroker, rules: Any, caching: None
) -> None:
    now = timezone.now()
    project = Project.objects.create(name="secret", title="The secret one", granted=now)
    Membership.objects.create(project=project, user=alice)
    OwnImage.objects.create(
        owner=alice, name="mine", title="Hers alone", kind="requirements", text="", file="/home/alice/x.sif",
        state=ImageState.READY,
    )  # fmt: skip
    Booking.objects.create(
        owner=alice, partition="gpu", gpu_type="a100", gpus_per_node=4, node_names=["n1"],
        start=now + timedelta(hours=1), end=now + timedelta(hours=2), state="approved", reserved=now,
        title="Her booking",
    )  # fmt: skip
    Preset.objects.create(
        owner=alice, name="Her preset", options={"image": "torch", "minutes": 60, "title": ""}
    )
    hers = ("The secret one", "Hers alone", "Her booking", "Her preset")
    for _ in range(2):
        shown, bobs_page = page(browser), page(bobs_browser)
        assert all(words in shown for words in hers)
        assert not [words for words in hers if words in bobs_page]
    # What an address fills in is in that page alone.
    assert 'value="Only &lt;mine&gt;"' in page(browser, "/?title=Only+<mine>&nodes=2")
    assert "Only" not in page(bobs_browser) and "Only" not in page(browser)


def test_users_with_the_same_options_share_one_form(
    browser: Browser, bobs_browser: Browser, broker: FakeBroker, caching: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    created: list[str | None] = []
    make = StartForm._rendered
    monkeypatch.setattr(
        StartForm, "_rendered", lambda form: created.append(translation.get_language()) or make(form)
    )
    first = page(browser)
    page(bobs_browser)
    assert created == ["en"]
    german = browser.get("/", headers={"accept-language": "de"}).content.decode()
    assert created == ["en", "de"] and "Stunden" in german and ">Hours</label>" in first
    # Each has a name of its own, or the second of two sessions would be the first.
    names = {page(browser).split('name="name" value="')[1].split('"')[0] for _ in range(3)}
    assert len(names) == 3
    refused = browser.send("/", "/sessions/start/", image="torch", gpus_per_node=1, nodes=99, minutes=60)
    assert refused.status_code == 422 and 'value="99"' in refused.content.decode()
    assert created == ["en", "de", "en"], "what was sent is in no other form"
    assert 'value="99"' not in page(browser) and created == ["en", "de", "en"]


def test_recent_sessions_are_those_that_run_and_a_few_that_ended(alice: User, bob: User) -> None:
    now = timezone.now()
    options = {"image": "torch", "minutes": 60, "title": ""}

    def make(number: int, owner: User, state: str, hours: int) -> None:
        when = now - timedelta(hours=hours)
        Session.objects.create(
            name=f"s{number:08}", owner=owner, state=state, options=options, created=when, changed=when
        )

    for number in range(8):
        make(number, alice, "ended", number)
    make(20, alice, "ready", 100)
    make(21, bob, "ready", 1)
    since = now - timedelta(hours=2, minutes=30)
    names = [row.name for row in Session.recent_of(alice, since)]
    assert names == ["s00000000", "s00000001", "s00000002", "s00000020"]
    assert len(Session.recent_of(alice, now - timedelta(days=1))) == 6  # five that ended, and the other
    assert [row.name for row in Session.recent_of(bob, since)] == ["s00000021"]
    with CaptureQueriesContext(connection) as requested:
        assert all(row.owner.username == "alice" for row in Session.recent_of(alice, since))
    assert len(requested) == 1


def test_who_is_named_in_a_booking_may_use_it(alice: User, bob: User) -> None:
    now = timezone.now()
    ali = User.objects.create_user("ali")
    row = Booking.objects.create(
        owner=bob, partition="gpu", gpu_type="a100", gpus_per_node=4, node_names=["n1"], users=["alice"],
        start=now, end=now + timedelta(hours=2), state="approved", reserved=now,
    )  # fmt: skip
    assert Booking.usable(alice, now) == [row] == Booking.usable(bob, now)
    assert Booking.usable(ali, now) == [] == Booking.related_to(ali)  # a part of a name does not match
    Booking.objects.update(offered_to=ali)
    assert Booking.related_to(ali) == [row] and Booking.usable(ali, now) == []
    Booking.objects.update(state="ended")
    assert Booking.related_to(ali) == [] == Booking.usable(alice, now)


# --- the calendar ----------------------------------------------------------------------------------------


def booked(owner: User, node: str, title: str, **values: Any) -> Booking:
    now = timezone.now()
    given = {
        "start": now + timedelta(hours=30),
        "end": now + timedelta(hours=40),
        "state": "approved",
    } | values
    return Booking.objects.create(
        owner=owner, partition="gpu", gpu_type="a100", gpus_per_node=4, node_names=[node], title=title,
        reserved=now, **(given | values),
    )  # fmt: skip


def test_the_calendar_shows_nobody_what_is_anothers(
    root: Browser, browser: Browser, bobs_browser: Browser, alice: User, broker: FakeBroker, rules: Any,
    caching: None,
) -> None:  # fmt: skip
    hers = booked(alice, "n1", "Her <plan>")
    broker.queue[7] = make_job(7, user="alice", state="RUNNING", started=timezone.now(), node_list="n2")
    address = f'href="{hers.get_absolute_url()}"'
    for _ in range(2):
        for who, shown in ((bobs_browser, False), (browser, True), (bobs_browser, False), (root, True)):
            table = page(who, "/bookings/").split("<tbody>")[1].split("</tbody>")[0]
            assert ("Her &lt;plan&gt;" in table, address in table) == (shown, shown), who
            assert ("My job 7" in table) is (who is browser)
            assert ("(alice)" in table) is (who is root)
            assert "<plan>" not in table and ("Booked" in table) is not shown
            assert table.count("<tr>") == 2
    hers.users = ["bob"]
    hers.save()
    calendar = page(bobs_browser, "/bookings/")
    assert "Her &lt;plan&gt;" in calendar and 'class="shared"' in calendar


def test_changes_of_bookings_are_in_everybodys_calendar_at_once(
    browser: Browser, bobs_browser: Browser, alice: User, broker: FakeBroker, rules: Any, caching: None
) -> None:
    def taken(who: Browser) -> int:
        return page(who, "/bookings/").split("<tbody>")[1].count('class="item"')

    assert (taken(browser), taken(bobs_browser)) == (0, 0)
    hers = booked(alice, "n1", "plan")
    assert (taken(browser), taken(bobs_browser)) == (1, 1)
    requested = booked(alice, "n2", "wanted", state="requested")
    assert (taken(browser), taken(bobs_browser)) == (2, 2)
    assert 'class="requested"' in page(bobs_browser, "/bookings/")
    assert hers.move(Cause.CANCELLED) and (taken(browser), taken(bobs_browser)) == (1, 1)
    requested.delete()
    assert (taken(browser), taken(bobs_browser)) == (0, 0)


def test_the_calendar_requests_what_runs_and_no_jobs_that_wait(
    browser: Browser, alice: User, broker: FakeBroker, rules: Any, caching: None
) -> None:
    broker.queue[7] = make_job(7, user="alice", state="RUNNING", started=timezone.now(), node_list="n2")
    assert "My job 7" in page(browser, "/bookings/")
    assert len(broker.requests_of("running")) == 1 and broker.requests_of("jobs") == []


def test_what_is_the_same_for_all_readers_of_the_calendar_is_made_once(
    browser: Browser, bobs_browser: Browser, alice: User, broker: FakeBroker, rules: Any, caching: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    created: list[str | None] = []
    make = table._make
    monkeypatch.setattr(
        table, "_make", lambda *given: created.append(translation.get_language()) or make(*given)
    )
    booked(alice, "n1", "plan")
    for who in (browser, bobs_browser, browser):
        page(who, "/bookings/")
    assert created == ["en"]
    german = bobs_browser.get("/bookings/", headers={"accept-language": "de"}).content.decode()
    assert created == ["en", "de"] and "Gebucht" in german
    assert "Gebucht" not in page(bobs_browser, "/bookings/")
    page(bobs_browser, "/bookings/?view=day")
    assert created == ["en", "de", "en"]


def test_numbers_in_the_cache_of_objects_are_counted() -> None:
    cached = ObjectCache("counted", {})
    cached.set("number", 5)
    assert (cached.incr("number", 2), cached.decr("number"), cached.get("number")) == (7, 6, 6)
    with pytest.raises(ValueError, match="not found"):
        cached.incr("nothing")
