"""What will be free by Slurm's plan: running and planned jobs, reservations, broken nodes."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from carme.jobs import Cluster, Job, JobState, Node, Reservation, forecast
from carme.jobs.nodes import expand

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)


def node(name: str, **values: Any) -> Node:
    return Node.model_validate({"name": name, "cpus": 8, "memory_mb": 1000, "gpus": {"a100": 4}} | values)


def job(state: str = "RUNNING", **values: Any) -> Job:
    given: dict[str, Any] = {
        "id": 1, "name": "a", "user": "u", "state": JobState(state), "nodes": 1, "node_list": "n1", "gpus": 2,
        "gpu_type": "a100", "minutes_limit": 60, "started": NOW - timedelta(minutes=30),
    }  # fmt: skip
    return Job(**(given | values))


def free(*jobs: Job, nodes: tuple[Node, ...] = (), reservations: tuple[Reservation, ...] = ()) -> list[int]:
    """What is free in each of six half hours."""
    cluster = Cluster(taken=NOW, nodes=list(nodes) or [node("n1"), node("n2")])
    (kind,) = forecast(cluster, jobs, reservations, NOW, steps=6).kinds
    return kind.free


def reservation(first: float, last: float, **values: Any) -> Reservation:
    hour = timedelta(hours=1)
    given = {"name": "r", "start": NOW + first * hour, "end": NOW + last * hour, "node_names": ["n1"]}
    return Reservation.model_validate(given | values)


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        ([], [8] * 6),
        ([job()], [6, 8, 8, 8, 8, 8]),
        ([job(minutes_limit=61)], [6, 6, 8, 8, 8, 8]),  # a minute of a half hour takes all of it
        ([job(minutes_limit=None)], [6] * 6),
        ([job(minutes_limit=10)], [6, 8, 8, 8, 8, 8]),  # past its limit and still there
        ([job("COMPLETED")], [8] * 6),
        ([job(gpus=0)], [8] * 6),
        ([job(nodes=2, node_list="n[1-2]", gpus=8)], [0, 8, 8, 8, 8, 8]),
        ([job("PENDING", started=None, node_list="")], [8] * 6),  # Slurm has no plan for it
        (
            [job("PENDING", started=None, planned_start=NOW + timedelta(hours=1), planned_nodes="n2")],
            [8, 8, 6, 6, 8, 8],
        ),
        ([job("PENDING", started=None, planned_start=NOW + timedelta(hours=1))], [8, 8, 6, 6, 8, 8]),
        ([job("PENDING", started=None, planned_start=NOW - timedelta(hours=1))], [6, 6, 8, 8, 8, 8]),
    ],
)
def test_jobs_have_their_gpus_until_their_limits(jobs: list[Job], expected: list[int]) -> None:
    assert free(*jobs) == expected


def test_a_reservation_closes_its_nodes_and_counts_no_job_in_it_twice() -> None:
    saved = reservation(0.5, 1.5)
    assert free(reservations=(saved,)) == [8, 4, 4, 8, 8, 8]
    assert free(job(minutes_limit=90), reservations=(saved,)) == [6, 4, 4, 8, 8, 8]
    assert free(reservations=(saved, reservation(1, 2.5, name="s"))) == [8, 4, 4, 4, 4, 8]
    assert free(reservations=(reservation(-9, -1), reservation(0, 99, node_names=["gone"]))) == [8] * 6


def test_nodes_that_take_no_jobs_are_not_free_but_counted() -> None:
    cluster = Cluster(taken=NOW, nodes=[node("n1"), node("n2", available=False)])
    (kind,) = forecast(cluster, [job("PENDING"), job("PENDING", gpu_type=None)], [], NOW).kinds
    assert (kind.total, kind.queued, set(kind.free), len(kind.free)) == (8, 4, {4}, 144)


def test_types_are_distinguished() -> None:
    cluster = Cluster(taken=NOW, nodes=[node("n1", gpus={"a100": 2, "v100": 2}), node("n2", gpus={})])
    found = forecast(cluster, [job(gpu_type="v100"), job(node_list="n2")], [reservation(1, 2)], NOW, steps=5)
    assert {kind.gpu_type: kind.free for kind in found.kinds} == {
        "a100": [2, 2, 0, 0, 2],
        "v100": [0, 2, 0, 0, 2],
    }


TIMES = st.integers(-400, 400).map(lambda minutes: NOW + timedelta(minutes=minutes))
JOBS = st.builds(
    job,
    state=st.sampled_from(["RUNNING", "PENDING", "COMPLETING", "TIMEOUT"]),
    node_list=st.sampled_from(["n1", "n[1-2]", "n9", ""]),
    planned_nodes=st.sampled_from(["n2", "n[1-9]", ""]),
    planned_start=st.none() | TIMES,
    started=st.none() | TIMES,
    minutes_limit=st.none() | st.integers(0, 400),
    gpus=st.integers(0, 20),
    gpu_type=st.sampled_from(["a100", "v100", None]),
)
RESERVATIONS = st.tuples(TIMES, TIMES).map(lambda pair: reservation(0, 0, start=min(pair), end=max(pair)))


@given(st.lists(JOBS, max_size=6), st.lists(RESERVATIONS, max_size=3))
def test_the_forecast_is_between_zero_and_the_total(jobs: list[Job], reservations: list[Reservation]) -> None:
    assert all(0 <= count <= 8 for count in free(*jobs, reservations=tuple(reservations)))


def counted(jobs: list[Job], reservations: list[Reservation]) -> list[int]:
    """What is free of two nodes, by going through all jobs for each of six half hours."""
    step, found = timedelta(minutes=30), []
    for begin in (NOW + number * step for number in range(6)):
        left, nowhere = {"n1": 4, "n2": 4}, 0
        for job in jobs:
            waits = job.is_pending
            start = job.planned_start if waits else job.started or NOW
            if job.is_over or not job.gpus or start is None:
                continue
            end = job.ends
            if waits:
                start = max(start, NOW)
                end = None if job.minutes_limit is None else start + timedelta(minutes=job.minutes_limit)
            late = not waits and begin == NOW  # what is still there goes on for now, also past its limit
            begun = start < begin + step
            if begun and (end is None or end > begin or late):
                names = expand(job.planned_nodes if waits else job.node_list)
                for place, name in enumerate(names):
                    if name in left:
                        left[name] -= job.gpus // len(names) + (place < job.gpus % len(names))
                if not names and job.gpu_type != "v100":  # no node has any of that type
                    nowhere += job.gpus
        for reservation in reservations:
            if (
                reservation.start < reservation.end
                and reservation.start < begin + step
                and reservation.end > begin
            ):
                left |= dict.fromkeys(reservation.node_names, 0)
        found.append(max(0, sum(max(0, count) for count in left.values()) - nowhere))
    return found


@example([], [reservation(0.25, 0.25)])
@given(st.lists(JOBS, max_size=6), st.lists(RESERVATIONS, max_size=3))
def test_the_forecast_matches_a_count_of_each_half_hour(
    jobs: list[Job], reservations: list[Reservation]
) -> None:
    assert free(*jobs, reservations=tuple(reservations)) == counted(jobs, reservations)


def test_what_waits_is_counted_with_all_of_its_tasks() -> None:
    waits: dict[str, Any] = {"started": None, "node_list": "", "gpus": 2}
    cluster = Cluster(taken=NOW, nodes=[node("n1")])
    jobs = [job("PENDING", **waits), job("PENDING", **waits, array_id=5, tasks="0-9%2")]
    (kind,) = forecast(cluster, jobs, (), NOW).kinds
    assert kind.queued == 2 + 10 * 2


def test_a_suspended_job_keeps_its_gpus_and_slurms_end_counts() -> None:
    assert free(job("SUSPENDED")) == [6] * 6
    assert free(job(planned_end=NOW + timedelta(minutes=95))) == [6, 6, 6, 6, 8, 8]
