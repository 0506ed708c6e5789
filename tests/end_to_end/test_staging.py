"""Data in one journey: uploaded, a dataset, on the node before a session begins, found by the next one."""

import io
import json
import random
import re
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser.conftest import log_in, open_start_form
from cluster.test_bookings import booked, confirm, send, session_of
from playwright.sync_api import Page, expect

from carme.jobs import Job, JobState
from demo_site import DemoSite, wait_until
from patience import HANG
from points import training

CACHE = "/var/cache/carme/data"
RESULTS = "/home/user1/showing-results"
NAME = "showing-points"
#: So many files, and so many random bytes beside, that the progress of copying can be seen.
FILES, EXTRA = 400, 3 << 30


def archive(folder: Path) -> Path:
    """Make an archive as a user has it on their computer."""
    chance = random.Random(1)
    path = folder / f"{NAME}.tar.gz"
    with tarfile.open(path, "w:gz") as packed:
        for number in range(FILES):
            values = [chance.random() for _ in range(10)]
            text = "".join(f"{x} {3 * x + 1}\n" for x in values).encode()
            member = tarfile.TarInfo(f"{NAME}/part{number}")
            member.size = len(text)
            packed.addfile(member, io.BytesIO(text))
    return path


@pytest.fixture(autouse=True)
def nothing_left(demo: DemoSite) -> Iterator[None]:
    def tidy() -> None:
        demo.end_all_jobs()
        catalogue = "/home/user1/.local/share/carme/datasets"
        demo.run("head", "sh", "-c", f"rm -rf {RESULTS} /home/user1/{NAME}* {catalogue}/{NAME}.json")
        for node in ("n1", "n2"):
            demo.run(node, "sh", "-c", f"rm -rf {CACHE}/users/* && /opt/carme/venv/bin/carme-janitor")

    tidy()
    yield
    tidy()


def fill_in(page: Page, title: str) -> None:
    """The start form of a session with the dataset, as the catalogue's link opens it."""
    page.goto(f"/?stage={NAME}#start-heading")
    open_start_form(page)
    expect(page.locator("#id_stage")).to_have_value(NAME)
    page.get_by_label("Title").fill(title)
    page.locator("input[name=image][value=base]").check()
    page.locator("#id_gpus_per_node").fill("0")
    page.locator("#id_hours").fill("0")
    page.locator("#id_minutes").fill("20")
    page.locator("#id_results").fill(RESULTS)


def add_by_upload(page: Page, demo: DemoSite, keep: Callable[[str], None], archive: Path) -> None:
    """Upload the archive and make a dataset of it; then a second version, which takes long to copy."""
    page.goto("/files/")
    page.locator("#upload-files").set_input_files(archive)
    row = page.locator("tr", has_text=f"{NAME}.tar.gz")
    expect(row).to_be_visible()  # the page shows the folder anew when all has arrived
    row.locator("summary").click()
    row.get_by_role("link", name="Make it a dataset").click()
    page.get_by_label("What it is").fill("Points near a line")
    page.get_by_label("Licence").fill("CC0")
    keep("staging-1-an-upload-becomes-a-dataset")
    page.get_by_role("button", name="Add", exact=True).click()
    expect(page).to_have_url(re.compile(r"/jobs/\d+/"))
    catalogue = f"/home/user1/.local/share/carme/datasets/{NAME}.json"
    entered = ("cat", catalogue)
    wait_until("it is entered", lambda: demo.run("head", *entered, check=False).stdout, timeout=HANG)
    page.goto("/datasets/")
    expect(page.locator("tr", has_text=NAME)).to_contain_text("CC0")
    keep("staging-2-the-catalogue")

    # A version never changes: a second one, with random bytes, makes copying take long.
    extra = f"head -c {EXTRA} /dev/urandom >/home/user1/{NAME}/bytes"
    demo.run("head", "sh", "-c", extra, user="user1", timeout=2 * HANG)
    demo.carme("datasets", "add", NAME, f"/home/user1/{NAME}", timeout=2 * HANG)


