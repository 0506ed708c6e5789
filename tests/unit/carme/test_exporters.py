"""A running job's usage without Prometheus, from a real exporter's server by mutual TLS."""

import asyncio
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port
from real_exporter import ELSEWHERE, GIB, NODE, Exporter

from carme.config import Settings
from carme.errors import CarmeError
from carme.jobs import Job
from carme.reports import exporters as module
from carme.reports.exporters import FORGOTTEN_SECONDS, LEAST_SECONDS, Exporters
from carme.reports.models import Curve, GpuUse, Report, Usage
from carme.reports.text import as_html, as_text, facts
from carme.scaling import Prediction
from patience import HANG


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[Exporter]:
    exporter = Exporter(tmp_path / "tls")
    yield exporter
    exporter.close()


async def followed(exporter: Exporter, job: Job, moments: Iterable[int]) -> tuple[Usage, list[Curve]]:
    """The use of a job after readings at these moments."""
    used, curves = None, list[Curve]()
    for seconds in moments:
        exporter.node.seconds = seconds
        used, curves = await exporter.exporters.usage(job)
    assert used is not None
    return used, curves


def of(curves: list[Curve], what: str, name: str = "", part: str = "") -> Curve:
    """The only such curve."""
    (found,) = (curve for curve in curves if curve.what == what and name in curve.name and part == curve.part)
    return found


async def test_a_job_is_measured_while_its_page_is_open(exporter: Exporter) -> None:
    used, curves = await exporter.exporters.usage(exporter.job())
    assert used is not None and of(curves, "memory").values == [0.062]
    assert of(curves, "cpu").values == [None]
    # At 61 nothing is requested: it is too soon.
    used, curves = await followed(exporter, exporter.job(), (15, 30, 60, 61, 75))
    assert used.seconds == 75
    (node,) = used.nodes
    assert (node.node, node.cpus, node.memory_bytes, node.memory_limit_bytes) == (NODE, 4, 2 * GIB, 32 * GIB)
    assert node.cpus_used == pytest.approx(3.0)
    (gpu,) = used.gpus
    assert (gpu.gpu, gpu.busy, gpu.memory_total_bytes) == ("0", pytest.approx(0.8), 40 * GIB)
    cpu = of(curves, "cpu")
    assert (cpu.start, cpu.step, cpu.whole) == (exporter.began, 15, 4)
    assert cpu.values == [None, *[0.75] * 5]
    assert of(curves, "io", "read").values == [1.0] * 5 and of(curves, "io").top == pytest.approx(2**20)
    assert of(curves, "network", "received").top == pytest.approx(2**21)


async def test_training_is_of_all_ranks_and_of_each(exporter: Exporter) -> None:
    used, curves = await followed(exporter, exporter.job(), (0, 15, 30))
    assert used.training is not None
    training = used.training
    assert (training.ranks, training.step_seconds) == (2, pytest.approx(0.25))
    assert training.samples_per_second == pytest.approx(256)
    assert training.data_wait == pytest.approx(0.6) and training.rank_wait is None
    assert training.loss == pytest.approx(2.1)
    assert of(curves, "steps").top == pytest.approx(4) and of(curves, "wait").values[1:] == [0.6, 0.6]
    assert [rank.data_wait for rank in training.each] == [pytest.approx(0.8), pytest.approx(0.4)]
    assert of(curves, "rank_wait", "rank 0", "data").values == [None, 0.8, 0.8]


async def test_a_prediction_is_compared_from_the_first_reading(exporter: Exporter) -> None:
    prediction = Prediction(
        file="probe.json", ranks=2, step_ms=250.0, low_ms=240.0, high_ms=260.0, speedup=1.9, efficiency=0.95
    )
    job = exporter.job(prediction=prediction)
    used, _curves = await followed(exporter, job, (60,))
    assert used.training is not None
    assert used.training.step_seconds == pytest.approx(0.25)
    known = facts(Report(job=job, source="exporters", usage=used))
    assert [fact.words for fact in known if fact.title == "Measured"] == [
        "250 ms for a step, as predicted, inside the 80 % interval"
    ]
    assert [fact.title for fact in known if fact.title == "Seen for"]


