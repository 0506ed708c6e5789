"""The real broker over a sandbox: jobs are processes of this computer."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import carme_runtime
from carme.bookings.models import ReservationSpec
from carme.broker import AsyncBrokerClient
from carme.broker.server import Server
from carme.broker.service import Broker
from carme.config import Settings, load
from carme.errors import CarmeError, ConfigError, InvalidRequest, SlurmError
from carme.jobs import Job, JobRequest, JobState
from carme.projects import Grant
from carme.sandbox import SandboxSlurm, accounts_in, processes
from carme.sandbox.gateway import first_job
from carme.sandbox.processes import JobProcess
from carme.sandbox.sample_jobs import write_sample_jobs
from carme.sandbox.site import Addresses, make_site
from carme.slurm.account import UnixAccount, pretend_accounts
from patience import HANG


async def eventually(condition: Callable[[], Awaitable[Any]]) -> Any:
    """What a condition returns, once that is something."""
    async with asyncio.timeout(HANG):
        while not (found := await condition()):  # noqa: ASYNC110 - what changes is outside
            await asyncio.sleep(0.02)
    return found


class Sandbox:
    """A broker over a sandbox, and its client."""

    def __init__(self, slurm: SandboxSlurm, settings: Settings, homes: Path) -> None:
        self.slurm, self.settings, self.homes = slurm, settings, homes
        self.client = AsyncBrokerClient(settings.broker.socket)

    async def submit(self, script: str, user: str = "ada", **values: Any) -> int:
        request = JobRequest(
            name="job", kind="batch", command=["sh", "-c", script], **{"minutes": 30, **values}
        )
        return await self.client.submit(request, user)

    async def until(self, number: int, *states: JobState) -> Job:
        """The job, once it is in one of these states; one that waits, once the broker knows why."""

        async def there() -> Job | None:
            job = await self.client.job(number)
            return job if job.state in states and (job.reason or not job.is_pending) else None

        return await eventually(there)

    async def log(self, number: int, task: int | None = None) -> str:
        return (await self.client.log(number, task=task)).text


OVER = (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.TIMEOUT)


@pytest_asyncio.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[Sandbox]:
    async with running(tmp_path) as found:
        yield found


@contextlib.asynccontextmanager
async def running(folder: Path, **values: Any) -> AsyncIterator[Sandbox]:
    places = make_site(folder, Addresses(1, 1, 1, 1, redis=False), ["ada", "ben"])
    settings = load(places.configuration)
    pretend_accounts(accounts_in(places.homes))
    slurm = SandboxSlurm(places.slurm, **{"nodes": 2, "gpus": 2, "kill_wait": 1.0, **values})
    try:
        async with slurm.opened():
            broker = Broker(settings, slurm)
            await broker.prepare()
            work = asyncio.create_task(broker.run())
            async with Server(settings, broker):
                sandbox = Sandbox(slurm, settings, places.homes)
                while True:
                    with contextlib.suppress(CarmeError):
                        await sandbox.client.cluster()
                        break
                    await asyncio.sleep(0.02)
                yield sandbox
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
    finally:
        pretend_accounts([])


async def test_a_job_runs_as_a_process_of_its_owners_home(sandbox: Sandbox) -> None:
    number = await sandbox.submit('echo "$USER $HOME $SLURM_JOB_ID $CARME_JOB_FOLDER"; pwd', gpus_per_node=1)
    job = await sandbox.until(number, *OVER)
    home = sandbox.homes / "ada"
    words, folder = (await sandbox.log(number)).splitlines()
    assert (job.state, job.exit_code, job.user) == (JobState.COMPLETED, 0, "ada")
    assert words == f"ada {home} {number} {home}/.local/share/carme/jobs/{job.key}"
    assert folder == str(home)


NET = """
from carme_runtime.petri import Net

net = Net("squares")
numbers, squares = net.place("numbers", int, tokens=range(3)), net.place("squares", int)
net.add("square", numbers >> squares, lambda number: number * number)
if __name__ == "__main__":
    with net.start(1) as run:
        run.wait()
