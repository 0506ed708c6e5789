"""Reports of jobs: what Prometheus itself has about them, the record that is left, and the advice."""

import asyncio
import json
import re
import statistics
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from real_prometheus import Prometheus, prometheus_with

from carme.cli import main
from carme.config import Settings
from carme.errors import CarmeError, NotFound
from carme.jobs import Job, JobState
from carme.reports import (
    Advice,
    Curve,
    GpuUse,
    Report,
    Usage,
    advise,
    read_record,
    write_record,
)
from carme.reports.metrics import Metrics
from carme.reports.text import as_html, as_text, facts, identity
from carme.translation import Message, follow, translated

from .report_samples import BEGIN, END, GIB, job, trained, usage

JOB: dict[str, Any] = {
    "A": 7, "j": "train", "u": "ada", "a": "research", "P": "gpu", "T": "COMPLETED", "D": 1, "C": 4,
    "m": "32G", "l": "2:00:00", "b": "gres/gpu:a100:2", "V": str(int(BEGIN.timestamp()) - 90),
    "S": str(int(BEGIN.timestamp())), "e": str(int(END.timestamp())),
    "k": "carme/1 kind=batch image= key=" + "ab" * 16,
}  # fmt: skip
ACCOUNTED: dict[str, Any] = {
    "JobIDRaw": "7", "User": "ada", "Account": "research", "Partition": "gpu", "State": "COMPLETED",
    "ExitCode": "0:0", "NNodes": "1", "NodeList": "n1", "AllocTRES": "cpu=4,mem=32G,gres/gpu=2",
    "TimelimitRaw": "120", "Submit": JOB["V"], "Start": JOB["S"], "End": JOB["e"], "UID": "1",
    "JobName": "train", "AdminComment": "",
}  # fmt: skip


# Advice


@pytest.mark.parametrize(
    ("used", "of", "topic", "change"),
    [
        (usage((0.9, 0.0, 0.9, 0.0)), job(gpus=4), "gpu", "--gpus 2, or: carme-run -n 4 PROGRAM"),
        (usage((0.0, 0.0)), job(), "gpu", "leave out --gpus"),
        (usage((0.9, 0.3)), job(), "balance", "DistributedSampler"),
        (usage((0.3, 0.3), cpus_used=3.9), job(), "loader", "--cpus 8"),
        (usage((0.3, 0.3)), job(), "gpu", "num_workers"),
        (trained(data_wait=0.6), job(), "loader", "--stage local:FOLDER"),
        (trained(data_wait=0.6, cpus_used=3.9), job(), "loader", "--cpus 8"),
        (trained(data_wait=0.1, rank_wait=0.5), job(), "balance", "carme-run --profile"),
        (usage(memory_bytes=4 * GIB), job(), "memory", "--memory 5120"),
        (usage((), cpus=16, cpus_used=1.1), job(gpus=0), "cpu", "--cpus 2"),
        (None, job(state=JobState.OUT_OF_MEMORY), "memory", "--memory 49152"),
        (usage(), job(state=JobState.OUT_OF_MEMORY), "memory", "--memory 49152"),
        (usage(), job(state=JobState.TIMEOUT), "time", "--time 240"),
        (usage(), job(minutes_limit=1440), "time", "--time 90"),
    ],
)
def test_advice_follows_from_the_use(used: Usage | None, of: Job, topic: str, change: str) -> None:
    (advice,) = advise(of, used)
    assert advice.topic == topic
    assert change in advice.change
    assert advice.text.endswith(".")
    received = Advice.model_validate_json(advice.model_dump_json())  # as from the broker, or from a record
    english = {"the", "The", "of", "and", "or", "Ask", "processor", "processors", "minutes", "leave"}
    for sentence in (received.text, received.change):
        assert not english & set(translated(sentence, "de").split()), translated(sentence, "de")
    assert translated(received.text, "de") != advice.text
    assert translated(received.text, "en") == advice.text


