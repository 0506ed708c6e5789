"""From an idle GPU to its owner's notices and the job's end, by the site's policy and an impatient rule."""

import json
import re
from collections.abc import Iterator

import pytest
from bs4 import BeautifulSoup

from carme.jobs import JobState
from demo_site import DemoSite, wait_until
from patience import HANG

from .conftest import Gpus

RULES = "/etc/prometheus/carme-rules/jobs.yml"
PROMETHEUS = "/etc/prometheus/prometheus.yml"
SITE = "/etc/carme/carme.toml"
POLICY = """[monitoring.policy]
warnings = 2
every_minutes = 2
stop = ["CarmeGpuNeverUsed"]
exempt_users = ["user2"]
"""


@pytest.fixture
def strict(demo: DemoSite) -> Iterator[None]:
    """Alerts after a minute in which nothing was done, two warnings, and the end; not for user2."""
    for file in (RULES, PROMETHEUS, SITE):
        demo.run("head", "cp", "--preserve=all", file, f"{file}.kept")
    rules = demo.run("head", "cat", RULES).stdout.replace("[1h]", "[1m]").replace("offset 1h", "offset 1m")
    demo.run("head", "tee", RULES, data=rules.replace("for: 5m", "for: 0m"))
    settings = demo.run("head", "cat", PROMETHEUS).stdout
    demo.run(
        "head",
        "tee",
        PROMETHEUS,
        data=settings.replace("evaluation_interval: 1m", "evaluation_interval: 15s"),
    )
    site = demo.run("head", "cat", SITE).stdout
    demo.run("head", "tee", SITE, data=re.sub(r"\[monitoring\.policy\]\n[^[]*", POLICY + "\n", site))
    _take_up(demo)
    yield
    for file in (RULES, PROMETHEUS, SITE):
        demo.run("head", "mv", f"{file}.kept", file)
    _take_up(demo)


def _take_up(demo: DemoSite) -> None:
    demo.run("head", "systemctl", "reload", "prometheus")
    demo.run("head", "systemctl", "restart", "carme-broker")
    wait_until("the broker answers", lambda: demo.carme("jobs", check=False).returncode == 0)


def idle(demo: DemoSite, user: str) -> int:
    """A job with a GPU that it does not use."""
    options = ("--parsable", "--nodelist=n1", "--gres=gpu:1", "--mem=500M", "--time=30", "--chdir=/")
    done = demo.run("head", "sbatch", *options, "--output=/dev/null", "--wrap", "sleep 1500", user=user)
    return int(done.stdout)


def notices(demo: DemoSite, user: str, job: int) -> list[str]:
    """The notices about a job on the user's page, the newest first."""
    with demo.visitor(user) as visitor:
        page = visitor.fetch(f"{visitor.url}profile/").text
    links = BeautifulSoup(page, "html.parser").select(f'main a[href="/jobs/{job}/"]')
    return [link.get_text(" ", strip=True) for link in links]


def test_the_owner_of_an_idle_gpu_is_warned_twice_and_then_the_job_ends(
    demo: DemoSite, gpus: Gpus, strict: None
) -> None:
    job, exempt = idle(demo, "user1"), idle(demo, "user2")

    first = wait_until(
        "the first warning is on the user's page", lambda: notices(demo, "user1", job), timeout=2 * HANG
    )
    assert re.fullmatch(
        rf"Job {job}: GPU \d of n1 has not been used for an hour\. Ask for fewer GPUs .* "
        r"This is warning 1 of 2: unless that changes, the job is stopped at \d{4}-\d\d-\d\d \d\d:\d\d UTC\.",
        first[0],
    )
    advice = demo.carme_json("report", str(job))["advice"]
    assert advice[0]["topic"] == "policy" and "warning 1 of 2" in advice[0]["text"]
    second = wait_until("the second one", lambda: notices(demo, "user1", job)[:-1], timeout=2 * HANG)
    assert "This is warning 2 of 2: unless that changes, the job is stopped at" in second[0]
    assert demo.job_state(job) is JobState.RUNNING

    wait_until("the job is stopped", lambda: demo.job_state(job) is JobState.CANCELLED, timeout=2 * HANG)
    last = wait_until("the user is notified", lambda: notices(demo, "user1", job)[:-2], timeout=HANG)
    assert last[0].startswith(f"Your job {job} was stopped after 2 warnings: Job {job}: GPU ")

    log = demo.run("head", "cat", "/var/log/carme/audit.jsonl").stdout
    entries = [json.loads(line) for line in log.splitlines() if '"policy_' in line]
    done = [
        (entry["action"], entry["result"], entry["user"]) for entry in entries if entry.get("job_id") == job
    ]
    assert done == [("policy_warn", "ok", "user1")] * 2 + [("policy_stop", "ok", "user1")]
    assert demo.job_state(exempt, "user2") is JobState.RUNNING
    assert notices(demo, "user2", exempt) == []
    assert exempt not in {entry.get("job_id") for entry in entries}