"""


async def test_the_net_that_a_job_has_run_is_known(sandbox: Sandbox) -> None:
    (sandbox.homes / "ada/net.py").write_text(NET)
    runtime = Path(carme_runtime.__file__).parents[1]
    number = await sandbox.submit(f"PYTHONPATH='{runtime}' '{sys.executable}' net.py")
    job = await sandbox.until(number, *OVER)
    assert job.state is JobState.COMPLETED, await sandbox.log(number)
    net = await sandbox.client.net(number)
    assert (net.name, net.state, net.running, net.ended, net.tokens) == ("squares", "resting", 0, 3, 3)
    assert "square: 0 running, 3 ended" in net.svg


async def test_how_a_job_failed_is_known(sandbox: Sandbox) -> None:
    failed, killed = await sandbox.submit("exit 3"), await sandbox.submit("kill -9 $$")
    job = await sandbox.until(failed, *OVER)
    assert (job.state, job.exit_code) == (JobState.FAILED, 3)
    assert (await sandbox.until(killed, *OVER)).exit_code == 128 + 9
    # Each has its sentence, as with Slurm.
    assert "exit code 3" in job.explanation


async def test_gpus_are_counted_and_given_to_whom_they_belong(sandbox: Sandbox) -> None:
    wait = "echo $CUDA_VISIBLE_DEVICES; while [ ! -e ~/go ]; do sleep 0.05; done"
    part: dict[str, Any] = {"gpus_per_node": 1, "cpus_per_node": 2, "memory_mb_per_node": 1024}
    first = [await sandbox.submit(wait, **part) for _ in range(4)]
    jobs = [await sandbox.until(number, JobState.RUNNING) for number in first]
    waiting = await sandbox.submit("true", **part)
    assert (await sandbox.until(waiting, JobState.PENDING)).reason == "Resources"
    assert sorted(job.node_list for job in jobs) == ["n1", "n1", "n2", "n2"]
    cluster = await sandbox.slurm.cluster()
    assert [node.gpus_used for node in cluster.nodes] == [{"a100": 2}, {"a100": 2}]
    # What needs no GPU overtakes.
    await sandbox.until(await sandbox.submit("true"), JobState.COMPLETED)
    assert (await sandbox.client.job(waiting)).is_pending
    (sandbox.homes / "ada/go").touch()
    await sandbox.until(waiting, JobState.COMPLETED)
    gpus = [(job.node_list, (await sandbox.log(job.id)).strip()) for job in jobs]
    assert sorted(gpus) == [("n1", "0"), ("n1", "1"), ("n2", "0"), ("n2", "1")]


async def test_what_can_never_start_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await sandbox.submit("true", gpus_per_node=3)
    assert caught.value.field == "gpus_per_node"


def alive(number: int) -> bool:
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.kill(number, 0)
        return "State:\tZ" not in Path(f"/proc/{number}/status").read_text()
    return False


async def gone(*numbers: int) -> None:
    """Return when none of these processes is left: what was killed is dying for a moment."""

    async def none() -> bool:
        return not any(alive(number) for number in numbers)

    await eventually(none)


# What stays in a session of its own, and what ignores SIGTERM.
STUBBORN = "trap '' TERM; setsid sh -c 'echo $$; exec sleep 3600' & echo $$; while :; do sleep 0.05; done"


async def test_a_cancelled_job_leaves_no_process(sandbox: Sandbox) -> None:
    number = await sandbox.submit(STUBBORN)

    async def both() -> list[str]:
        pids = (await sandbox.log(number)).split()
        return pids if len(pids) == 2 else []

    pids = await eventually(both)
    await sandbox.client.cancel(number, user="ada")
    job = await sandbox.until(number, *OVER)
    assert (job.state, job.cancelled_by) == (JobState.CANCELLED, "owner")
    await gone(*map(int, pids))


async def test_what_a_job_leaves_running_ends_with_it(sandbox: Sandbox) -> None:
    number = await sandbox.submit("setsid sleep 3600 & echo $!")
    assert (await sandbox.until(number, *OVER)).state is JobState.COMPLETED
    await gone(int(await sandbox.log(number)))


async def test_a_job_ends_at_its_time_limit(tmp_path: Path) -> None:
    async with running(tmp_path, minute=0.5) as sandbox:
        number = await sandbox.submit("exec sleep 3600", minutes=1)
        job = await sandbox.until(number, *OVER)
    assert job.state is JobState.TIMEOUT
    assert "time limit" in job.explanation


async def test_an_extension_moves_the_end(sandbox: Sandbox) -> None:
    number = await sandbox.submit("exec sleep 3600", minutes=30)
    before = await sandbox.until(number, JobState.RUNNING)
    await sandbox.slurm.set_limit(str(number), 60)
    (job,) = await sandbox.slurm.queue()
    assert job.ends is not None and before.ends is not None
    assert job.ends - before.ends == timedelta(minutes=30)


async def test_an_array_runs_so_many_tasks_at_a_time(sandbox: Sandbox) -> None:
    script = "echo $SLURM_ARRAY_TASK_ID; while [ ! -e ~/go ]; do sleep 0.05; done"
    number = await sandbox.submit(script, array="0-3%2")

    async def two_run() -> bool:
        return sum(job.is_running for job in await sandbox.client.jobs()) == 2

    await eventually(two_run)
    jobs = {job.task: job for job in await sandbox.client.jobs()}
    assert (jobs[None].tasks, jobs[None].id) == ("2-3%2", number)
    assert (jobs[None].reason, jobs[0].array_id, jobs[1].slurm_name) == (
        "JobArrayTaskLimit",
        number,
        f"{number}_1",
    )
    (sandbox.homes / "ada/go").touch()

    async def all_over() -> bool:
        return not any(job.is_active for job in await sandbox.slurm.queue())

    await eventually(all_over)
    jobs = {job.task: job for job in await sandbox.slurm.queue()}
    assert {task: str(job.state) for task, job in jobs.items()} == dict.fromkeys(range(4), "COMPLETED")
    assert jobs[3].id == number  # the last to start has the array's number
    folder = sandbox.homes / "ada/.local/share/carme/jobs" / str(jobs[0].key)
    assert [(folder / f"output-{task}.log").read_text() for task in range(4)] == ["0\n", "1\n", "2\n", "3\n"]


async def test_tasks_of_an_array_are_cancelled_one_by_one_or_all(sandbox: Sandbox) -> None:
    for name in ("n1", "n2"):
        await sandbox.slurm.drain_node(name, "nothing is to start")
    number = await sandbox.submit("true", array="0-3")
    await sandbox.slurm.cancel(f"{number}_2", accounts_in(sandbox.homes)[0])
    (job,) = await sandbox.slurm.queue()
    assert (job.tasks, job.state) == ("0-1,3", JobState.PENDING)
    await sandbox.slurm.cancel(str(number), accounts_in(sandbox.homes)[0])
    (job,) = await sandbox.slurm.queue()
    assert job.state is JobState.CANCELLED


async def test_a_drained_node_gets_no_jobs(sandbox: Sandbox) -> None:
    await sandbox.client.node("n1", drain=True, reason="a fan", user="ben")
    number = await sandbox.submit("true", nodes=2)
    job = await sandbox.until(number, JobState.PENDING)
    assert job.reason == "Resources"
    await sandbox.client.node("n1", drain=False, user="ben")
    await sandbox.until(number, JobState.COMPLETED)


async def test_a_booking_is_for_its_users(sandbox: Sandbox) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    spec = ReservationSpec(
        name="carme-0123456789ab",
        partition="gpu",
        node_names=["n1", "n2"],
        start=now,
        end=now + timedelta(hours=1),
        users=["ada"],
    )
    await sandbox.client.reserve(spec, user="ada")
    booked = await sandbox.submit("true", reservation=spec.name)
    await sandbox.until(booked, JobState.COMPLETED)
    with pytest.raises(SlurmError, match="You may not use this booking"):
        await sandbox.submit("true", "ben", reservation=spec.name)
    unbooked = await sandbox.submit("true", "ben")
    job = await sandbox.until(unbooked, JobState.PENDING)
    assert (job.reason, job.planned_start) == ("Resources", spec.end)
    await sandbox.client.release(spec.name, user="ada")
    await sandbox.until(unbooked, JobState.COMPLETED)


async def test_a_project_has_no_more_gpus_than_it_is_granted(sandbox: Sandbox) -> None:
    await sandbox.client.grant(Grant(account="carme-vision", members=["ada"], gpus=1), user="ben")
    wait = "while [ ! -e ~/go ]; do sleep 0.05; done"
    first, second = [
        await sandbox.submit(wait, account="carme-vision", gpus_per_node=1, cpus_per_node=1) for _ in range(2)
    ]
    await sandbox.until(first, JobState.RUNNING)
    assert (await sandbox.until(second, JobState.PENDING)).reason == "AssocGrpGRES"
    with pytest.raises(CarmeError):
        await sandbox.submit("true", "ben", account="carme-vision")
    (sandbox.homes / "ada/go").touch()
    await sandbox.until(second, JobState.COMPLETED)


async def test_the_accounting_outlives_the_sandbox(tmp_path: Path) -> None:
    async with running(tmp_path) as sandbox:
        done, cut = await sandbox.submit("true"), await sandbox.submit("exec sleep 3600")
        await sandbox.until(done, JobState.COMPLETED)
        await sandbox.until(cut, JobState.RUNNING)
    async with running(tmp_path) as sandbox:
        since = datetime.now(UTC) - timedelta(days=1)
        found = {job.id: job for job in await sandbox.client.history("ada", since)}
        assert (found[done].state, found[cut].state) == (JobState.COMPLETED, JobState.CANCELLED)
        assert await sandbox.submit("true") > cut


async def test_jobs_of_two_years_are_in_the_history_with_their_logs(tmp_path: Path) -> None:
    places = make_site(tmp_path, Addresses(1, 1, 1, 1, redis=False), ["ada", "ben"])
    assert write_sample_jobs(places.slurm, accounts_in(places.homes)) == 240
    assert write_sample_jobs(places.slurm, accounts_in(places.homes)) == 0
    async with running(tmp_path) as sandbox:
        now = datetime.now(UTC)
        found = await sandbox.client.history(None, now - timedelta(days=760), limit=1000)
        months = {(now - job.ended) // timedelta(days=30) for job in found if job.ended}
        assert months >= set(range(24)), "each month of two years has jobs"
        assert len(found) == 240 and {job.user for job in found} == {"ada", "ben"}
        assert "begins" in await sandbox.log(found[0].id)


def test_nobody_else_gets_into_a_sandbox(tmp_path: Path) -> None:
    """Its broker serves anyone who reaches it, in the name of each of its users."""
    folder = tmp_path / "kept"
    folder.mkdir(mode=0o755)
    for _ in range(2):
        make_site(folder, Addresses(1, 1, 1, 1, redis=False), ["ada"])
        assert folder.stat().st_mode & 0o777 == 0o700
        folder.chmod(0o755)


def test_a_folder_with_other_things_is_no_sandbox_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="holds other things"):
        make_site(tmp_path, Addresses(1, 1, 1, 1, redis=False), ["ada"])
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


async def test_a_job_of_a_real_account_runs_as_that_account_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never as the user who runs the sandbox, who may be root."""
    monkeypatch.setattr(processes, "ITSELF", ("sh", "-c", "id -u"))
    log = tmp_path / "log"
    owner = UnixAccount("nobody", 65534, 65534, "/")
    process = JobProcess(tmp_path, log, {"SLURM_JOB_ID": f"{os.getpid()}-real"}, owner)
    if os.geteuid() == 0:
        assert await process.run() == (0, 0)
        assert log.read_text() == "65534\n"
    else:
        with pytest.raises(PermissionError):
            await process.run()


def test_sandboxes_of_one_computer_number_their_jobs_differently(tmp_path: Path) -> None:
    """Jobs have folders in /tmp by their numbers."""
    firsts = {first_job(tmp_path / str(number)) for number in range(50)}
    assert len(firsts) > 40
    assert first_job(tmp_path) == first_job(tmp_path)


def test_the_program_says_what_is_wrong(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "carme.sandbox", str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 1
    assert "There is no sandbox in" in done.stderr