@pytest.mark.parametrize(
    ("used", "of"),
    [
        (usage(), job()),
        (usage((0.0, 0.0)).model_copy(update={"seconds": 60.0}), job()),  # too short to say anything
        (usage((), cpus=2, cpus_used=0.1), job(gpus=0)),
        (usage(memory_bytes=GIB, memory_limit_bytes=4 * GIB), job()),
        (usage(), job(kind="session", minutes_limit=1440)),  # ends when its owner is done
        (trained(data_wait=0.1, rank_wait=0.1), job()),
        (None, job()),
        (usage((), cpus=None, cpus_used=None, memory_bytes=None, memory_limit_bytes=None), job()),
    ],
)
def test_no_advice_where_all_is_well_or_nothing_is_known(used: Usage | None, of: Job) -> None:
    assert advise(of, used) == []


def test_gpus_are_counted_per_node() -> None:
    gpus = [
        GpuUse(node=node, gpu=str(gpu), busy=0.9 * (gpu < 2), active=float(gpu < 2))
        for node in ("n1", "n2")
        for gpu in range(4)
    ]
    (advice,) = advise(job(nodes=2, gpus=8), Usage(seconds=3600, gpus=gpus))
    assert "4 of the job's 8 GPUs did nothing" in advice.text
    assert advice.change.startswith("--gpus 2,")


# Prometheus itself


def samples() -> str:
    """An hour of a job on n1 with two GPUs: one works, one stops after half of the time; in OpenMetrics."""
    job_labels = 'jobid="7",user="ada",node="n1"'
    series: dict[str, list[tuple[float, float]]] = {}
    for second in range(0, 3601, 15):
        at = BEGIN.timestamp() + second
        for gpu, busy in (("0", 0.8), ("1", 0.6 if second < 1800 else 0.0)):
            labels = f'{{{job_labels},gpu="{gpu}",uuid="GPU-{gpu}"}}'
            for name, value in (
                ("carme_job_gpu_utilization_ratio", busy),
                ("carme_job_gpu_memory_used_bytes", 10 * GIB),
                ("carme_job_gpu_memory_total_bytes", 40 * GIB),
                ("carme_job_gpu_power_watts", 100),
            ):
                series.setdefault(name + labels, []).append((value, at))
        for name, value in (
            (f'carme_job_cpu_seconds_total{{{job_labels},mode="user"}}', 3.0 * second),
            (f"carme_job_cpus{{{job_labels}}}", 4),
            (f"carme_job_memory_used_bytes{{{job_labels}}}", 2 * GIB),
            (f"carme_job_memory_peak_bytes{{{job_labels}}}", 3 * GIB),
            (f"carme_job_memory_limit_bytes{{{job_labels}}}", 32 * GIB),
            (f"carme_job_io_read_bytes_total{{{job_labels}}}", second << 20),
            (f"carme_job_io_written_bytes_total{{{job_labels}}}", second << 10),
            (f'carme_job_network_receive_bytes_total{{{job_labels},source="node"}}', second << 20),
            (f'carme_job_network_transmit_bytes_total{{{job_labels},source="node"}}', second << 19),
            # Another job, which must not be counted.
            ('carme_job_cpus{jobid="77",user="bob",node="n1"}', 64),
        ):
            series.setdefault(name, []).append((value, at))
        # A third job, in which two ranks trained for a while.
        alone = 'carme_job_memory_used_bytes{jobid="9",user="ada",node="n1"}'
        series.setdefault(alone, []).append((GIB, at))
        for rank in ("0", "1") if 600 <= second <= 3000 else ():
            of_rank = f'jobid="9",user="ada",node="n1",rank="{rank}"'
            since = second - 600
            for name, value in (
                (f"carme_training_seconds_total{{{of_rank}}}", since),
                (f"carme_training_steps_total{{{of_rank}}}", 4 * since),
                (f"carme_training_samples_total{{{of_rank}}}", 128 * since),
                (
                    f'carme_training_wait_seconds_total{{{of_rank},cause="data"}}',
                    (0.8 if rank == "0" else 0.4) * since,
                ),
                (f"carme_training_loss{{{of_rank}}}", 2 - since / 2400 + int(rank) / 10),
            ):
                series.setdefault(name, []).append((value, at))
    families = sorted({name.partition("{")[0] for name in series})
    lines = []
    for family in families:
        kind = "counter" if family.endswith("_total") else "gauge"
        lines.append(f"# TYPE {family.removesuffix('_total')} {kind}")
        for name, points in series.items():
            if name.partition("{")[0] == family:
                lines += [f"{name} {value} {at}" for value, at in points]
    return "\n".join([*lines, "# EOF", ""])


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with prometheus_with(samples(), tmp_path_factory.mktemp("prometheus")) as running:
        yield running


