"""The calendar's table: its columns, cells and entries."""

from datetime import datetime, timedelta

import pytest
from django.utils import timezone, translation

from carme.broker.protocol import RunningJob
from carme.jobs import Reservation
from carme_webui.bookings import table
from carme_webui.bookings.lanes import Item, lay_out, slots_of
from carme_webui.clocks import site_zone
from carme_webui.cluster import Reservations, RunningJobs


def test_a_job_without_a_limit_or_a_name_is_nobodys_own() -> None:
    job = RunningJob(id=7, user="", node_list="n1", started=timezone.now(), ends=None, reservation="")
    for reader, label in ((None, "In use"), ("alice", "In use"), ("", "My job 7")):
        [item] = table._of_job(job, ["n1"], reader).values()
        assert (item.label, item.words, bool(item.url)) == (label, "no time limit", reader == "")
    with translation.override("de"):
        [item] = table._of_job(job, ["n1"], None).values()
        assert item.words == "kein Zeitlimit"


def test_days_have_the_hours_of_their_clocks(rules) -> None:
    half_hour = timedelta(minutes=30)
    counts = [
        len(slots_of(day, 1, half_hour, site_zone())[0].slots)
        for day in (datetime(2026, 3, 29).date(), datetime(2026, 10, 25).date(), datetime(2026, 6, 1).date())
    ]
    assert counts == [46, 50, 48]
    (long,) = slots_of(datetime(2026, 10, 25).date(), 1, timedelta(hours=3), site_zone())
    assert [(slot.end - slot.start) / timedelta(hours=1) for slot in long.slots] == [3] * 8 + [1]


def test_columns_with_the_same_content_are_one_cell() -> None:
    days = slots_of(datetime(2026, 6, 1).date(), 1, timedelta(hours=6), site_zone())
    start = days[0].slots[0].start
    item = Item("n1", start + timedelta(hours=7), start + timedelta(hours=13), "mine", "A")
    endless = Item("n2", start, None, "job", "B")
    nodes = [("n1", True), ("n2", False)]
    first, two = lay_out(
        nodes, [item, endless], days, lambda node, available, slots: f"{node} {available} {len(slots)}"
    )
    assert [(cell.span, len(cell.items), cell.free) for cell in first.cells] == [
        (1, 0, "n1 True 1"), (2, 1, ""), (1, 0, "n1 True 1"),
    ]  # fmt: skip
    assert [(cell.span, cell.items) for cell in two.cells] == [(4, (endless,))]


def test_running_jobs_are_found_by_node_and_by_user() -> None:
    started = timezone.now()
    first, two = (
        RunningJob(id=number, user=user, node_list="", started=started, ends=None, reservation="")
        for number, user in ((1, "alice"), (2, "bob"))
    )
    running = RunningJobs([(first, ["n1", "n2"]), (two, ["n2"])])
    assert running.on_node("n2") == [first, two] and running.on_node("n1") == [first]
    assert running.of_user("bob") == [(two, ["n2"])]
    assert running.on_node("n9") == running.of_user("carol") == []
    assert running.on_node("n2") is running.on_node("n2"), "it is found once for all pages"


def test_reservations_that_are_no_bookings_are_distinguished() -> None:
    now = timezone.now()
    found = [Reservation(name=name, start=now, end=now) for name in ("carme-0123456789ab", "course")]
    assert [reservation.name for reservation in Reservations(found).of_others] == ["course"]
    assert Reservations(found) == found and Reservations().of_others == []


def _job(number: int, user: str) -> RunningJob:
    started = datetime(2026, 6, 1, tzinfo=site_zone())
    return RunningJob(id=number, user=user, node_list="", started=started, ends=None, reservation="")


def test_a_table_is_rendered_again_only_for_other_jobs_on_its_nodes_or_reservations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    created: list[object] = []
    monkeypatch.setattr(table, "SECONDS", 3600.0)
    monkeypatch.setattr(table.notifier, "bookings_version", lambda: "1")
    monkeypatch.setattr(table, "_make", lambda *given: created.append(given) or len(created))
    zone, nodes = site_zone(), [("n1", True)]
    now = timezone.now()
    shown = table.Shown.at(now, "week", now.date(), "gpu:a100:4", zone)
    running, reservations = RunningJobs(), Reservations()
    known = [table._common(shown, nodes, running, reservations) for _ in range(2)]
    assert known == [1, 1]
    elsewhere = RunningJobs([(_job(7, "alice"), ["n2"])])
    assert table._common(shown, nodes, elsewhere, reservations) == 1, "no shown node has another job"
    here = RunningJobs([(_job(8, "alice"), ["n1"])])
    assert table._common(shown, nodes, here, reservations) == 2
    same = RunningJobs([(_job(8, "alice"), ["n1"]), (_job(9, "bob"), ["n2"])])
    assert table._common(shown, nodes, same, reservations) == 2, "the same job of a later answer"
    assert table._common(shown, nodes, running, reservations) == 3, "the job has ended"
    assert table._common(shown, nodes, running, Reservations()) == 4
    assert table._common(shown, nodes, running, reservations) == 5, "of each table the latest is kept"
