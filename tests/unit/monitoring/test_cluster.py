"""The whole site as a scrape shows it; its snapshot is the broker's, its services are real servers."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from carme.broker.overview import JobFigures, Overview, SessionFigures
from carme.errors import BrokerUnavailable
from carme.jobs import Cluster, JobState, Licence, Node, Partition, Reservation
from carme.sessions import Ending, SessionState, Step
from carme_monitoring.cluster.collector import ClusterCollector
from carme_monitoring.cluster.health import Answer, Health
from carme_monitoring.exposition import text

NOW = datetime.now(UTC)
CLUSTER = Cluster(
    taken=NOW,
    partitions=[Partition(name="gpu", node_names=["n1", "n2", "n3"]), Partition(name="old", state="DOWN")],
    nodes=[
        Node(
            name="n1", state="MIXED", cpus=8, cpus_used=6, memory_mb=100, memory_used_mb=50,
            gpus={"a100": 4}, gpus_used={"a100": 3},
        ),
        Node(name="n2", state="IDLE", cpus=8, memory_mb=100, gpus={"a100": 4}),
        Node(name="n3", state="DOWN*", cpus=8, memory_mb=100, gpus={"h200": 8}, available=False),
    ],
)  # fmt: skip


def job(number: int, **changes: Any) -> JobFigures:
    values: dict[str, Any] = {
        "id": number, "user": "ada", "account": "research", "partition": "gpu", "state": JobState.RUNNING,
        "reason": "", "kind": "batch", "nodes": 1, "cpus": 4, "memory_mb": 1000, "gpus": 2,
        "gpu_type": "a100",
        "submitted": NOW - timedelta(seconds=100), "started": NOW - timedelta(seconds=60),
    }  # fmt: skip
    return JobFigures(**values | changes)


def waiting(number: int, **changes: Any) -> JobFigures:
    return job(number, **{"state": JobState.PENDING, "reason": "Priority", "started": None, **changes})


class Site:
    """Set the answers of the broker and the services, and scrape the exporter."""

    def __init__(self, most: int = 200) -> None:
        self.overview = Overview(answered=NOW, jobs=[], cluster=CLUSTER)
        self.broken = False
        self.registry = CollectorRegistry()
        self.registry.register(ClusterCollector(self._ask, lambda: {"portal": Answer(True, 0.1)}, most))

    def _ask(self) -> Overview:
        if self.broken:
            raise BrokerUnavailable("The broker does not answer.")
        return self.overview

    def show(self, *jobs: JobFigures, **changes: Any) -> None:
        self.overview = self.overview.model_copy(update={"jobs": list(jobs), **changes})

    def scrape(self) -> dict[tuple[str, str], float]:
        """All samples, by name and the labels' values in the order of the labels' names."""
        written = text(self.registry.collect()).decode()
        found: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(written):
            for sample in family.samples:
                key = sample.name, ",".join(value for _, value in sorted(sample.labels.items()))
                assert key not in found, f"{key} is there twice"
                found[key] = sample.value
        return found


def test_queues_are_counted_by_partition_state_and_reason():
    site = Site()
    site.show(
        job(1), waiting(2), waiting(3, reason="Resources, more", gpus=4), job(4, state=JobState.COMPLETED)
    )
    found = site.scrape()
    assert found["carme_queue_jobs", "gpu,running"] == 1
    assert found["carme_queue_jobs", "gpu,pending"] == 2
    assert ("carme_queue_jobs", "gpu,completed") not in found
    assert found["carme_queue_pending_jobs", "gpu,Priority"] == 1
    assert found["carme_queue_pending_jobs", "gpu,Resources"] == 1
    assert found["carme_queue_pending_gpus", "a100,gpu"] == 6
    waited = 100 + (datetime.now(UTC) - NOW).total_seconds()
    assert found["carme_queue_longest_wait_seconds", "gpu"] == pytest.approx(waited, abs=30)


def test_a_queue_without_jobs_is_0_and_not_a_gap():
    """A reader would show the last figure as the current one."""
    site = Site()
    site.show(job(1), waiting(2))
    site.scrape()
    site.show(job(1, state=JobState.COMPLETED))
    found = site.scrape()
    assert found["carme_queue_jobs", "gpu,pending"] == found["carme_queue_jobs", "gpu,running"] == 0
    assert found["carme_queue_jobs", "old,pending"] == 0
    # What is not known is no 0.
    site.show(cluster=None)
    assert not [name for name, _ in site.scrape() if name == "carme_queue_jobs"]


def test_resources_are_counted_by_user():
    site = Site()
    site.show(
        job(1),
        job(2, user="bob", gpus=1, cpus=2, memory_mb=1),
        job(3, user="bob", gpus=3, gpu_type=None),
        waiting(4, user="carl"),
        job(5, user="dora", state=JobState.FAILED),
    )
    found = site.scrape()
    assert found["carme_user_gpus", "a100,ada"] == 2
    assert found["carme_user_gpus", "a100,bob"] == 1
    assert found["carme_user_gpus", "gpu,bob"] == 3
    assert found["carme_user_cpus", "bob"] == 6
    assert found["carme_user_memory_bytes", "ada"] == 1000 << 20
    assert found["carme_user_pending_jobs", "carl"] == 1
    assert found["carme_user_running_jobs", "carl"] == 0
    assert ("carme_user_cpus", "dora") not in found
    assert found["carme_account_gpus", "research,a100"] == 3
    assert found["carme_account_running_jobs", "research"] == 3


def test_gpus_without_a_type_have_that_of_their_partition_if_it_is_the_only_one():
    nodes = CLUSTER.nodes[:2]
    site = Site()
    site.show(job(1, gpu_type=None), cluster=CLUSTER.model_copy(update={"nodes": nodes}))
    assert site.scrape()["carme_user_gpus", "a100,ada"] == 2
    site.show(job(1, gpu_type=None), cluster=CLUSTER)  # n3 has GPUs of another type
    assert site.scrape()["carme_user_gpus", "gpu,ada"] == 2


def test_nodes_and_gpus_of_the_cluster_are_counted():
    found = Site().scrape()
    assert found["carme_cluster_gpus", "a100"] == 8
    assert found["carme_cluster_gpus_allocated", "a100"] == 3
    assert found["carme_cluster_gpus_allocated", "h200"] == 0
    assert ("carme_cluster_gpus_usable", "h200") not in found
    assert found["carme_cluster_cpus", ""] == 24
    assert found["carme_nodes", "down"] == 1
    assert found["carme_node_available", "n3"] == 0
    assert found["carme_node_powered_on", "n3"] == 1
    assert found["carme_partition_nodes_available", "gpu"] == 2
    assert found["carme_partition_up", "old"] == 0


def test_a_node_that_is_switched_off_takes_jobs():
    off = Node(name="n4", state="IDLE+CLOUD+POWERED_DOWN", cpus=8, memory_mb=100, gpus={"a100": 4})
    site = Site()
    site.show(cluster=CLUSTER.model_copy(update={"nodes": [*CLUSTER.nodes, off]}))
    found = site.scrape()
    assert (found["carme_node_available", "n4"], found["carme_node_powered_on", "n4"]) == (1, 0)
    assert found["carme_cluster_gpus_usable", "a100"] == 12


def test_reservations_and_licences_are_reported():
    site = Site()
    site.show(
        reservations=[
            Reservation(name="course", start=NOW, end=NOW + timedelta(hours=1), node_names=["n1"], gpus=4)
        ],
        licences=[Licence(name="matlab", total=10, used=3)],
    )
    found = site.scrape()
    assert found["carme_reservation_nodes", "course"] == 1
    assert found["carme_reservation_gpus", "course"] == 4
    assert found["carme_licence_used", "matlab"] == 3


def test_only_events_after_the_first_poll_are_counted_each_once():
    site = Site()
    site.show(job(1), waiting(2))
    assert ("carme_queue_wait_seconds_count", "gpu") not in site.scrape()
    site.show(job(1, state=JobState.FAILED), job(2), job(3, submitted=NOW, started=NOW))
    for _ in range(2):
        found = site.scrape()
        assert found["carme_queue_wait_seconds_count", "gpu"] == 2
        assert found["carme_queue_wait_seconds_sum", "gpu"] == 40
        assert found["carme_jobs_ended_total", "gpu,failed"] == 1
    # Slurm forgets it, and counts stay.
    site.show()
    assert site.scrape()["carme_jobs_ended_total", "gpu,failed"] == 1


def test_a_broker_that_has_just_started_makes_nothing_new():
    site = Site()
    site.show(job(1, state=JobState.COMPLETED))
    site.scrape()
    before = site.overview
    site.overview = Overview(answered=None, failure="The broker has just started.")
    assert site.scrape()["carme_slurm_up", ""] == 0
    site.overview = before
    assert ("carme_jobs_ended_total", "gpu,completed") not in site.scrape()


def test_start_times_and_endings_of_sessions_are_reported():
    site = Site()
    started = SessionFigures(
        job_id=1, image="torch", state=SessionState.STARTING, ending=None, marks={Step.ALLOCATED: NOW}
    )
    site.show(sessions=[started])
    assert site.scrape()["carme_sessions", "starting"] == 1
    ready = started.model_copy(
        update={
            "state": SessionState.READY,
            "marks": started.marks | {Step.ROUTED: NOW + timedelta(seconds=4)},
        }
    )
    site.show(sessions=[ready])
    found = site.scrape()
    assert found["carme_session_start_seconds_sum", "torch"] == 4
    assert found["carme_session_start_seconds_bucket", "torch,5.0"] == 1
    site.show(
        sessions=[ready.model_copy(update={"state": SessionState.ENDED, "ending": Ending.OUT_OF_MEMORY})]
    )
    found = site.scrape()
    assert found["carme_sessions_ended_total", "out_of_memory"] == 1
    assert found["carme_session_start_seconds_count", "torch"] == 1
    assert ("carme_sessions", "ended") not in found


def test_without_a_broker_nothing_is_made_up():
    site = Site()
    site.show(job(1))
    site.scrape()
    site.broken = True
    found = site.scrape()
    assert found["carme_service_up", "broker"] == 0
    assert found["carme_service_up", "portal"] == 1
    assert not [
        name for name, _ in found if name.startswith(("carme_queue_jobs", "carme_user", "carme_cluster_gpus"))
    ]


@pytest.mark.parametrize("label", ["user", "account", "partition"])
def test_however_many_there_are_series_stay_bounded_and_nothing_is_lost(label: str):
    few, many = Site(most=10), Site(most=10)
    few.show(*(job(number, **{label: f"name{number}"}) for number in range(9)))
    many.show(*(job(number, **{label: f"name{number}"}, cpus=number) for number in range(500)))
    assert len(many.scrape()) <= len(few.scrape()) + 60
    found = many.scrape()
    if label == "partition":
        assert sum(value for (name, _), value in found.items() if name == "carme_queue_jobs") == 500
    else:
        cpus = {who: value for (name, who), value in found.items() if name == f"carme_{label}_cpus"}
        assert sum(cpus.values()) == sum(range(500))
        assert len(cpus) == 11 and "(others)" in cpus


def test_counters_of_ever_new_names_stay_bounded():
    site = Site(most=200)
    site.scrape()
    for number in range(1000):
        site.show(job(number, partition=f"p{number}"))
        if number % 100 == 0:
            site.scrape()
    site.show(*(job(number + 10_000, partition=f"q{number}") for number in range(1000)))
    waits = [who for name, who in site.scrape() if name == "carme_queue_wait_seconds_count"]
    assert len(waits) == 201 and "(others)" in waits


def test_hostile_names_cannot_make_series_of_their_own():
    site = Site()
    site.show(job(1, user='ada"} 1\ncarme_fake{x="'))
    found = site.scrape()
    assert not [name for name, _ in found if name.startswith("carme_fake")]


@pytest.fixture
def answering() -> Iterator[tuple[str, str]]:
    """A service that answers 401, and one that answers 503."""

    def server(status: int) -> http.server.ThreadingHTTPServer:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        http_server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(
            target=http_server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return http_server

    servers = [server(401), server(503)]
    first, second = (f"http://127.0.0.1:{each.server_address[1]}/x" for each in servers)
    yield first, second
    for each in servers:
        each.shutdown()
        each.server_close()


def test_services_that_answer_are_up(answering: tuple[str, str]):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{closed.getsockname()[1]}/"
        found = Health({"well": answering[0], "behind": answering[1], "gone": gone}).check()
    assert {name: answer.up for name, answer in found.items()} == {
        "well": True,
        "behind": False,
        "gone": False,
    }