async def test_prometheus_gives_use_and_curves_of_a_job(prometheus: Prometheus) -> None:
    used, curves = await Metrics(prometheus.url, prometheus.certificates).usage(7, BEGIN, END)
    assert used is not None
    (node,) = used.nodes
    assert (node.node, node.cpus, node.memory_limit_bytes) == ("n1", 4, 32 * GIB)
    assert node.cpus_used == pytest.approx(3.0, rel=0.02)
    assert node.memory_bytes == 3 * GIB
    assert (node.read_bytes, node.written_bytes) == (3600 << 20, 3600 << 10)
    first, second = used.gpus
    assert first.busy == pytest.approx(0.8) and first.active == 1
    assert second.busy == pytest.approx(0.3, abs=0.01) and second.active == pytest.approx(0.5, abs=0.01)
    assert first.energy_joules == pytest.approx(360_000, rel=0.01)
    assert first.memory_total_bytes == 40 * GIB
    curve = next(curve for curve in curves if curve.name == "n1 GPU 1" and curve.what == "gpu")
    assert curve.values[5] == 0.6 and curve.values[-5] == 0.0
    assert all(len(curve.values) <= 121 for curve in curves)
    wholes = {curve.what: curve.whole for curve in curves}
    flows = {"io": None, "network": None}
    assert wholes == {"gpu": None, "gpu_memory": 40 * GIB, "cpu": 4, "memory": 32 * GIB, **flows}
    read, written = (curve for curve in curves if curve.what == "io")
    assert (read.name, read.top, set(read.values)) == ("n1 read", 1 << 20, {1.0})
    assert (written.name, set(written.values)) == ("n1 written", {0.001})
    received, sent = (curve for curve in curves if curve.what == "network")
    assert (received.name, received.top) == ("n1 received", pytest.approx(1 << 20, rel=0.01))
    assert (sent.name, sent.values[60]) == ("n1 sent", 0.5)
    assert "n1 read, at most 1.0 MiB/s" in as_text(Report(job=job(), usage=used, curves=curves))
    assert ">512.0 KiB/s</text>" in as_html(Report(job=job(), usage=used, curves=curves))


async def test_prometheus_gives_training_of_a_part_of_the_job(prometheus: Prometheus) -> None:
    used, curves = await Metrics(prometheus.url, prometheus.certificates).usage(9, BEGIN, END)
    assert used is not None
    reported = used.training
    assert reported is not None
    assert reported.ranks == 2
    assert reported.step_seconds == pytest.approx(0.25, rel=0.01)
    assert reported.samples_per_second == pytest.approx(256, rel=0.01)
    assert reported.data_wait == pytest.approx(0.6, rel=0.01)
    assert reported.rank_wait is None  # nobody has measured it
    assert reported.loss == pytest.approx(1.05, abs=0.01)
    loss = next(curve for curve in curves if curve.what == "loss")
    assert loss.top == pytest.approx(2.05, abs=0.01) and max(filter(None, loss.values)) > 0.99
    assert {curve.name for curve in curves if curve.what == "wait"} == {"for data"}
    steps = next(curve for curve in curves if curve.what == "steps")
    assert steps.top == pytest.approx(4, rel=0.01) and steps.name == "mean of the ranks"
    first, second = reported.each
    assert (first.node, first.rank, second.rank) == ("n1", 0, 1)
    assert first.step_seconds == pytest.approx(0.25) and first.samples_per_second == pytest.approx(128)
    assert first.data_wait == pytest.approx(0.8) and first.rank_wait is None
    ranks = {(curve.name, curve.part): curve.values for curve in curves if curve.what == "rank_wait"}
    assert set(ranks) == {("n1 rank 0", "data"), ("n1 rank 1", "data")}
    means = {name: statistics.fmean(filter(None, values)) for (name, _part), values in ranks.items()}
    assert means == pytest.approx({"n1 rank 0": 0.8, "n1 rank 1": 0.4}, rel=0.01)
    assert first.loss == pytest.approx(1.0) and second.loss == pytest.approx(1.1)
    report = Report(job=job(), usage=used, curves=curves)
    text = as_text(report)
    assert "n1 rank 1" in text and "last loss 1.1" in text
    assert "2 ranks, 0.25 s for a step, 256 samples in a second, 60 % of the time waiting for data" in text
    assert "mean of the ranks, at most 2.0" in text and "Training: loss" in as_html(report)