def stop_and_wait_for_results(page: Page, demo: DemoSite, session: str) -> None:
    """Stop the session whose page is open; its results must come out."""
    begun = time.monotonic()
    page.locator("#stop").click()
    page.get_by_role("button", name="Stop the session").click()
    expect(page.get_by_role("button", name="Stop the session")).to_have_count(0)
    page.goto(f"/sessions/{session}/")
    expect(page.locator(".status .state").first).to_have_text("Stopped")
    found = ("cat", f"{RESULTS}/line.json")
    wait_until("the results are out", lambda: demo.run("head", *found, check=False).stdout == "[3.0, 1.0]")
    print(f"results were out after {time.monotonic() - begun:.0f} s")


def test_an_uploaded_dataset_is_staged_and_cached_and_results_come_back(
    page: Page, demo: DemoSite, keep: Callable[[str], None], tmp_path: Path
) -> None:
    log_in(page, demo)
    add_by_upload(page, demo, keep, archive(tmp_path))

    fill_in(page, "Trains from the node's disk")
    page.get_by_role("button", name="Start", exact=True).click()
    expect(page.get_by_role("heading", name="Trains from the node's disk")).to_be_visible()
    expect(page.locator("#live")).to_contain_text(re.compile(r"[1-9]\d* %"))
    keep("staging-3-data-comes-before-the-session")
    expect(page.locator(".status .state").first).to_have_text("Ready")
    first = re.findall(r"/sessions/(s[a-z0-9]{8})/", page.url)[0]
    with demo.visitor("user1") as visitor, visitor.kernel(visitor.open(first)) as kernel:
        cell = kernel.run(training(NAME), timeout=HANG)
        assert cell.ok, cell.output
        points, path, slope, offset, _ = json.loads(cell.output)
    assert (points, slope, offset) == (FILES * 10, 3, 1) and path.startswith(f"{CACHE}/users/")
    keep("staging-4-it-runs")
    stop_and_wait_for_results(page, demo, first)

    def reported() -> bool:
        page.goto("/datasets/")  # it shows what was known of the nodes when it was made
        return bool(re.search(r"\bn[12]\b", page.locator("tr", has_text=NAME).inner_text()))

    wait_until("the catalogue shows where the copy is", reported)
    keep("staging-5-where-the-copies-are")

    fill_in(page, "Finds the copy")
    page.get_by_role("button", name="Start", exact=True).click()
    expect(page.locator(".status .state").first).to_have_text("Ready")
    second = re.findall(r"/sessions/(s[a-z0-9]{8})/", page.url)[0]
    (job,) = [job for job in demo.carme_json("jobs") if job["name"] == f"session-{second}"]
    log = demo.carme("logs", str(job["id"])).stdout
    assert f"{NAME}: it was there already" in log
    print(re.search(rf"{NAME}: it was there already[^\n]*", log))
    keep("staging-6-the-next-one-starts-at-once")


def test_a_booking_finds_its_data_when_it_begins(demo: DemoSite) -> None:
    folder = f"/scratch/{NAME}"
    demo.run("head", "sh", "-c", f"mkdir -p {folder} && seq 1000 >{folder}/numbers")
    begins = (int(demo.run("head", "date", "+%s").stdout) // 60 + 4) * 60
    day, clock = demo.run("head", "date", "--utc", f"--date=@{begins}", "+%Y-%m-%d %H:%M").stdout.split()
    with demo.visitor("user1") as owner:
        name = booked(send(owner, date=day, time=clock))
        try:
            page = owner.fetch(f"{owner.url}bookings/{name}/")
            owner.send(page, owner.form(page, "image"), {"image": "base", "stage": folder})

            def brought() -> Job | None:
                """The job that brings its data, when it is over."""
                for job in map(Job.model_validate, demo.carme_json("jobs", "--history")):
                    if job.name.startswith(f"stage-{name.removeprefix('carme-')}-") and job.is_over:
                        return job
                return None

            job = wait_until("its data is there", brought, timeout=2 * HANG)
            assert job.state is JobState.COMPLETED
            assert int(demo.run("head", "date", "+%s").stdout) < begins
            session = wait_until("its session is there", lambda: session_of(owner, name), timeout=2 * HANG)
            owner.wait(session, "ready", timeout=HANG)
            (running,) = [each for each in demo.carme_json("jobs") if each["name"] == f"session-{session}"]
            assert running["node_list"] == job.node_list
            assert f"{NAME}: it was there already" in demo.carme("logs", str(running["id"])).stdout
        finally:
            demo.end_all_jobs()
            confirm(owner, f"bookings/{name}/delete/")
            demo.run("head", "rm", "-rf", folder)
