"""What follows where alerts about a job fire: warnings, and by policy its end; all of it on record."""

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from real_prometheus import Prometheus, prometheus_with

from carme.broker.audit import AuditLog
from carme.broker.policy import FILE, MOST_STOPS, Alert, Policy, firing
from carme.config import Settings
from carme.errors import Denied, SlurmError
from carme.jobs import Job, JobState

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
IDLE = "CarmeGpuIdle"
RULES = """
groups:
  - name: test
    rules:
      - alert: CarmeGpuIdle
        expr: vector(1)
        labels: {audience: user, jobid: "7", user: ada, gpu: "0"}
        annotations: {summary: "Job 7 idles.", advice: "End it."}
      - alert: CarmeOther
        expr: vector(1)
        labels: {audience: user, jobid: "7", user: ada}
"""


def job(number: int = 7, **changes: Any) -> Job:
    values: dict[str, Any] = {"id": number, "name": "train", "user": "ada", "account": "research"}
    values |= {"partition": "gpu", "state": JobState.RUNNING, "started": BEGIN, "submitted": BEGIN}
    return Job(**values | changes)


def alert(number: int = 7, user: str = "ada") -> Alert:
    return Alert(name=IDLE, job_id=number, user=user, summary=f"Job {number} idles.", advice="End it.")


class Site:
    """A policy about jobs that the test gives, which lets time pass."""

    def __init__(self, settings: Settings, folder: Path, **policy: Any) -> None:
        changed = settings.monitoring.policy.model_validate({"alerts": [IDLE], **policy})
        self.settings = settings.model_copy(
            update={"monitoring": settings.monitoring.model_copy(update={"policy": changed})}
        )
        settings.broker.state_directory.mkdir(parents=True, exist_ok=True)
        self.jobs = [job()]
        self.stopped: list[int] = []
        self.refuse = False
        self.log = folder / "audit.jsonl"
        self.now = BEGIN + timedelta(hours=5)
        self.policy = self.anew()

    def anew(self) -> Policy:
        watch: Any = SimpleNamespace(jobs=lambda: self.jobs)
        return Policy(self.settings, watch, AuditLog(self.log), self.stop)

    async def stop(self, job: Job) -> None:
        if self.refuse:
            raise SlurmError("Slurm does not answer.", "Wait.")
        self.stopped.append(job.id)

    async def evaluate(self, *alerts: Alert, after: float = 60) -> None:
        self.now += timedelta(minutes=after)
        await self.policy.evaluate({alert.job_id: [alert] for alert in alerts}, self.now)

    def record(self) -> list[tuple[str, str]]:
        if not self.log.exists():
            return []
        entries = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [(entry["action"], entry["result"]) for entry in entries]


WARN, STOP = ("policy_warn", "ok"), ("policy_stop", "ok")


async def test_a_job_is_stopped_after_its_warnings_and_not_before(settings: Settings, tmp_path: Path) -> None:
    site = Site(settings, tmp_path, stop=True, warnings=2)
    await site.evaluate(alert())
    (message,) = site.policy.notices(site.jobs[0])
    assert message.text == (
        "Job 7 idles. This is warning 1 of 2: "
        "unless that changes, the job is stopped at 2026-01-01 08:00 UTC."
    )
    assert message.change == "End it."
    await site.evaluate(alert(), after=30)  # the same warning still
    assert site.record() == [WARN]
    await site.evaluate(alert(), after=30)
    await site.evaluate(alert(), after=59)
    assert site.record() == [WARN, WARN] and site.stopped == []
    await site.evaluate(alert(), after=1)
    assert site.record() == [WARN, WARN, STOP] and site.stopped == [7]
    await site.evaluate(alert())
    assert site.stopped == [7]
    entry = json.loads(site.log.read_text().splitlines()[-1])
    assert (entry["user"], entry["job_id"], entry["alerts"], entry["warnings"]) == ("ada", 7, [IDLE], 2)


async def test_a_stop_is_shown_for_a_day_and_survives_a_restart(settings: Settings, tmp_path: Path) -> None:
    site = Site(settings, tmp_path, stop=True, warnings=1)
    assert site.policy.warnings() == []
    await site.evaluate(alert())
    (shown,) = site.policy.warnings()
    assert (shown.job_id, shown.user, shown.count, shown.most, shown.stopped) == (7, "ada", 1, 1, None)
    assert shown.ends == site.now + timedelta(hours=1)
    assert [(advice.text, advice.change) for advice in shown.what] == [("Job 7 idles.", "End it.")]
    await site.evaluate(alert())
    site.jobs = []
    await site.evaluate()
    site.policy = site.anew()
    site.policy.remember()
    (shown,) = site.policy.warnings()
    assert shown.stopped is not None and shown.ends is None
    await site.evaluate(after=24 * 60)
    assert site.policy.warnings() == []


