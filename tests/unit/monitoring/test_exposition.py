"""Metrics as Prometheus reads them."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from carme_monitoring.exposition import text
from carme_monitoring.serving import MetricsServer
from patience import HANG

HOSTILE = 'ada"} 1\ncarme_fake{x="\\'


@pytest.fixture
def registry() -> CollectorRegistry:
    found = CollectorRegistry()
    gauge = Gauge("carme_load", 'Load,\nwith "quotes" and \\.', ("user", "place"), registry=found)
    for place, value in enumerate((0, 1.5, -7, 1e300, 123456789012, float("inf"), float("nan"))):
        gauge.labels(HOSTILE, str(place)).set(value)
    gauge.labels("Käthe 🐎", "").set(1)
    Gauge("carme_alone", "Without labels.", registry=found).set(3)
    Gauge("carme_none", "Without samples.", ("user",), registry=found)
    Counter("carme_jobs", "Jobs.", ("state",), registry=found).labels("failed").inc(4)
    Histogram("carme_wait_seconds", "Waits.", buckets=(1, 5), registry=found).observe(3)
    return found


def without_created(written: str) -> list[str]:
    """Its families as text, which can be compared although NaN does not equal NaN."""
    return [
        repr(
            (
                family.name,
                family.type,
                family.documentation,
                [(sample.name, sorted(sample.labels.items()), sample.value) for sample in family.samples],
            )
        )
        for family in text_string_to_metric_families(written)
        if not family.name.endswith("_created")
    ]


def test_the_text_is_that_of_the_prometheus_client(registry: CollectorRegistry):
    metrics = list(registry.collect())
    for metric in metrics:
        metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
    written = text(metrics).decode()
    assert without_created(written) == without_created(generate_latest(registry).decode())
    assert "carme_fake" in written
    assert not any(line.startswith("carme_fake") for line in written.splitlines())


def test_a_label_that_is_not_text_is_written_with_replacements():
    registry = CollectorRegistry()
    Gauge("carme_load", "Load.", ("user",), registry=registry).labels("bob\ud800").set(1)
    assert 'carme_load{user="bob?"} 1.0' in text(registry.collect()).decode()


@pytest.fixture
def port(registry: CollectorRegistry) -> Iterator[int]:
    server = MetricsServer("127.0.0.1:0", registry, None)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def test_an_answer_is_packed_only_for_clients_that_accept_it(port: int):
    url = f"http://127.0.0.1:{port}/metrics"
    packed = httpx.get(url, headers={"Accept-Encoding": "gzip"}, trust_env=False)
    plain = httpx.get(url, headers={"Accept-Encoding": "identity"}, trust_env=False)
    assert packed.headers["Content-Encoding"] == "gzip" and "Content-Encoding" not in plain.headers
    assert packed.text == plain.text and "carme_alone 3.0" in plain.text
    assert plain.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_only_reading_is_allowed(port: int):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG)
    connection.request("HEAD", "/metrics")
    answer = connection.getresponse()
    assert answer.status == 200 and answer.read() == b""
    assert int(answer.headers["Content-Length"]) > 100
    connection.close()
    for method in ("POST", "PUT", "DELETE"):
        assert httpx.request(method, f"http://127.0.0.1:{port}/metrics", trust_env=False).status_code == 405
