"""The Python client, from a computer that is not the cluster's, on the demo's portal."""

import hashlib
import itertools
import os
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bs4 import BeautifulSoup

import carme
from carme.client import JobFailed
from carme.errors import CarmeError, NotFound
from carme_runtime.petri import Net, SlurmJobs
from demo_site import DemoSite, wait_until
from patience import HANG


@pytest.fixture(scope="module")
def connect(demo: DemoSite) -> Iterator[Callable[[], carme.Client]]:
    """Makes clients with a token that user1 makes in the portal."""
    label = f"test-{os.urandom(4).hex()}"
    with demo.visitor("user1") as visitor:
        page = visitor.fetch(f"{visitor.url}tokens/")
        wanted: dict[str, Any] = {"label": label, "days": "1", "scopes": ["jobs", "files", "files-read"]}
        created = BeautifulSoup(visitor.send(page, visitor.form(page, "label"), wanted).text, "html.parser")
        secret = created.select_one("p.secret")
        revoke = created.select_one(f'tr:-soup-contains("{label}") form')
        assert secret is not None and revoke is not None
        try:
            trust = ssl.create_default_context(cafile=str(demo.certificate))
            yield lambda: carme.Client(visitor.url, secret.text, verify=trust)
        finally:
            visitor.send(page, revoke, {})


@pytest.fixture(scope="module")
def client(connect: Callable[[], carme.Client]) -> Iterator[carme.Client]:
    """A client of user1."""
    with connect() as found:
        yield found


def square(number: int, load: str) -> int:
    """What the tasks compute; `load` is more than fits into a request."""
    if len(load) != 300_000:  # no assert: pytest rewrites it, and the task would have to import pytest's part
        raise ValueError(f"{len(load)} characters came")
    print(f"task {os.environ['SLURM_ARRAY_TASK_ID']}")
    if number == 3:
        raise LookupError("no three here")
    return number * number


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="functions travel to Python 3.11, the images' own"
)
def test_an_array_computes_in_its_tasks(demo: DemoSite, client: carme.Client) -> None:
    image = client.images()[0].name
    tasks = client.map(
        square, [1, 2, 3, 4], ["x" * 300_000] * 4, at_once=2, image=image, minutes=3, memory_mb=500
    )
    tasks.wait(HANG)
    assert [tasks[number].result() for number in (0, 1, 3)] == [1, 4, 16]
    assert "".join(tasks[1].logs()).splitlines()[-1] == "task 1"
    with pytest.raises(JobFailed, match="no three here") as caught:
        tasks[2].result()
    assert isinstance(caught.value.__cause__, LookupError)
    requested = ("sacct", "-Xn", f"-j{tasks.id}_3", "-oJobID%30,State")
    # The accounting gets the end of a job after the queue has shown it.
    wait_until(
        "the accounting knows it",
        lambda: demo.run("head", *requested).stdout.split() == [f"{tasks.id}_3", "COMPLETED"],
    )


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="functions travel to Python 3.11, the images' own"
)
def test_tasks_of_a_net_are_jobs(
    demo: DemoSite, client: carme.Client, connect: Callable[[], carme.Client], tmp_path: Path
) -> None:
    """The functions of a local net run as jobs; a job that is cancelled fails its transition."""
    home = client.files.places()[0].path
    folder = client.files.make_folder(f"{home}/test-{os.urandom(4).hex()}")
    net = Net("jobs")
    numbers, squares = net.place("numbers", int), net.place("squares", tuple)

    @net.transition(numbers >> squares, retries=1)
    def square(number: int) -> tuple[int, str]:
        while not Path(folder, "go").exists():
            time.sleep(0.2)
        return number * number, os.environ["SLURM_JOB_ID"]

    def noted() -> str:
        names = [file.name for file in (tmp_path / "run/jobs").iterdir()]
        return next((name for name in names if name.isdigit()), "")

    options: dict[str, Any] = {"image": client.images()[0].name, "minutes": 3, "memory_mb": 500, "cpus": 1}
    try:
        with net.start(SlurmJobs(connect, jobs=2, **options), folder=tmp_path / "run") as run:
            run.put(numbers, 2, 3, 4)
            first = wait_until("a job is submitted", noted)
            demo.run("head", "scancel", first)
            (tmp_path / "go").touch()
            client.files.upload(tmp_path / "go", f"{folder}/")
            marking = run.wait(HANG)
    finally:
        client.files.delete(folder)
    assert sorted(value for value, _ in marking["squares"]) == [4, 9, 16]
    jobs = {job for _, job in marking["squares"]}
    assert len(jobs) == 3 and first not in jobs
    assert not list((tmp_path / "run/jobs").iterdir())


def test_an_array_over_two_nodes_finds_its_data_on_both(
    demo: DemoSite, client: carme.Client, tmp_path: Path
) -> None:
    """The input is sent by the API, copied to the nodes' own disks for each task, and results come back."""
    home = client.files.places()[0].path
    folder = client.files.make_folder(f"{home}/test-{os.urandom(4).hex()}")
    try:
        (tmp_path / "number").write_bytes(os.urandom(9 << 20))  # two parts
        client.files.upload(tmp_path / "number", f"{folder}/")
        result = client.files.make_folder(f"{folder}/results")
        name = folder.rpartition("/")[2]
        each = f'sha256sum < "$CARME_DATA/{name}/number" > "$CARME_RESULTS/sum"'
        command = ["carme-run", "--nodes", "2", "--", "sh", "-c", each]
        requested = {"image": client.images()[0].name, "nodes": 2, "minutes": 3, "memory_mb": 500}
        tasks = client.array(command, "0-1", **requested, stage=[folder], results=result)
        tasks.wait(HANG)
        logs = ["".join(job.logs()) for job in tasks]
        assert [job.state for job in tasks] == ["COMPLETED"] * 2, logs
        # A job before them brought it, and not they in their own time.
        assert [log.count("it was there already") for log in logs] == [2, 2], logs
        expected = hashlib.sha256((tmp_path / "number").read_bytes()).hexdigest()
        for task, node in itertools.product((0, 1), ("n1", "n2")):
            of_node = f"{result}/{task}/{node}"
            # Results are copied after the job's end, so that they hold up no other job.
            wait_until("a result is out", lambda there=of_node: copied_to(client, there))
            got = client.files.download(f"{of_node}/sum", tmp_path / f"{task}-{node}")
            assert got.read_text().split()[0] == expected
    finally:
        client.files.delete(folder)


def test_a_batch_job_gets_more_time(demo: DemoSite, client: carme.Client) -> None:
    job = client.submit(["sleep", "300"], image=client.images()[0].name, minutes=5, memory_mb=300)
    try:
        wait_until("it runs", lambda: job.state == "RUNNING")
        assert job.extend(10).minutes_limit == 15
        assert demo.carme("extend", str(job.id), "5m").stdout.startswith("The job now ends at ")
        limit = demo.run("head", "squeue", "--noheader", f"--jobs={job.id}", "--format=%l").stdout.strip()
        assert limit == "20:00"
        with pytest.raises(CarmeError, match="lasts at most"):
            job.extend(100_000)
        refused = demo.carme("extend", str(job.id), "5m", user="user2", check=False)
        assert refused.returncode == 1 and "There is no job" in refused.stderr
    finally:
        job.cancel()


def copied_to(client: carme.Client, folder: str) -> bool:
    """Whether a result has come."""
    try:
        return any(entry.name == "sum" for entry in client.files.list(folder).entries)
    except NotFound:
        return False