async def test_rules_that_only_warn_end_nothing(settings: Settings, tmp_path: Path) -> None:
    warning = alert().model_copy(update={"name": "CarmeOther"})
    site = Site(settings, tmp_path, alerts=[IDLE, "CarmeOther"], stop=[IDLE], warnings=1)
    for _ in range(3):
        await site.evaluate(warning)
    assert site.record() == [WARN] and site.policy.warnings()[0].ends is None
    # The owner is warned first of a rule that can end the job.
    await site.evaluate(alert())
    assert site.record() == [WARN, WARN] and site.stopped == []
    await site.evaluate(alert())
    assert site.stopped == [7]


async def test_by_default_nothing_is_stopped_but_it_is_on_record(settings: Settings, tmp_path: Path) -> None:
    site = Site(settings, tmp_path)
    for _ in range(6):
        await site.evaluate(alert())
    assert site.record() == [WARN, WARN, WARN, ("policy_stop", "dry_run")] and site.stopped == []
    (message,) = site.policy.notices(site.jobs[0])
    assert message.text == "Job 7 idles. This is warning 3 of 3."


@pytest.mark.parametrize(
    "exempt", [{"exempt_users": ["ada"]}, {"exempt_accounts": ["research"]}, {"exempt_partitions": ["gpu"]}]
)
async def test_exempt_users_are_left_alone(
    settings: Settings, tmp_path: Path, exempt: dict[str, list[str]]
) -> None:
    site = Site(settings, tmp_path, stop=True, warnings=1, **exempt)
    for _ in range(4):
        await site.evaluate(alert())
    assert site.record() == [] and site.stopped == [] and site.policy.notices(site.jobs[0]) == []


async def test_warnings_start_again_for_a_job_that_works_again(settings: Settings, tmp_path: Path) -> None:
    site = Site(settings, tmp_path, stop=True, warnings=1)
    await site.evaluate(alert())
    await site.evaluate()
    await site.evaluate()  # an interval of quiet
    await site.evaluate(alert())
    assert site.record() == [WARN, WARN] and site.stopped == []


async def test_a_suspension_neither_forgets_warnings_nor_counts_as_time(
    settings: Settings, tmp_path: Path
) -> None:
    site = Site(settings, tmp_path, stop=True, warnings=1)
    await site.evaluate(alert())
    running = site.jobs
    site.jobs = [job(state=JobState.SUSPENDED)]
    assert site.jobs[0].is_suspended and site.jobs[0].is_running
    await site.evaluate(alert(), after=59)
    assert [warning.ends for warning in site.policy.warnings()] == [None]
    site.policy = site.anew()
    site.policy.remember()
    await site.evaluate(alert(), after=59)
    assert site.record() == [WARN] and site.stopped == []
    site.jobs = running
    await site.evaluate(alert(), after=1)
    await site.evaluate(alert(), after=59)
    assert site.record() == [WARN] and site.stopped == []
    await site.evaluate(alert(), after=1)
    assert site.record() == [WARN, STOP] and site.stopped == [7]


