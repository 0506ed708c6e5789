"""What the rest of the code relies on, of each adapter of the gateway: Slurm's commands, and the sandbox."""

import inspect
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from carme.bookings.models import ReservationSpec, Window
from carme.errors import SlurmError
from carme.jobs import JobRequest, Share
from carme.launch.spec import JobSpec
from carme.sandbox import SandboxSlurm, accounts_in
from carme.slurm import Order, Slurm, SlurmCommands, UnixAccount
from carme.slurm.account import pretend_accounts
from carme.slurm.rest import SlurmRest

from .conftest import PYTHON, FakeSlurm

METHODS = [name for name, value in vars(Slurm).items() if inspect.iscoroutinefunction(value)]
KEY = "0123456789abcdef" * 2


@pytest.mark.parametrize("adapter", [SlurmCommands, SlurmRest, SandboxSlurm])
@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_has_each_method_of_the_interface(adapter: type, method: str) -> None:
    found, wanted = getattr(adapter, method), getattr(Slurm, method)
    assert inspect.iscoroutinefunction(found)
    assert inspect.signature(found) == inspect.signature(wanted)


@pytest_asyncio.fixture(params=["commands", "sandbox"])
async def adapter(
    request: pytest.FixtureRequest, slurm: FakeSlurm, tmp_path: Path, accounts: None
) -> AsyncIterator[SimpleNamespace]:
    """A cluster that keeps jobs waiting, and who submits them."""
    if request.param == "commands":
        owner = UnixAccount.named("ada")
        yield SimpleNamespace(slurm=SlurmCommands(PYTHON, "test"), owner=owner, fake=slurm)
        return
    (tmp_path / "homes/ada").mkdir(parents=True)
    pretend_accounts(accounts_in(tmp_path / "homes"))
    try:
        sandbox = SandboxSlurm(tmp_path / "slurm", python=sys.executable, kill_wait=0.2)
        for name in ("n1", "n2"):
            await sandbox.drain_node(name, "nothing is to start")
        async with sandbox.opened():
            yield SimpleNamespace(slurm=sandbox, owner=UnixAccount.named("ada"))
    finally:
        pretend_accounts([])


def order(**values: Any) -> Order:
    request = JobRequest(
        name="train 1", kind="batch", command=["true"], minutes=30, gpus_per_node=2, **values
    )
    spec = JobSpec(command=["true"], name="train 1", gpus=2)
    return Order(KEY, request, "gpu", None, Share(2, 4096), spec)


async def test_a_job_that_was_submitted_waits_in_the_queue(adapter: SimpleNamespace) -> None:
    before = await adapter.slurm.pulse()
    number = await adapter.slurm.submit(order(), adapter.owner)
    (job,) = await adapter.slurm.queue()
    assert await adapter.slurm.pulse() != before
    shown = {name: getattr(job, name) for name in ("id", "key", "kind", "name", "user", "partition")}
    assert shown == {
        "id": number,
        "key": KEY,
        "kind": "batch",
        "name": "train 1",
        "user": "ada",
        "partition": "gpu",
    }
    assert (job.nodes, job.gpus, job.cpus, job.minutes_limit) == (1, 2, 2, 30)
    assert job.is_pending and job.submitted and job.explanation


async def test_the_folder_of_a_job_has_its_files(adapter: SimpleNamespace) -> None:
    await adapter.slurm.submit(order(environment={"TOKEN": "t"}, files={"a": "b"}), adapter.owner)
    folder = Path(adapter.owner.home) / ".local/share/carme/jobs" / KEY
    found = {path.name for path in folder.iterdir()}
    assert found == {"environment.json", "fabric.key", "fabric.pem", "files", "request.json", "spec.json"}
    assert (folder / "files/a").read_text() == "b"
    assert folder.stat().st_mode & 0o077 == 0


async def test_a_home_that_is_away_is_an_error(adapter: SimpleNamespace) -> None:
    owner = type(adapter.owner)("ada", adapter.owner.uid, adapter.owner.gid, "/nonexistent")
    with pytest.raises(SlurmError) as caught:
        await adapter.slurm.submit(order(), owner)
    assert caught.value.code == "home"
    assert await adapter.slurm.queue() == []


async def test_a_job_is_cancelled(adapter: SimpleNamespace) -> None:
    number = await adapter.slurm.submit(order(), adapter.owner)
    await adapter.slurm.cancel(str(number), adapter.owner)
    (job,) = await adapter.slurm.queue()
    assert (str(job.state), job.is_over) == ("CANCELLED", True)


async def test_a_limit_is_changed(adapter: SimpleNamespace) -> None:
    number = await adapter.slurm.submit(order(), adapter.owner)
    await adapter.slurm.set_limit(str(number), 45)
    (job,) = await adapter.slurm.queue()
    assert job.minutes_limit == 45


