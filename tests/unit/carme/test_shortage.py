"""What is missing for a job that waits, who has it, and until when."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from carme.jobs import Cluster, Job, JobState, Node, Partition, Reservation
from carme.jobs.shortage import reserved_nodes, running_on, shortage
from carme.jobs.times import moment_text
from carme.translation import translated
from carme.wording import memory, size

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)


def node(name: str, **values: Any) -> Node:
    known = {"name": name, "cpus": 8, "memory_mb": 8000, "gpus": {"a100": 4}}
    return Node.model_validate(known | values)


def running(number: int, **values: Any) -> Job:
    known = {"id": number, "name": "secret", "user": "bob", "state": JobState.RUNNING, "nodes": 1}
    known |= {"node_list": "n1", "gpus": 1, "gpu_type": "a100", "cpus": 1, "memory_mb": 100}
    known |= {"started": NOW, "minutes_limit": 60}
    return Job.model_validate(known | values)


def waiting(**values: Any) -> Job:
    known = {"id": 99, "name": "a", "user": "ada", "state": JobState.PENDING, "nodes": 1, "partition": "gpu"}
    return Job.model_validate(known | {"gpus": 4, "cpus": 4, "memory_mb": 400} | values)


def of(nodes: list[Node]) -> Cluster:
    names = [node.name for node in nodes]
    return Cluster(taken=NOW, nodes=nodes, partitions=[Partition(name="gpu", node_names=names)])


def missing(
    job: Job, nodes: list[Node], *running_jobs: Job, reservations: tuple[Reservation, ...] = ()
) -> str:
    return in_german_too(shortage(job, of(nodes), running_on([*running_jobs, job]), NOW, reservations))


def in_german_too(text: str) -> str:
    """Return the text; fail unless it has a complete German translation."""
    english = {"must", "use", "your", "jobs", "job", "down", "memory", "kept", "on", "and", "until", "from"}
    assert not english & set(translated(text, "de").split()), translated(text, "de")
    return text


def reservation(name: str, begins: int, ends: int, *nodes: str, **values: Any) -> Reservation:
    """A reservation; it begins and ends so many minutes from now."""
    start, end = (NOW + timedelta(minutes=minutes) for minutes in (begins, ends))
    return Reservation(name=name, start=start, end=end, node_names=list(nodes), **values)


def at(minutes: int) -> str:
    return moment_text(NOW + timedelta(minutes=minutes), NOW)


def busy(name: str, gpus: int, **values: Any) -> Node:
    return node(name, gpus_used={"a100": gpus}, cpus_used=gpus, memory_used_mb=100 * gpus, **values)


def test_the_jobs_that_use_the_gpus_are_named_with_their_end() -> None:
    running_jobs = [
        running(1, minutes_limit=30),
        running(2, user="ada", gpus=1),
        running(3, minutes_limit=600),
    ]
    message = missing(waiting(gpus=3), [busy("n1", 3), busy("n2", 4)], *running_jobs)
    who = "your job 2 and 2 jobs of others"
    assert message == f"2 GPUs must become free on n1, in use by {who} until {at(60)} at the latest"
    assert "secret" not in message and "bob" not in message
    # If all jobs must end, the longest counts; without a time limit no time is named.
    assert missing(waiting(), [busy("n1", 3)], *running_jobs).endswith(f"until {at(600)} at the latest")
    message = missing(waiting(), [busy("n1", 1)], running(1, minutes_limit=None))
    assert message == "1 GPU must become free on n1, in use by 1 job of others"


def test_the_end_that_slurm_gives_counts() -> None:
    later = running(1, planned_end=NOW + timedelta(minutes=75), gpus=4)
    assert missing(waiting(), [busy("n1", 4)], later).endswith(f"until {at(75)} at the latest")
    frozen = running(1, state=JobState.SUSPENDED, gpus=4)
    assert missing(waiting(), [busy("n1", 4)], frozen) == (
        "4 GPUs must become free on n1, in use by 1 job of others"
    )


def test_missing_gpus_of_several_nodes_are_added_up() -> None:
    nodes = [busy("n1", 4), busy("n2", 0), busy("n3", 4)]
    running_jobs = [running(1, gpus=4), running(2, gpus=4, node_list="n3", minutes_limit=90)]
    message = missing(waiting(nodes=2, gpus=8, cpus=8), nodes, *running_jobs)
    assert message == f"4 GPUs must become free on n1, in use by 1 job of others until {at(60)} at the latest"
    message = missing(waiting(nodes=3, gpus=12, cpus=12), nodes, *running_jobs)
    assert message.startswith("8 GPUs must become free on n1 and n3, in use by 2 jobs of others until")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"cpus": 8, "gpus": 0}, "2 processors must become free on n1"),
        ({"memory_mb": 7900, "gpus": 0}, "100 MiB of memory must become free on n1"),
        ({"gpus": 0}, ""),
        ({"gpus": 4, "cpus": 8}, "2 GPUs and 2 processors must become free on n1"),
        ({"gpus": 5}, ""),  # no node has as many: another reason says so
    ],
)
def test_each_missing_resource_is_named(values: dict[str, int], expected: str) -> None:
    there = running(1, gpus=2, cpus=2, memory_mb=200)
    message = missing(waiting(**values), [busy("n1", 2)], there)
    assert message.partition(", in use")[0] == expected


def test_memory_is_in_the_unit_that_people_read() -> None:
    whole = running(1, gpus=0, cpus=1, memory_mb=8192)
    text = missing(waiting(gpus=0, memory_mb=8192), [node("n1", memory_mb=8192, memory_used_mb=8192)], whole)
    assert text.startswith("8 GiB of memory must become free on n1"), text
    assert memory(512) == "512 MiB" and memory(4000) == "3.9 GiB" and memory(2 << 20) == "2 TiB"


def test_no_size_is_1024_of_a_unit_that_has_a_larger_one() -> None:
    assert [size((1 << power) - 1) for power in (10, 20, 30, 40)] == [
        "1023 B", "1.0 MiB", "1.0 GiB", "1.0 TiB",
    ]  # fmt: skip
    assert (size(0), size(1024), size(1 << 50)) == ("0 B", "1.0 KiB", "1024.0 TiB")


def test_nodes_that_take_no_jobs_are_named() -> None:
    assert missing(waiting(), [node("n1", available=False)]) == "down or drained: n1"
    gone = node("n1", available=False)
    assert missing(waiting(), [gone, busy("n2", 1)], running(1, node_list="n2")).startswith("1 GPU must")


def test_a_reservation_keeps_nodes_that_are_free() -> None:
    now, later = reservation("maint", -5, 90, "n1", "n2"), reservation("carme-b", 30, 200, "n1")
    text = missing(waiting(), [node("n1"), node("n2")], reservations=(now,))
    assert text == (
        "4 GPUs, 4 processors and 400 MiB of memory must become free on n1, kept for the "
        f"reservation maint until {at(90)} at the latest"
    )
    text = missing(waiting(minutes_limit=60), [node("n1")], reservations=(later,))
    assert text.endswith(f", kept for the reservation carme-b from {at(30)} on until {at(200)} at the latest")
    # It ends before the booking begins, runs in it itself, or there is another node.
    assert missing(waiting(minutes_limit=20), [node("n1")], reservations=(later,)) == ""
    assert missing(waiting(reservation="maint"), [node("n1"), node("n3")], reservations=(now,)) == ""
    assert missing(waiting(), [node("n1"), node("n3")], reservations=(now,)) == ""


def test_a_job_of_a_reservation_waits_for_its_nodes_alone() -> None:
    own = reservation("carme-a", -5, 90, "n2")
    message = missing(
        waiting(reservation="carme-a"),
        [node("n1"), busy("n2", 2)],
        running(1, node_list="n2"),
        reservations=(own,),
    )
    assert message.startswith("2 GPUs must become free on n2, in use by 1 job of others")


def test_a_reservation_of_some_gpus_counts_without_the_jobs_in_it() -> None:
    some = reservation("carme-a", -5, 90, "n1", gpus=2, cpus=2)
    outside = running(1, gpus=1, minutes_limit=30)
    inside = running(2, gpus=2, user="eve", reservation="carme-a", minutes_limit=80)
    assert missing(waiting(gpus=1, cpus=1), [busy("n1", 3)], outside, inside, reservations=(some,)) == ""
    message = missing(waiting(gpus=2, cpus=2), [busy("n1", 1)], outside, reservations=(some,))
    assert message == (
        f"1 GPU must become free on n1, in use by 1 job of others and kept for the reservation carme-a "
        f"until {at(30)} at the latest"
    )


def test_reserved_nodes_are_named_with_their_times() -> None:
    cluster = of([node("n1"), node("n2"), node("n3")])
    saved = [reservation("maint", -5, 90, "n1", "n2", "x9"), reservation("carme-b", 30, 200, "n3")]
    assert in_german_too(reserved_nodes(waiting(), cluster, saved, NOW)) == (
        f"kept for the reservation maint until {at(90)}: n1 and n2"
    )
    assert in_german_too(reserved_nodes(waiting(reservation="maint"), cluster, saved, NOW)) == (
        f"kept for the reservation carme-b from {at(30)} on until {at(200)}: n3"
    )
    assert (
        in_german_too(reserved_nodes(waiting(reservation="maint", minutes_limit=20), cluster, saved, NOW))
        == ""
    )
