"""Jobs with a file system of their own on a real Slurm, from prolog to epilog, and when a node goes down.

`beeond` itself is a stand-in (tests/simulated_beeond.sh), which works on the node where it is called: so each
job here has one node. Prolog and epilog are those of the role, for a site that has BeeOND.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import jinja2
import pytest
import yaml

from carme.jobs import Job
from demo_site import ROOT, DemoSite, wait_until
from faults.plan import boot, heal, kill
from patience import HANG

CACHE = "/var/cache/carme/data"
MOUNTS = "/mnt/beeond"
HOOKS = "/usr/libexec/carme"
SOURCE = "/scratch/beeond-test"
NODES = ("n1", "n2")
HOSTS = ("head", *NODES)
TOML = "/etc/carme/carme.toml"
ROLES = ROOT / "ansible/roles"


def hook(name: str) -> str:
    """Prolog or epilog as the role writes it."""
    layout = yaml.safe_load((ROLES / "carme/vars/main.yml").read_text())
    values = {key: value for key, value in layout.items() if "{{" not in str(value)}
    values |= {"carme_staging_cache": CACHE, "carme_beeond": MOUNTS, "carme_minimum_uid": 1000}
    values |= {"job_hooks_required_mounts": [], "job_hooks_epilog_seconds": 60}
    template = (ROLES / f"job_hooks/templates/{name}.j2").read_text()
    return (
        jinja2.Environment(trim_blocks=True, keep_trailing_newline=True).from_string(template).render(values)
    )


@pytest.fixture(scope="module", autouse=True)
def site(demo: DemoSite) -> Iterator[DemoSite]:
    """The demo, configured as a site with BeeOND."""
    stand_in = Path(ROOT / "tests/simulated_beeond.sh").read_text()
    for host in HOSTS:
        demo.run(host, "cp", "--preserve=all", TOML, f"{TOML}.kept")
        demo.run(host, "sed", "-i", f'/^\\[staging\\]/a beeond = "{MOUNTS}"', TOML)
    for node in NODES:
        demo.run(node, "install", "-m", "755", "/dev/stdin", "/usr/local/sbin/beeond", data=stand_in)
        demo.run(node, "install", "-d", "-m", "700", f"{CACHE}/beeond")
        demo.run(node, "install", "-d", "-m", "711", MOUNTS)
        for name in ("prolog", "epilog"):
            demo.run(node, "cp", "--preserve=all", f"{HOOKS}/{name}", f"{HOOKS}/{name}.kept")
            demo.run(node, "tee", f"{HOOKS}/{name}", data=hook(name))
        demo.run("head", "scontrol", "update", f"NodeName={node}", "AvailableFeatures=beeond")
    demo.run("head", "systemctl", "restart", "carme-broker")
    demo.run("head", "sh", "-c", f"mkdir -p {SOURCE} && seq 1000 >{SOURCE}/numbers")
    try:
        yield demo
    finally:
        heal(demo)
        for node in NODES:
            demo.run(node, "systemctl", "start", "carme-janitor", check=False)
            for name in ("prolog", "epilog"):
                demo.run(node, "mv", f"{HOOKS}/{name}.kept", f"{HOOKS}/{name}")
            demo.run(node, "rm", "-rf", "/usr/local/sbin/beeond", f"{CACHE}/beeond", "/run/beeond-fails")
            demo.run(
                "head", "scontrol", "update", f"NodeName={node}", "AvailableFeatures=", "ActiveFeatures="
            )
        for host in HOSTS:
            demo.run(host, "mv", f"{TOML}.kept", TOML)
        demo.run("head", "systemctl", "restart", "carme-broker")
        demo.run("head", "rm", "-rf", SOURCE)


def submit(demo: DemoSite, script: str) -> int:
    options = ["--json", "--time", "5m", "--stage", f"beeond:{SOURCE}"]
    return json.loads(demo.carme("submit", *options, "--", "sh", "-c", script).stdout)["job_id"]


def over(demo: DemoSite, job_id: int) -> Job:
    def ended() -> Job | None:
        known = demo.carme_json("jobs", "--all-states")
        return next((job for job in map(Job.model_validate, known) if job.id == job_id and job.is_over), None)

    return wait_until("the job is over", ended, timeout=HANG)


def left(demo: DemoSite, node: str) -> str:
    """Files, mounts and processes of any instance on a node."""
    places = f"{MOUNTS} {CACHE}/beeond /run/carme-beeond"
    return demo.run(node, "sh", "-c", f"ls -A {places} | grep '^[0-9]'; pgrep -a -x sleep; true").stdout


def test_a_job_has_it_alone_and_nothing_stays(site: DemoSite) -> None:
    script = (
        "stat -c '%U %a' $CARME_BEEOND; tail -n 1 $CARME_DATA/beeond-test/numbers; readlink $CARME_DATA/*; "
        "echo mine >$CARME_BEEOND/own && cat $CARME_BEEOND/own; findmnt -n -o FSTYPE -T $CARME_BEEOND"
    )
    job_id = submit(site, script)
    node = over(site, job_id).node_list
    log = site.carme("logs", str(job_id)).stdout
    assert "beeond-test: copied to beeond" in log
    assert log.split("copied to beeond")[1].splitlines()[1:3] == ["user1 700", "1000"], log
    assert f"{MOUNTS}/{job_id}/" in log and "mine" in log and "tmpfs" in log
    wait_until("nothing is left", lambda: not left(site, node).strip())


def test_a_job_whose_file_system_cannot_be_started_says_so(site: DemoSite) -> None:
    for node in NODES:
        site.run(node, "touch", "/run/beeond-fails")
    job = over(site, submit(site, "hostname"))
    assert "(BeeOND) is not there on" in site.carme("logs", str(job.id)).stdout
    assert "data" in job.explanation
    message = site.run(job.node_list, "journalctl", "-t", "carme-prolog", "-n", "5", "--no-pager").stdout
    assert "Host is unreachable via ssh" in message
    wait_until("nothing is left", lambda: not left(site, job.node_list).strip())
    # The node is not drained for that.
    assert "idle" in site.run("head", "sinfo", "-h", "-n", job.node_list, "-o", "%t").stdout
    for node in NODES:
        site.run(node, "rm", "/run/beeond-fails")


def test_nothing_of_its_file_system_is_left_after_its_node_went_down(site: DemoSite) -> None:
    job_id = submit(site, "echo $CARME_BEEOND; exec sleep 300")
    wait_until("the job runs", lambda: MOUNTS in site.carme("logs", str(job_id), check=False).stdout)
    known = map(Job.model_validate, site.carme_json("jobs"))
    node = next(listed for listed in known if listed.id == job_id).node_list
    assert str(job_id) in left(site, node)
    kill(site, node)
    wait_until(
        "Slurm has given the node up",
        lambda: not any(job["id"] == job_id for job in site.carme_json("jobs")),
        timeout=HANG,
    )
    boot(site, node)
    heal(site)
    site.run(node, "systemctl", "start", "carme-janitor")
    wait_until("nothing is left", lambda: not left(site, node).strip())
