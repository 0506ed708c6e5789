"""Jobs with data: the job that brings it, where the next one goes, and what is reported meanwhile."""

import json
from pathlib import Path
from typing import Any

import pytest

from carme.broker import stage_in, watch
from carme.config import Settings
from carme.errors import Denied, InvalidRequest, SlurmError
from carme.jobs import Cluster, JobRequest, Stage
from carme.slurm import UnixAccount

from .conftest import RUNNING, FakeSlurm, running
from .test_broker import until


@pytest.fixture
def with_data(request_: JobRequest) -> JobRequest:
    stages = [Stage(source="/data/imagenet"), Stage(source="/data/labels", target="ram")]
    return request_.model_copy(update={"stage": stages, "gpus_per_node": 1, "results": "/home/ada/out"})


def options(call: dict[str, Any]) -> dict[str, str]:
    return {k: v for k, _, v in (word.removeprefix("--").partition("=") for word in call["arguments"])}


def spec(call: dict[str, Any]) -> dict[str, Any]:
    return json.loads((Path(options(call)["chdir"]) / "spec.json").read_text())


async def test_a_job_of_its_own_brings_the_data_first(site: Any, with_data: JobRequest) -> None:
    job_id = await site.client.submit(with_data)
    first, second = site.slurm.calls("sbatch")
    stage_in_job = next(job for job in await site.client.jobs() if job.id != job_id)
    assert options(second)["dependency"] == f"afterany:{stage_in_job.id}"
    # It holds no GPU while it copies, and does not count against the job's own time.
    assert "gres" not in options(first) and options(first)["time"] == "720"
    assert first["uid"] == second["uid"] == UnixAccount.named("ada").uid
    assert [stage["source"] for stage in spec(first)["stage"]] == ["/data/imagenet"]
    assert spec(first)["command"] == [] and spec(first)["results"] is None
    assert [stage["target"] for stage in spec(second)["stage"]] == ["local", "ram"]
    assert spec(second)["results"] == "/home/ada/out"
    assert spec(second)["stage"][0]["key"] == with_data.stage[0].key
    audit = site.settings.broker.audit_log.read_text()
    assert '"stage": ["local:/data/imagenet", "ram:/data/labels"]' in audit


async def test_what_brings_the_data_of_an_array_is_no_task_of_it(site: Any, with_data: JobRequest) -> None:
    await site.client.submit(with_data.model_copy(update={"array": "0-3"}))
    first, second = site.slurm.calls("sbatch")
    assert "array" not in options(first) and not spec(first)["array"]
    assert options(second)["array"] == "0-3" and spec(second)["array"]


async def test_a_job_s_own_file_system_needs_nodes_that_can_have_it(
    settings: Settings,
    slurm: FakeSlurm,
    accounts: None,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    request_: JobRequest,
) -> None:
    stages = [Stage(source="/data/imagenet", target="beeond"), Stage(source="/data/labels")]
    wanted = request_.model_copy(update={"stage": stages})
    async with running(settings, slurm, home, monkeypatch) as site:
        with pytest.raises(InvalidRequest, match="no BeeOND"):
            await site.client.submit(wanted)
    staging = settings.staging.model_copy(update={"beeond": Path("/mnt/beeond")})
    async with running(settings.model_copy(update={"staging": staging}), slurm, home, monkeypatch) as site:
        await site.client.submit(wanted)
    first, second = slurm.calls("sbatch")
    # What brings the rest ahead needs no such nodes, and not all of one.
    assert "constraint" not in options(first) and "exclusive" not in options(first)
    assert [stage["target"] for stage in spec(first)["stage"]] == ["local"]
    assert options(second)["constraint"] == "beeond" and "exclusive" in options(second)
    assert spec(second)["staging"]["beeond"] == "/mnt/beeond"


async def test_data_is_brought_to_booked_nodes_ahead(site: Any, with_data: JobRequest) -> None:
    requested = {"name": "stage-0123-ab", "stage": with_data.stage, "partition": "gpu", "minutes": 50}
    site.act("hub", trusted=True)
    number = await site.client.bring(node_names=["n1", "n2"], user="ada", **requested)
    (call,) = site.slurm.calls("sbatch")
    given = options(call)
    assert (given["nodelist"], given["nodes"], given["time"]) == ("n1,n2", "2", "50")
    assert (given["job-name"], call["uid"]) == ("stage-0123-ab", UnixAccount.named("ada").uid)
    assert "gres" not in given and "dependency" not in given
    assert spec(call)["command"] == [] and [stage["source"] for stage in spec(call)["stage"]] == [
        "/data/imagenet"
    ]
    assert await site.client.bring(node_names=["n1", "n2"], user="ada", **requested) == number
    assert len(site.slurm.calls("sbatch")) == 1
    feature = with_data.stage[0].feature(UnixAccount.named("ada").uid)
    nodes = site.slurm.state / "nodes"
    nodes.write_text(nodes.read_text().replace("NodeName=n1 ", f"NodeName=n1 AvailableFeatures={feature} "))
    second_request = requested | {"name": "stage-0123-cd"}
    assert await site.client.bring(node_names=["n1"], user="ada", **second_request) is None
    site.act("ada")
    with pytest.raises(Denied):
        await site.client.bring(node_names=["n1"], user="ada", **second_request)


async def test_cancelling_a_job_cancels_its_stage_in_job(site: Any, with_data: JobRequest) -> None:
    job_id = await site.client.submit(with_data)
    both = {job.id for job in await site.client.jobs()}
    await site.client.cancel(job_id)
    assert {int(call["arguments"][-1]) for call in site.slurm.calls("scancel")} == both and len(both) == 2