async def test_curves_have_a_gap_between_readings_far_apart(exporter: Exporter) -> None:
    _used, curves = await followed(exporter, exporter.job(), (0, 15, 150, 165))
    memory, cpu = of(curves, "memory").values, of(curves, "cpu").values
    assert [place for place, value in enumerate(memory) if value is not None] == [0, 1, 10, 11]
    assert [place for place, value in enumerate(cpu) if value is not None] == [1, 11]
    # What nobody has read for long begins anew, and so does another job of the number.
    exporter.node.seconds += FORGOTTEN_SECONDS + 1
    used, _curves = await exporter.exporters.usage(exporter.job())
    assert used is not None and used.seconds == 0
    exporter.node.seconds += 15
    later = datetime.fromtimestamp(exporter.began + exporter.node.seconds - 5, UTC)
    used, _curves = await exporter.exporters.usage(exporter.job(started=later))
    assert used is not None and used.seconds == 0


async def test_a_node_that_is_away_leaves_the_others_and_all_of_them_are_an_error(exporter: Exporter) -> None:
    used, _curves = await exporter.exporters.usage(exporter.job(node_list=f"{NODE},nowhere.invalid"))
    assert used is not None and [node.node for node in used.nodes] == [NODE]
    unused = Exporters(free_port(), exporter.certificates)
    with pytest.raises(CarmeError, match="exporters of the job's nodes do not answer"):
        await unused.usage(exporter.job())
    # A server without a certificate of the site's authority for this name is not trusted.
    with pytest.raises(CarmeError, match="certificate"):
        await exporter.exporters.usage(exporter.job(id=8, node_list="127.0.0.1"))
    assert exporter.exporters.exist
    assert not Exporters(exporter.port, exporter.certificates / "nothing").exist