NAME = "carme-0123456789ab"


def reservation_spec(**values: Any) -> ReservationSpec:
    start = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    span = {"start": start, "end": start + timedelta(hours=1)}
    return ReservationSpec.model_validate(
        {"name": NAME, "partition": "gpu", "node_names": ["n1"], "users": ["ada"], **span, **values}
    )


async def test_reservations_are_made_changed_and_deleted(adapter: SimpleNamespace) -> None:
    wanted = reservation_spec()
    await adapter.slurm.make_reservation(wanted)
    (found,) = await adapter.slurm.reservations()
    assert (found.name, found.start, found.end) == (NAME, wanted.start, wanted.end)
    assert (found.node_names, found.users, found.maintenance) == (["n1"], ["ada"], False)
    later = wanted.end + timedelta(hours=1)
    await adapter.slurm.change_reservation(NAME, end=later, users=["ada", "bob"])
    (found,) = await adapter.slurm.reservations()
    assert (found.start, found.end, found.users) == (wanted.start, later, ["ada", "bob"])
    await adapter.slurm.delete_reservation(NAME)
    assert await adapter.slurm.reservations() == []


async def test_a_reservation_that_has_begun_keeps_its_start(adapter: SimpleNamespace) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    await adapter.slurm.make_reservation(reservation_spec(start=now - timedelta(minutes=1)))
    with pytest.raises(SlurmError) as caught:
        await adapter.slurm.change_reservation(NAME, start=now + timedelta(minutes=5))
    assert caught.value.field == "start"


async def test_a_reservation_with_jobs_is_not_deleted(adapter: SimpleNamespace) -> None:
    await adapter.slurm.make_reservation(reservation_spec())
    number = await adapter.slurm.submit(order(reservation=NAME), adapter.owner)
    set_reservation(adapter, number)
    with pytest.raises(SlurmError) as caught:
        await adapter.slurm.delete_reservation(NAME)
    assert caught.value.code == "reservation-in-use"
    await adapter.slurm.leave_reservation(number)
    await adapter.slurm.delete_reservation(NAME)
    (job,) = await adapter.slurm.queue()
    assert job.reservation == ""


def set_reservation(adapter: SimpleNamespace, number: int) -> None:
    """The stand-in for Slurm's programs does not read this option of sbatch."""
    if isinstance(adapter.slurm, SlurmCommands):
        jobs = adapter.fake.jobs
        adapter.fake.jobs = [job | {"v": NAME} if job["A"] == number else job for job in jobs]


async def test_an_unknown_reservation_is_an_error(adapter: SimpleNamespace) -> None:
    with pytest.raises(SlurmError) as caught:
        await adapter.slurm.delete_reservation(NAME)
    assert caught.value.field == "reservation"


async def test_accounts_of_projects_are_made_limited_and_read(adapter: SimpleNamespace) -> None:
    slurm, account = adapter.slurm, "carme-vision"
    assert not await slurm.account_exists(account)
    await slurm.make_account(account)
    await slurm.limit_account(account, {"GrpTRES": "gres/gpu=4,node=2", "GrpJobs": "3", "MaxWall": "60"})
    await slurm.add_member(account, "ada")
    found = (await slurm.project_accounts())[account]
    assert (found.members, found.resources) == ({"ada": [""]}, {"gres/gpu": 4, "node": 2})
    assert (found.jobs, found.minutes, found.stopped) == (3, 60, [])
    await slurm.stop_member(account, "ada", stopped=True)
    await slurm.limit_account(account, {"GrpTRES": "node=-1", "GrpJobs": "-1"})
    found = (await slurm.project_accounts())[account]
    assert (found.stopped, found.resources, found.jobs) == (["ada"], {"gres/gpu": 4}, None)
    await slurm.remove_member(account, "ada")
    assert (await slurm.project_accounts())[account].members == {}
    assert await slurm.account_exists(account)


async def test_a_maintenance_window_is_a_reservation(adapter: SimpleNamespace) -> None:
    start = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    name = "carme-maintenance-0123456789ab"
    window = Window(name=name, node_names=["n1"], start=start, end=start + timedelta(hours=1))
    await adapter.slurm.make_maintenance(window)
    (found,) = await adapter.slurm.reservations()
    assert (found.name, found.node_names, found.users) == (name, ["n1"], found.users)


async def test_a_start_estimate_queues_no_job(adapter: SimpleNamespace) -> None:
    if isinstance(adapter.slurm, SandboxSlurm):
        for name in ("n1", "n2"):
            await adapter.slurm.resume_node(name)
    estimate = await adapter.slurm.estimate(order(), adapter.owner)
    assert (estimate.nodes, bool(estimate.start)) == ("n1", True)
    assert await adapter.slurm.queue() == []
