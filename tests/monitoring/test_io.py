"""What a job of the demo reads and writes: from the kernel to the exporter, the report and the job's page."""

from collections.abc import Iterator

import pytest
from browser.conftest import log_in
from playwright.sync_api import Page, expect

from demo_metrics import scrape_node
from demo_site import DemoSite, wait_until
from patience import HANG

MIB = 1 << 20
#: Writes 64 MiB in the batch step, and reads them past the page cache in another.
SCRIPT = (
    "cd $HOME && dd if=/dev/zero of=io-test bs=1M count=64 conv=fsync && "
    "srun -n1 sh -c 'dd if=io-test of=/dev/null bs=1M iflag=direct; rm io-test; exec sleep 1000'"
)
PATIENCE = (
    2 * HANG
)  # the reader polls twice a minute, then Prometheus scrapes, then the portal's page is renewed


@pytest.fixture
def job(demo: DemoSite) -> Iterator[int]:
    done = demo.run(
        *("head", "sbatch", "--parsable", "--nodelist=n1", "--mem=600M", "--time=20", "--chdir=/"),
        *("--output=/dev/null", "--wrap", SCRIPT),
        user="user1",
    )
    yield int(done.stdout)
    demo.run("head", "scancel", done.stdout.strip())


def test_io_of_a_job_is_reported_in_every_view_of_its_owner(page: Page, demo: DemoSite, job: int) -> None:
    def moved(name: str, **labels: str) -> float:
        return max(
            scrape_node(demo, "n1").values(f"carme_{name}_bytes_total", jobid=str(job), **labels), default=0
        )

    wait_until(
        "the exporter reports what was read", lambda: moved("step_io_read", step="0") >= 64 * MIB, PATIENCE
    )
    assert moved("job_io_written") >= 64 * MIB
    assert moved("step_io_written", step="batch") >= 64 * MIB > moved("step_io_written", step="0")

    def reported() -> bool:
        usage = demo.carme_json("report", str(job))["usage"]
        return bool(usage) and (usage["nodes"][0]["read_bytes"] or 0) >= 64 * MIB

    wait_until("the report shows it", reported, PATIENCE)
    assert "MiB read from disks, " in demo.carme("report", str(job)).stdout
    log_in(page, demo)
    page.goto(f"/jobs/{job}/")
    expect(page.locator("#use")).to_contain_text("MiB read from disks, ", timeout=PATIENCE * 1000)


def test_the_reader_of_io_has_no_other_rights(demo: DemoSite) -> None:
    """The reader runs only where control groups are of version 1."""
    show = ("systemctl", "show", "--property=MainPID", "--value", "carme-io-reader")
    pid = demo.run("n1", *show).stdout.strip()
    if pid == "0":
        assert demo.run("n1", "test", "-e", "/sys/fs/cgroup/cgroup.controllers", check=False).returncode == 0
        pytest.skip("control groups of version 2 count by themselves")
    status = dict(
        line.split(":\t", 1)
        for line in demo.run("n1", "cat", f"/proc/{pid}/status").stdout.splitlines()
        if ":\t" in line
    )
    assert status["Uid"].split()[0] != "0" and status["NoNewPrivs"] == "1"
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 1 << 19 | 1 << 2
    for folder in ("/srv", "/etc/carme", "/home"):
        assert demo.run("n1", "ls", "-A", folder).stdout
        assert not demo.run("n1", "ls", "-A", f"/proc/{pid}/root{folder}").stdout