async def test_a_node_is_reached_where_slurm_reaches_it_and_known_by_its_name(exporter: Exporter) -> None:
    def client() -> Exporters:
        return Exporters(exporter.port, exporter.certificates)

    job = exporter.job(node_list=ELSEWHERE)
    used, _curves = await client().usage(job, {ELSEWHERE: "127.0.0.1"})
    assert used is not None and [node.node for node in used.nodes] == [ELSEWHERE]
    for addresses in ({}, {NODE: "127.0.0.1"}, {ELSEWHERE: "127.0.0.9"}):
        with pytest.raises(CarmeError, match="do not answer"):
            await client().usage(job, addresses)
    # Its exporter need not listen where Slurm reaches the node.
    used, _curves = await client().usage(exporter.job(), {NODE: "127.0.0.9"})
    assert used is not None and [node.node for node in used.nodes] == [NODE]
    # A server with a certificate for other names is not trusted.
    with pytest.raises(CarmeError, match="certificate"):
        await client().usage(exporter.job(node_list="gpu-02"), {"gpu-02": "127.0.0.1"})


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A server that lets everybody connect and says nothing."""
    with socket.create_server(("0.0.0.0", 0), backlog=64) as server:
        yield server


async def test_nodes_that_are_away_hold_up_nobody_else(
    exporter: Exporter, silent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 3 * HANG)
    monkeypatch.setattr(module, "SAMPLE_TIMEOUT", 3 * HANG)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    away = Exporters(silent.getsockname()[1], exporter.certificates)
    nodes = ",".join(f"127.0.0.{last}" for last in range(1, 33))
    looking = asyncio.ensure_future(away.usage(exporter.job(node_list=nodes)))
    silent.settimeout(HANG)
    async with asyncio.timeout(HANG):
        await asyncio.to_thread(silent.accept)  # it has begun, and what serves everybody else is free
    assert not looking.done()
    looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking


async def test_the_sums_of_a_job_are_made_beside_the_event_loop(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def no_curves(_keys: object, _interval: object) -> tuple[None, list[Curve]]:
        threads.append(threading.current_thread().name)
        return None, []

    monkeypatch.setattr(module, "_summary", no_curves)
    await exporter.exporters.usage(exporter.job())
    assert len(threads) == 1 and threads[0].startswith("carme-exporters-sum")


async def test_a_reading_ends_in_time_and_its_failure_is_cached(
    exporter: Exporter, silent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE", HANG)
    monkeypatch.setattr(module, "SAMPLE_TIMEOUT", 0.2)
    away = Exporters(silent.getsockname()[1], exporter.certificates, lambda: exporter.node.seconds)
    job = exporter.job(started=None)
    with pytest.raises(CarmeError, match=r"do not answer: no answer within 0\.2 s"):
        await away.usage(job)
    requested: list[str] = []

    def answer(_self: Exporters, node: str, _address: str, _job_id: int) -> dict[Any, float]:
        requested.append(node)
        return {}

    monkeypatch.setattr(Exporters, "_ask", answer)
    exporter.node.seconds = LEAST_SECONDS - 1
    with pytest.raises(CarmeError, match=r"no answer within 0\.2 s"):
        await away.usage(job)
    assert requested == []
    exporter.node.seconds = LEAST_SECONDS
    assert await away.usage(job) == (None, [])
    assert requested == [NODE]


async def test_the_oldest_readings_are_dropped_when_there_are_too_many(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    await exporter.exporters.usage(exporter.job())
    second = exporter.job(id=77)
    used, _curves = await followed(exporter, second, (15, 30))
    assert [node.memory_bytes for node in used.nodes] == [9 * GIB] and used.seconds == 15
    # There is space for the last reading of the second job alone: one series, known by its key.
    monkeypatch.setattr(module, "MOST_VALUES", module.KEY_VALUES + 1)
    used, _curves = await followed(exporter, second, (45,))
    assert used.seconds == 0
    used, _curves = await followed(exporter, exporter.job(), (60,))
    assert used.seconds == 0


async def test_a_long_time_has_curves_of_no_more_values(exporter: Exporter) -> None:
    used, curves = await followed(exporter, exporter.job(), range(0, 9001, 150))
    assert used.seconds == 9000
    cpu = of(curves, "cpu")
    assert len(cpu.values) <= 121 and cpu.step * (len(cpu.values) - 1) == pytest.approx(9000, rel=0.02)
    assert used.nodes[0].cpus_used == pytest.approx(3.0, rel=0.02)
    assert used.training is not None and used.training.step_seconds == pytest.approx(0.25)


@pytest.fixture
def settings(settings: Settings, exporter: Exporter) -> Settings:
    """A site with exporters and no Prometheus."""
    place = settings.monitoring.model_copy(
        update={"certificates": exporter.certificates, "exporter_port": exporter.port}
    )
    return settings.model_copy(update={"monitoring": place})


async def test_the_broker_takes_the_address_from_slurm(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carme.broker.watch.CLUSTER_AT_MOST_EVERY", 0.5)
    nodes = f"NodeName={ELSEWHERE} NodeAddr=127.0.0.1 CPUTot=8 RealMemory=16000 State=MIXED Partitions=gpu \n"
    (site.slurm.state / "nodes").write_text(nodes)
    site.slurm.jobs = [
        {
            "A": 7, "j": "train", "u": "ada", "a": "research", "P": "gpu", "T": "RUNNING", "D": 1, "C": 4,
            "m": "32G", "l": "2:00:00", "b": "N/A", "N": ELSEWHERE, "S": int(time.time()) - 60,
            "k": "carme/1 kind=batch image= key=" + "ab" * 16,
        }
    ]  # fmt: skip
    while not (await site.client.events()).jobs:  # noqa: ASYNC110 - until the broker has seen it
        await asyncio.sleep(0.05)
    while [node.name for node in (await site.client.cluster()).nodes] != [ELSEWHERE]:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    report = await site.client.report(7)
    assert (report.source, report.trouble) == ("exporters", "")
    assert "127.0.0.1" not in (await site.client.cluster()).model_dump_json()


async def test_the_broker_reports_so_and_advises_about_what_it_saw_enough_of(
    site: Any, exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = int(time.time()) - 3600
    site.slurm.jobs = [
        {
            "A": 7, "j": "train", "u": "ada", "a": "research", "P": "gpu", "T": "RUNNING", "D": 1, "C": 4,
            "m": "32G", "l": "2:00:00", "b": "gres/gpu:a100:1", "N": NODE, "V": started - 90, "S": started,
            "k": "carme/1 kind=batch image= key=" + "ab" * 16,
        }
    ]  # fmt: skip
    while not (await site.client.events()).jobs:  # noqa: ASYNC110 - until the broker has seen it
        await asyncio.sleep(0.05)
    report = await site.client.report(7)
    assert (report.source, report.monitored) == ("exporters", True)
    assert report.usage is not None and report.curves and report.advice == []
    shown = as_text(report)
    assert re.search(r"^Seen for +\d+ s, while somebody watches", shown, re.MULTILINE)
    assert shown.endswith("Advice: not yet, too little of the run was seen.")
    assert "Not yet: too little of the run was seen." in as_html(report)
    idle = GpuUse(node=NODE, gpu="0", busy=0.0, active=0.0)
    for seconds, topics in ((600, []), (3000, ["gpu"])):  # of an hour

        async def seen(
            _self: Exporters, _job: Job, _addresses: Any, seconds: int = seconds
        ) -> tuple[Usage, list[Curve]]:
            return Usage(seconds=seconds, gpus=[idle]), []

        monkeypatch.setattr(Exporters, "usage", seen)
        report = await site.client.report(7)
        assert [advice.topic for advice in report.advice] == topics and report.seen_enough == bool(topics)