async def test_a_job_without_metrics_has_no_usage(prometheus: Prometheus) -> None:
    assert await Metrics(prometheus.url, prometheus.certificates).usage(8, BEGIN, END) == (None, [])
    earlier = BEGIN - timedelta(days=1)  # numbers of jobs begin again
    assert await Metrics(prometheus.url, prometheus.certificates).usage(7, earlier, earlier) == (None, [])


async def test_prometheus_away_is_reported(prometheus: Prometheus) -> None:
    with pytest.raises(CarmeError, match="metrics cannot be read"):
        await Metrics("https://127.0.0.1:9", prometheus.certificates).usage(7, BEGIN, END)
    with pytest.raises(CarmeError, match="metrics cannot be read"):
        await Metrics(prometheus.url, prometheus.certificates.parent / "prometheus").usage(7, BEGIN, END)


# The broker


@pytest.fixture
def settings(settings: Settings, prometheus: Prometheus) -> Settings:
    """A site with metrics."""
    place = settings.monitoring.model_copy(
        update={"prometheus": prometheus.url, "certificates": prometheus.certificates}
    )
    return settings.model_copy(update={"monitoring": place})


def accounted(slurm: Any) -> str:
    """What is noted about job 7."""
    return slurm.accounting[0]["AdminComment"]


async def recorded(slurm: Any) -> str:
    """The same, once there is something; the test's own time limit ends it otherwise."""
    while not (text := accounted(slurm)):  # noqa: ASYNC110 - what changes is outside
        await asyncio.sleep(0.05)
    return text


async def test_a_job_that_ends_leaves_a_record_that_outlives_the_metrics(site: Any) -> None:
    site.slurm.account(ACCOUNTED)
    site.slurm.jobs = [JOB]
    written = read_record(await recorded(site.slurm))
    assert written is not None
    assert [round(gpu.busy, 2) for gpu in written.gpus] == [0.8, 0.3]
    report = await site.client.report(7)
    assert report.source == "live" and report.curves
    (call,) = site.slurm.calls("sacctmgr")
    assert call["arguments"][:-1] == [
        *("--immediate", "--quiet", "modify", "job", "where", "jobid=7", "set"),
    ]
    # The metrics are gone: Slurm has forgotten the job, and another time was given to this number.
    site.slurm.jobs = []
    site.slurm.account(
        ACCOUNTED | {"AdminComment": accounted(site.slurm), "Start": "1795000000", "End": "1795003600"}
    )

    async def from_record() -> Report:
        while (report := await site.client.report(7)).source == "live":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return report

    report = await from_record()
    assert report.source == "record" and report.curves == []
    assert report.usage == written


async def test_an_administrator_s_comment_stays(site: Any) -> None:
    site.slurm.account(ACCOUNTED | {"AdminComment": "looked at"})
    site.slurm.jobs = [JOB]
    while len(site.slurm.calls("sacct")) < 1:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    polls = len(site.slurm.calls("scontrol"))
    while len(site.slurm.calls("scontrol")) < polls + 2:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    assert accounted(site.slurm) == "looked at"
    assert site.slurm.calls("sacctmgr") == []
    assert (await site.client.report(7)).source == "live"


async def test_a_report_has_use_efficiency_and_advice(site: Any) -> None:
    site.slurm.account(ACCOUNTED)
    site.slurm.jobs = [JOB]
    await recorded(site.slurm)
    report = await site.client.report(7)
    assert (report.waited_seconds, report.ran_seconds) == (90, 3600)
    assert report.energy_joules == pytest.approx(720_000, rel=0.01)
    assert report.efficiency["gpu"] == pytest.approx(0.55, abs=0.01)
    assert report.efficiency["memory"] == pytest.approx(3 / 32, abs=0.001)
    assert {advice.topic for advice in report.advice} == {"balance", "memory"}
    # Bars of characters are for terminals.
    assert re.search(r"\[#{5,6}\.{4,5}\] 55 % used", as_text(report))
    assert re.search(r'<meter max="1" value="0\.5\d+"[^>]*></meter> <span>55 % used', as_html(report))
    assert "[#" not in as_html(report)


