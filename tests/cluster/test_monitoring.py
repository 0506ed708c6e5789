"""The exporters on the running cluster: real control groups, a real prolog, and who may read them."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from demo_metrics import Samples, scrape_cluster, scrape_node
from demo_site import DemoSite, wait_until


@pytest.fixture
def job(demo: DemoSite) -> Iterator[int]:
    """A job of user1 on n1: two GPUs, three processors, 600 MB; it holds more than 100 of them."""
    script = "exec python3 -c 'x = bytearray(100 << 20); exec(\"while True: pass\")'"
    done = demo.run(
        *("head", "sbatch", "--parsable", "--nodelist=n1", "--gres=gpu:2", "--cpus-per-task=3", "--mem=600M"),
        *("--time=5", "--chdir=/", "--output=/dev/null", "--wrap", script),
        user="user1",
    )
    number = int(done.stdout)
    yield number
    demo.run("head", "scancel", str(number))


def of_job(demo: DemoSite, job: int, name: str, **labels: str) -> list[float]:
    return scrape_node(demo, "n1").values(name, jobid=str(job), **labels)


def test_a_job_is_attributed_and_measured_and_vanishes_with_its_end(demo: DemoSite, job: int) -> None:
    wait_until(
        "the job uses its memory",
        lambda: max(of_job(demo, job, "carme_job_memory_used_bytes"), default=0) > 1e8,
    )
    seen = scrape_node(demo, "n1")
    assert seen.values("carme_job_info", jobid=str(job), user="user1", account="carme", partition="gpu") == [
        1
    ]
    assert seen.values("carme_job_cpus", jobid=str(job), user="user1") == [3]
    assert seen.values("carme_job_memory_limit_bytes", jobid=str(job)) == [600 << 20]
    assert max(seen.values("carme_step_memory_used_bytes", jobid=str(job), step="batch")) > 1e8
    before = sum(seen.values("carme_job_cpu_seconds_total", jobid=str(job)))
    wait_until(
        "its processor time grows", lambda: sum(of_job(demo, job, "carme_job_cpu_seconds_total")) > before
    )

    record = f"/run/carme/allocations/{job}.json"
    reported = json.loads(demo.run("n1", "cat", record).stdout)
    assert (reported["user"], reported["account"], reported["cpus"]) == ("user1", "carme", 3)
    assert len(reported["gpus"].split(",")) == 2
    assert demo.run("n1", "stat", "--format=%a %U:%G", record).stdout.strip() == "640 root:carme-exporter"

    demo.run("head", "scancel", str(job))
    wait_until("the job's series are gone", lambda: not of_job(demo, job, "carme_job_info"))
    wait_until("its record is gone", lambda: demo.run("n1", "test", "-e", record, check=False).returncode)


def test_users_read_neither_metrics_nor_allocations_nor_keys(demo: DemoSite, job: int) -> None:
    wait_until("the job runs", lambda: of_job(demo, job, "carme_job_info"))
    addresses = {"n1": f"{address(demo, 'n1')}:9750", "head": "127.0.0.1:9751"}
    requested = ("curl", "--silent", "--insecure", "--max-time", "10")
    tries = [
        (node, *requested, f"{scheme}://{where}/metrics")
        for node, where in addresses.items()
        for scheme in ("http", "https")
    ]
    nothing_is_read(demo, tries, user="user2")
    for path in (
        f"/run/carme/allocations/{job}.json",
        "/run/carme/allocations",
        "/etc/carme/monitoring/node/tls.pem",
    ):
        assert demo.run("n1", "cat", path, user="user2", check=False).returncode != 0
    for path in ("authority.pem", "broker/tls.pem", "cluster-exporter/tls.pem", "node-n1/tls.pem"):
        assert (
            demo.run("head", "cat", f"/etc/carme/monitoring/{path}", user="user2", check=False).returncode
            != 0
        )
    done = demo.run("head", "/opt/carme/venv/bin/python", "-c", OVERVIEW, user="user2", check=False)
    assert "may not see figures of all users" in done.stderr


def nothing_is_read(demo: DemoSite, tries: list[tuple[str, ...]], user: str | None = None) -> None:
    """Commands, each after its host's name, get nothing.

    They run at the same time: a host that drops what comes keeps each waiting.
    """
    with ThreadPoolExecutor(len(tries)) as threads:
        for done in threads.map(lambda each: demo.run(*each, user=user, check=False), tries):
            assert done.returncode != 0 and done.stdout == ""


OVERVIEW = "from carme.broker import BrokerClient; BrokerClient().overview()"


def test_a_node_s_own_certificate_reads_nothing(demo: DemoSite) -> None:
    folder = "/etc/carme/monitoring/node"
    requested = (
        "curl",
        "--silent",
        "--max-time",
        "10",
        "--cert",
        f"{folder}/tls.pem",
        "--cacert",
        f"{folder}/ca.crt",
    )
    tries = [("n1", *requested, f"https://{address(demo, node)}:9750/metrics") for node in ("n1", "n2")]
    nothing_is_read(demo, tries)


@pytest.mark.alone
def test_the_clusters_exporter_reports_queue_users_and_services(demo: DemoSite, job: int) -> None:
    services = ("broker", "portal", "hub")

    def held() -> Samples | None:
        """What is reported once it shows this job alone, and services that other tests have restarted."""
        seen = scrape_cluster(demo)
        alone = sum(seen.values("carme_queue_jobs", state="running")) == 1
        up = all(seen.values("carme_service_up", service=service) == [1] for service in services)
        return seen if alone and up and seen.values("carme_user_gpus", user="user1") == [2] else None

    seen = wait_until("the cluster's exporter shows the job", held)
    assert seen.values("carme_account_gpus", account="carme", gpu_type="a100") == [2]
    assert seen.values("carme_cluster_gpus", gpu_type="a100") == [demo.settings.nodes * demo.settings.gpus]
    assert seen.values("carme_slurm_up") == [1]
    assert seen.values("carme_node_available", node="n1") == [1]
    ended = sum(seen.values("carme_jobs_ended_total"))
    demo.run("head", "scancel", str(job))
    wait_until(
        "its end is counted", lambda: sum(scrape_cluster(demo).values("carme_jobs_ended_total")) == ended + 1
    )


def test_exporters_run_with_few_powers(demo: DemoSite) -> None:
    for node, unit in (("n1", "carme-node-exporter"), ("head", "carme-cluster-exporter")):
        pid = demo.run(node, "systemctl", "show", "--property=MainPID", "--value", unit).stdout.strip()
        status = dict(
            line.split(":\t", 1)
            for line in demo.run(node, "cat", f"/proc/{pid}/status").stdout.splitlines()
            if ":\t" in line
        )
        assert status["Uid"].split()[0] != "0"
        assert status["CapEff"].strip("0") == status["CapBnd"].strip("0") == ""
        assert status["NoNewPrivs"] == "1"


def address(demo: DemoSite, name: str) -> str:
    return next(machine.address for machine in demo.settings.machines() if machine.name == name)
