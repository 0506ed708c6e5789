"""The main job: from the login page to a model trained on two nodes, and its record in Slurm's accounting."""

import json

from demo_site import DemoSite, wait_until
from patience import HANG


def test_a_user_trains_a_model_over_two_nodes_from_the_browser(demo: DemoSite) -> None:
    done = demo.run(
        "head",
        "/opt/carme/venv/bin/carme",
        "validate",
        "--training",
        "--json",
        *("--user", "user1", "--password-file", "-"),
        *("--certificate", "/etc/carme/tls/site.pem"),
        user="user1",
        data=demo.passwords["user1"] + "\n",
        timeout=600,
        check=False,
    )
    print(done.stderr)
    verdict = json.loads(done.stdout)
    assert verdict["ok"], [check for check in verdict["checks"] if not check["ok"]]
    assert done.returncode == 0
    assert {check["name"] for check in verdict["checks"]} >= {"start", "notebook", "training", "accounting"}
    assert verdict["training"]["ranks"] == 4
    assert len(verdict["training"]["hosts"]) == 2
    assert verdict["training"]["accuracy"] > 0.95


def test_the_published_port_leads_to_the_portal_and_a_notebook(demo: DemoSite) -> None:
    """From outside of the cluster's network: what a person at a browser reaches."""
    options = {"image": "base", "nodes": "1", "gpus_per_node": "1", "minutes": "10", "title": "From outside"}
    expert = {"cpus_per_node": "3", "memory_mb_per_node": "1300"}
    with demo.visitor("user1") as visitor:
        name = visitor.start(options | expert)
        visitor.wait(name, "ready", timeout=HANG)
        with visitor.kernel(visitor.open(name)) as kernel:
            cell = kernel.run("import os; print(os.environ['SLURM_JOB_ID'])", timeout=HANG)
        job = int(cell.output)
        assert demo.job_of(name)["id"] == job
        given = ("head", "squeue", "--noheader", f"--jobs={job}", "--Format=NumCPUs,MinMemory,tres-alloc:80")
        cpus, memory, allocated = demo.run(*given).stdout.split()
        assert (cpus, memory) == ("3", "1300M") and "gres/gpu=1" in allocated
        visitor.stop(name)
        visitor.wait(name, "ended", timeout=HANG)
    wait_until("no job is left", lambda: not demo.carme_json("jobs"))