async def test_a_job_is_compared_with_those_like_it(site: Any) -> None:
    like = [
        ACCOUNTED | {"JobIDRaw": str(number), "AdminComment": write_record(usage((share, share)))}
        for number, share in ((1, 0.2), (2, 0.4), (3, 0.9))
    ]
    different = ACCOUNTED | {
        "JobIDRaw": "4",
        "JobName": "else",
        "AdminComment": write_record(usage((0.0, 0.0))),
    }
    site.slurm.account(ACCOUNTED, *like, different)
    site.slurm.jobs = [JOB]
    peers = (await site.client.report(7)).peers
    assert (peers.jobs, peers.gpu_busy) == (3, 0.4)


async def test_a_report_is_its_owner_s(site: Any) -> None:
    site.slurm.account(ACCOUNTED)
    site.act("bob")
    with pytest.raises(NotFound):
        await site.client.report(7)
    site.act("hub", trusted=True)
    with pytest.raises(NotFound):
        await site.client.report(7, "bob")
    assert (await site.client.report(7, "ada")).job.user == "ada"


async def test_without_prometheus_nothing_is_recorded_and_later_it_is(
    site: Any, prometheus: Prometheus, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = 0
    usage_of = Metrics.usage

    async def away(self: Metrics, *arguments: Any) -> Any:
        nonlocal questions
        questions += 1
        return await usage_of(Metrics("https://127.0.0.1:9", prometheus.certificates), *arguments)

    monkeypatch.setattr("carme.broker.reports.SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(Metrics, "usage", away)
    site.slurm.account(ACCOUNTED)
    site.slurm.jobs = [JOB]
    while questions < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    assert accounted(site.slurm) == ""
    report = await site.client.report(7)
    assert report.source == "none" and report.job.id == 7 and report.usage is None
    assert report.trouble.startswith("The site's metrics cannot be read: ")
    assert "not known. The site's metrics cannot be read" in as_text(report)
    assert "The site&#x27;s metrics cannot be read" in as_html(report)
    monkeypatch.setattr(Metrics, "usage", usage_of)
    assert read_record(await recorded(site.slurm)) is not None


# What people read


def report(**changes: Any) -> Report:
    used = usage((0.9, 0.0))
    values: dict[str, Any] = {
        "job": job(name="<script>alert(1)</script>\x1b[31m"),
        "source": "live",
        "usage": used,
        "efficiency": {"gpu": 0.45, "cpu": 0.5, "memory": 0.625},
        "waited_seconds": 30,
        "ran_seconds": 3600,
        "energy_joules": 7.2e6,
        "curves": [Curve(what="gpu", name="n1 GPU 0", start=0, step=15, values=[0.0, 0.5, None, 1.0] * 40)],
        "advice": advise(job(), used),
    }
    return Report(**values | changes)


def test_the_text_has_all_that_matters() -> None:
    text = as_text(report())
    for part in ("1 node, 2 GPUs", "32.0 GiB", "45 % used", "n1 GPU 1", "20.0 of 32.0 GiB", "2.000 kWh"):
        assert part in text, part
    assert "1 of the job's 2 GPUs did nothing" in text and "--gpus 1, or: carme-run -n 2 PROGRAM" in text
    assert "▄" in text


def test_a_page_holds_no_word_of_a_user_s_as_markup_and_loads_nothing() -> None:
    page = as_html(report())
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert "http" not in page and "src=" not in page
    # A gap in what was measured is a gap in the line.
    assert page.count("<polyline") == 41


def test_a_report_is_in_one_language_and_a_page_names_what_is_not() -> None:
    found = report()
    plain = Advice(topic="cpu", text="Of an earlier version.", change="--cpus 2")
    found = found.model_copy(update={"advice": [*found.advice, plain]})
    assert as_html(found).count("lang=") == 1  # the page's own
    english = {fact.title for fact in identity(found) + facts(found) if isinstance(fact.title, Message)}
    try:
        follow(lambda: "de_DE.UTF-8")
        text, page = as_text(found), as_html(found)
    finally:
        follow(lambda: None)
    assert '<html lang="de">' in page and "<li><span>1 der 2 GPUs" in page
    assert "<pre>--gpus 1, oder: carme-run -n 2 PROGRAMM</pre>" in page
    assert '<li><span lang="en">Of an earlier version.</span><pre lang="en">--cpus 2</pre></li>' in page
    assert "<h3>Empfehlungen</h3>" in page and "<th>Angefordert</th><td>1 Knoten, 2 GPUs" in page
    assert {"State", "Requested", "Ran", "Processors", "Energy of GPUs"} < english
    for title in english - {"Job", "GPUs", "Training"}:
        assert f"\n{title} " not in text and f"<th>{title}</th>" not in page, title
    assert "Empfehlungen\n- 1 der 2 GPUs" in text and "GPU: Anteil der Zeit, in der sie arbeitete" in text


def test_a_plot_has_room_for_its_numbers_in_each_language() -> None:
    curve = Curve(what="loss", name="mean of the ranks", start=0, step=60, values=[1.0, 0.5], top=2.238e-07)
    for language, most in (("en", "2.24e-07"), ("de", "2,24e-07")):
        follow(lambda language=language: language)
        try:
            shown = as_html(Report(job=job(), curves=[curve]))
        finally:
            follow(lambda: None)
        labels = re.findall(r'<text x="(\d+)" y="\d+" text-anchor="end"[^>]*>([^<]+)</text>', shown)
        assert most in {words for _x, words in labels}
        assert all(int(x) >= 7 * len(words) for x, words in labels), labels


def test_a_plot_says_which_times_and_heights_it_shows() -> None:
    curves = [
        Curve(
            what="loss",
            name="mean <b>",
            start=datetime(2026, 11, 20, 10, tzinfo=UTC).timestamp(),
            step=60.0,
            values=[1.0, None, 0.5],
            top=2.5,
        ),
        Curve(
            what="loss",
            name="other",
            start=datetime(2026, 11, 20, 10, tzinfo=UTC).timestamp() + 60,
            step=60.0,
            values=[0.1, 7.0],
            top=2.5,
        ),
    ]
    page = as_html(report(curves=curves))
    message = re.findall("<text[^>]*>([^<]*)</text>", page)
    assert message[:6] == ["2.5", "1.25", "0", "10:00:00", "10:01:00", "10:02:00 UTC"]
    assert "mean &lt;b&gt;, at most 2.5" in message
    # Each point stands where its time is, and none outside.
    lines = re.findall('points="([^"]*)"', page)
    assert lines == ["48.0,10.0", "528.0,70.0", "288.0,118.0 528.0,10.0"]


def test_what_was_read_and_written_is_reported_where_it_is_known() -> None:
    moved = Report(job=job(), usage=usage(read_bytes=3 * GIB, written_bytes=0))
    assert "GiB at most, 3.0 GiB read from disks, 0 B written" in as_text(moved)
    assert "disks" not in as_text(Report(job=job(), usage=usage()))


def test_a_job_that_waits_has_a_report_too() -> None:
    text = as_text(Report(job=job(state=JobState.PENDING, started=None, ended=None), waited_seconds=100))
    assert "nothing yet: it has not started" in text


async def test_the_report_command_prints_text_html_and_json(
    site: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "carme.toml"
    path.write_text(
        f'[site]\nurl = "{site.settings.site.url}"\n[slurm]\ncluster = "c"\n'
        f'[broker]\nsocket = "{site.settings.broker.socket}"\n'
    )
    monkeypatch.setenv("CARME_CONFIG", str(path))
    site.slurm.account(ACCOUNTED | {"JobName": "a\x1b[31m"})
    assert await asyncio.to_thread(main, ["report", "7"]) == 0
    message = capsys.readouterr().out
    assert "\x1b" not in message and "3.0 of 32.0 GiB" in message
    assert await asyncio.to_thread(main, ["report", "7", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["id"] == 7
    assert await asyncio.to_thread(main, ["report", "7", "--html"]) == 0
    assert capsys.readouterr().out.startswith("<!doctype html>")
    assert await asyncio.to_thread(main, ["report", "9"]) == 1
    assert "There is no job 9" in capsys.readouterr().err