async def test_nodes_that_have_the_data_are_preferred_and_nothing_is_brought(
    site: Any, with_data: JobRequest
) -> None:
    feature = with_data.stage[0].feature(UnixAccount.named("ada").uid)
    nodes = site.slurm.state / "nodes"
    nodes.write_text(nodes.read_text().replace("NodeName=n1 ", f"NodeName=n1 AvailableFeatures={feature} "))

    # Nobody waits until the snapshot of the cluster is renewed.
    await site.client.submit(with_data)
    (call,) = site.slurm.calls("sbatch")
    assert options(call)["prefer"] == feature and "dependency" not in options(call)
    # Somebody else's copies are of no use to others.
    assert feature != with_data.stage[0].feature(4711)
    nodes.write_text(nodes.read_text().replace(f"AvailableFeatures={feature} ", ""))
    await site.client.submit(with_data)
    _, stage_in_job, again = site.slurm.calls("sbatch")
    assert "dependency" not in options(stage_in_job) and "dependency" in options(again)
    assert "prefer" not in options(again)


async def test_a_job_starts_although_the_cached_copy_disappears_meanwhile(
    site: Any, with_data: JobRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm refuses the word that no node has any more, and the job starts without it."""
    feature = with_data.stage[0].feature(UnixAccount.named("ada").uid)
    nodes = site.slurm.state / "nodes"
    before = nodes.read_text()
    nodes.write_text(before.replace("NodeName=n1 ", f"NodeName=n1 AvailableFeatures={feature} "))
    poll_nodes = watch.Watch.poll_nodes

    async def poll_and_note(self: watch.Watch) -> Cluster:
        found = await poll_nodes(self)
        nodes.write_text(before)
        return found

    monkeypatch.setattr(watch.Watch, "poll_nodes", poll_and_note)
    await site.client.submit(with_data)
    refused, taken = site.slurm.calls("sbatch")
    assert options(refused)["prefer"] == feature and "prefer" not in options(taken)


async def test_the_job_follows_its_data_and_says_how_far_it_is(
    site: Any, with_data: JobRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_in, "PROGRESS_SECONDS", 0.05)
    job_id = await site.client.submit(with_data)
    first = site.slurm.calls("sbatch")[0]
    log = Path(options(first)["chdir"]) / "output.log"
    log.write_text("carme-job: data on n1: imagenet: 45 %, 1.2 GiB/s, 12.0 s left\n")
    log.chmod(0o644)
    jobs = json.loads((site.slurm.state / "jobs.json").read_text())
    for job in jobs:
        running = {"T": "RUNNING", "N": "n1"} if job["A"] != job_id else {"r": "Dependency"}
        job.update(running)
    (site.slurm.state / "jobs.json").write_text(json.dumps(jobs))

    async def reported() -> bool:
        return "45 %" in (await site.client.job(job_id)).explanation

    await until(reported)
    text = (await site.client.job(job_id)).explanation
    assert text.startswith("The job's data is being staged in (imagenet: 45 %, 1.2 GiB/s, 12.0 s left)")
    feature = with_data.stage[0].feature(UnixAccount.named("ada").uid)

    async def preferred() -> bool:
        return any(
            call["arguments"] == ["update", f"JobId={job_id}", f"Prefer={feature}"]
            for call in site.slurm.calls("scontrol")
        )

    await until(preferred)
    assert f"AvailableFeatures={feature}" in (site.slurm.state / "nodes").read_text()


async def test_a_stage_to_scratch_is_refused_on_a_site_without_one(site: Any, request_: JobRequest) -> None:
    requested = request_.model_copy(update={"stage": [Stage(source="/data/x", target="scratch")]})
    with pytest.raises(InvalidRequest, match="no scratch for staging"):
        await site.client.submit(requested)
    assert not site.slurm.calls("sbatch")


async def test_what_brings_data_has_the_quality_of_service_and_keeps_to_the_limits_of_its_job(
    site: Any, with_data: JobRequest
) -> None:
    """Else Slurm lets it wait for ever, and with it the job that needs the data."""
    state = site.slurm.state
    (state / "config").write_text("AccountingStorageEnforce = associations,limits,qos\n")
    (state / "associations").write_text("ada|physics|physics||long,normal|normal|\n")
    (state / "limits").write_text(
        "ClusterName=test Account=physics UserName= Partition= ParentAccount=root(1) MaxWallPJ=90 \n"
        "QOS=long(2) MaxWallPJ=60 \n"
    )
    await site.client.submit(with_data.model_copy(update={"account": "physics"}))
    await site.client.submit(with_data.model_copy(update={"account": "physics", "qos": "long"}))
    first, second, third, fourth = map(options, site.slurm.calls("sbatch"))
    assert (first["time"], "qos" in first, "qos" in second) == ("90", False, False)
    assert (third["time"], third["qos"], fourth["qos"]) == ("60", "long", "long")
    site.act("hub", trusted=True)
    requested = {"stage": with_data.stage, "partition": "gpu", "minutes": 600, "account": "physics"}
    await site.client.bring(name="stage-0123-ab", node_names=["n1"], user="ada", **requested)
    assert options(site.slurm.calls("sbatch")[-1])["time"] == "90"


async def test_what_brings_data_is_cancelled_when_it_turns_up_after_its_job_failed(
    site: Any, with_data: JobRequest
) -> None:
    site.slurm.fail("sbatch", "sbatch: error: Batch job submission failed: Socket timed out")
    with pytest.raises(SlurmError, match="does not answer"):
        await site.client.submit(with_data)
    (call,) = site.slurm.calls("sbatch")
    site.slurm.jobs = [RUNNING | {"j": options(call)["job-name"], "k": options(call)["comment"]}]

    async def cancelled() -> bool:
        return site.slurm.jobs[0]["T"] == "CANCELLED"

    await until(cancelled)