async def test_a_suspended_job_does_not_have_the_warnings_written_at_each_look(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(settings, tmp_path, stop=True, warnings=1)
    await site.evaluate(alert())
    site.jobs = [job(state=JobState.SUSPENDED)]
    await site.evaluate(alert(), after=1)
    written: list[Path] = []
    monkeypatch.setattr("carme.broker.policy._write", lambda file, _: written.append(file))
    await site.evaluate(alert(), after=1)
    await site.evaluate(alert(), after=1)
    assert written == []


async def test_what_is_quiet_for_a_moment_is_not_forgotten(settings: Settings, tmp_path: Path) -> None:
    site = Site(settings, tmp_path, stop=True, warnings=1)
    await site.evaluate(alert())
    await site.evaluate(after=30)
    await site.evaluate(alert(), after=30)
    assert site.stopped == [7]


async def test_another_job_with_the_number_is_not_punished_for_the_first(
    settings: Settings, tmp_path: Path
) -> None:
    site = Site(settings, tmp_path, stop=True, warnings=1)
    await site.evaluate(alert())
    site.jobs = [job(started=BEGIN + timedelta(hours=6))]
    assert site.policy.notices(site.jobs[0]) == []
    await site.evaluate(alert())
    assert site.stopped == []
    site.jobs = [job(user="bob")]
    await site.evaluate(alert())  # the alert is about ada's
    assert site.stopped == [] and site.record() == [WARN, WARN]


async def test_warnings_survive_a_restart_and_a_damaged_file_is_empty(
    settings: Settings, tmp_path: Path
) -> None:
    site = Site(settings, tmp_path, stop=True, warnings=1)
    await site.evaluate(alert())
    file = settings.broker.state_directory / FILE
    assert file.stat().st_mode & 0o777 == 0o600
    site.policy = site.anew()
    site.policy.remember()
    await site.evaluate(alert())
    assert site.stopped == [7]
    file.write_text("{")
    site.policy = site.anew()
    site.policy.remember()
    await site.evaluate(alert())
    assert site.stopped == [7]


async def test_a_rule_that_went_wrong_does_not_end_everything_at_once(
    settings: Settings, tmp_path: Path
) -> None:
    site = Site(settings, tmp_path, stop=True, warnings=1)
    numbers = range(1, 2 * MOST_STOPS)
    site.jobs = [job(number) for number in numbers]
    everywhere = [alert(number) for number in numbers]
    await site.evaluate(*everywhere)
    await site.evaluate(*everywhere)
    assert len(site.stopped) == MOST_STOPS


async def test_what_slurm_refuses_is_tried_again(settings: Settings, tmp_path: Path) -> None:
    site = Site(settings, tmp_path, stop=True, warnings=1)
    await site.evaluate(alert())
    site.refuse = True
    await site.evaluate(alert())
    assert site.record()[-1] == ("policy_stop", "slurm")
    site.refuse = False
    await site.evaluate(alert(), after=1)
    assert site.stopped == [7]


def test_only_what_fires_by_a_rule_of_the_policy_counts() -> None:
    def shown(**changes: Any) -> dict[str, Any]:
        labels = {"alertname": IDLE, "jobid": "7", "user": "ada"} | changes
        return {"labels": labels, "state": labels.pop("state", "firing"), "annotations": {}}

    rows = [shown(), shown(gpu="1"), shown(jobid="8", state="pending"), shown(jobid="9", alertname="Other")]
    rows += [shown(jobid="x"), shown(jobid="٣"), shown(jobid="")]
    found = firing({"data": {"alerts": rows}}, [IDLE])
    assert {number: len(about) for number, about in found.items()} == {7: 1}


def test_a_policy_that_cannot_be_is_refused(settings: Settings) -> None:
    for wrong in ({"warnings": 0}, {"every_minutes": 0}, {"exempt_user": ["ada"]}, {"stop": ["CarmeOther"]}):
        with pytest.raises(ValidationError):
            settings.monitoring.policy.model_validate(wrong)


# With Prometheus itself


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    samples = f"# TYPE x gauge\nx 1 {datetime.now(UTC).timestamp():.0f}\n# EOF\n"
    with prometheus_with(samples, tmp_path_factory.mktemp("prometheus"), RULES) as running:
        yield running


class TestWithPrometheus:
    """A broker whose site has a Prometheus with a rule that fires."""

    @pytest.fixture
    def settings(
        self, settings: Settings, prometheus: Prometheus, monkeypatch: pytest.MonkeyPatch
    ) -> Settings:
        monkeypatch.setattr("carme.broker.policy.POLL_SECONDS", 0.2)
        update = {
            "prometheus": prometheus.url,
            "certificates": prometheus.certificates,
            "policy": settings.monitoring.policy.model_validate({"alerts": [IDLE]}),
        }
        return settings.model_copy(update={"monitoring": settings.monitoring.model_copy(update=update)})

    async def test_the_owner_reads_the_warning_in_the_job_s_report(self, site: Any) -> None:
        started = str(int(datetime.now(UTC).timestamp()) - 600)
        site.slurm.jobs = [
            {
                "A": 7, "j": "train", "u": "ada", "a": "research", "P": "gpu", "T": "RUNNING", "D": 1, "C": 4,
                "m": "32G", "l": "2:00:00", "b": "gres/gpu:a100:2", "V": started, "S": started, "e": "NONE",
                "k": "carme/1 kind=batch image= key=" + "ab" * 16,
            }
        ]  # fmt: skip

        def warnings() -> list[dict[str, Any]]:
            return [entry for entry in site.audit() if entry["action"] == "policy_warn"]

        while not warnings():  # noqa: ASYNC110 - what changes is outside; the test's own limit ends it
            await asyncio.sleep(0.1)
        (entry,) = warnings()
        assert (entry["user"], entry["job_id"], entry["alerts"]) == ("ada", 7, [IDLE])
        with pytest.raises(Denied, match="warnings of all users"):
            await site.client.warnings()
        first = (await site.client.report(7)).advice[0]
        assert (first.topic, first.text) == ("policy", "Job 7 idles. This is warning 1 of 3.")
