"""What the broker reports to those who watch the whole site, and that they can do nothing else."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from carme.broker.peers import Peer
from carme.errors import CarmeError, Denied
from carme.jobs import JobState
from carme.slurm import UnixAccount

JOB: dict[str, Any] = {
    "A": 7, "j": "secret name", "u": "ada", "a": "research", "P": "gpu", "T": "RUNNING", "D": 2, "C": 8,
    "m": "1000M", "l": "1:00:00", "b": "gres/gpu:a100:2", "V": "1795181500", "S": "1795181538",
    "k": "carme/1 kind=batch image= key=" + "ab" * 16,
}  # fmt: skip
LICENCES = "LicenseName=matlab Total=10 Used=3 Free=7 Reserved=1 Remote=no\n"
RESERVATION = (
    "ReservationName=course StartTime=2026-11-20T10:00:00 EndTime=2026-11-20T12:00:00 Nodes=n[1-2] "
    "Users=ada TRES=cpu=8,gres/gpu=4\n"
)


async def until(holds: Callable[[], Awaitable[Any]]) -> Any:
    """Wait until the next polls fulfil a condition; the test's own time limit ends it otherwise."""
    while not (result := await holds()):  # noqa: ASYNC110 - what changes is outside
        await asyncio.sleep(0.02)
    return result


def observe(site: Any) -> None:
    site.peer = Peer(1, UnixAccount.named("hub"), trusted=False, observer=True)


async def test_an_observer_sees_all_users_figures_and_no_names_or_keys(site: Any) -> None:
    site.slurm.jobs = [JOB, JOB | {"A": 8, "u": "bob", "T": "PENDING", "r": "Priority", "S": "0"}]
    observe(site)

    async def both() -> Any:
        view = await site.client.overview()
        return view if len(view.jobs) == 2 else None

    view = await until(both)
    first, second = view.jobs
    assert (first.user, first.account, first.gpus, first.gpu_type, first.cpus) == (
        "ada",
        "research",
        4,
        "a100",
        8,
    )
    assert (second.user, second.state, second.reason) == ("bob", JobState.PENDING, "Priority")
    assert view.failure == "" and view.answered is not None
    assert view.cluster is not None and view.cluster.nodes
    reported = view.model_dump_json()
    assert "secret name" not in reported and "abab" not in reported


async def test_reservations_and_licences_are_read_only_for_observers(site: Any) -> None:
    (site.slurm.state / "licenses").write_text(LICENCES)
    (site.slurm.state / "reservations").write_text(RESERVATION)

    def requested() -> int:
        return json.dumps(site.slurm.calls("scontrol")).count("licenses")

    polls = len(site.slurm.calls("scontrol"))

    async def polled() -> bool:
        return len(site.slurm.calls("scontrol")) >= polls + 5

    await until(polled)
    assert requested() == 0
    observe(site)

    async def known() -> Any:
        view = await site.client.overview()
        return view if view.licences is not None else None

    view = await until(known)
    (licence,) = view.licences
    assert (licence.name, licence.total, licence.used, licence.reserved) == ("matlab", 10, 3, 1)
    assert [reservation.name for reservation in view.reservations] == ["course"]
    for _ in range(10):
        await site.client.overview()
    assert requested() == 1


async def test_while_slurm_is_away_the_last_snapshot_stays_and_says_so(site: Any) -> None:
    site.slurm.jobs = [JOB]
    observe(site)

    async def seen() -> Any:
        return (await site.client.overview()).jobs

    await until(seen)
    for program in ("squeue", "scontrol"):
        site.slurm.fail(
            program, "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
        )

    async def away() -> Any:
        view = await site.client.overview()
        return view if view.failure else None

    assert [job.id for job in (await until(away)).jobs] == [7]


async def test_jobs_are_read_by_a_poll_that_has_not_failed(site: Any) -> None:
    """As tests wait for what squeue writes: on a busy machine a poll may fail by itself."""
    watch = site.broker._watch
    site.slurm.fail("scontrol", "slurm_load_jobs error: Unable to contact slurm controller")
    async with watch._polled:
        await watch._polled.wait_for(lambda: watch._failure is not None)
    seen = asyncio.create_task(site.queue([JOB]))
    await asyncio.sleep(0)  # it has begun to wait
    failed = watch._polls + 2
    async with watch._polled:
        await watch._polled.wait_for(lambda: watch._finished >= failed)
    assert not seen.done()
    site.slurm.heal("scontrol")
    await seen
    assert [job.id for job in watch.jobs()] == [7]


@pytest.mark.parametrize("name", ["ada", "bob"])
async def test_users_may_not_observe(site: Any, name: str) -> None:
    site.act(name)
    with pytest.raises(Denied, match="may not see figures of all users"):
        await site.client.overview()
    assert site.audit()[-1]["result"] == "denied"


async def test_services_get_who_has_which_nodes_and_nothing_of_jobs_that_wait(site: Any) -> None:
    waits = {"A": 9, "T": "PENDING", "N": ""}
    await site.queue([JOB | waits, JOB | {"A": 8, "T": "RUNNING", "N": "n1", "S": 1_700_000_000}])
    site.act("hub", trusted=True)
    (found,) = await site.client.running()
    assert (found.id, found.node_list, found.started) == (8, "n1", datetime.fromtimestamp(1_700_000_000, UTC))
    site.act("ada")
    with pytest.raises(Denied, match="may not see who has which nodes"):
        await site.client.running()


async def test_an_observer_may_do_nothing_else(site: Any, request_: Any) -> None:
    site.slurm.jobs = [JOB]
    observe(site)
    for question in (
        site.client.submit(request_, "ada"),
        site.client.submit(request_),
        site.client.cancel(7, "ada"),
        site.client.cancel(7),
        site.client.jobs(),
        site.client.jobs("ada"),
        site.client.job(7),
        site.client.history("ada"),
        site.client.log(7, "ada"),
        site.client.sessions(),
    ):
        with pytest.raises(CarmeError):
            await question
    assert site.slurm.calls("sbatch") == site.slurm.calls("scancel") == []
    assert (await site.client.events()).jobs == []


async def test_anybody_may_ask_what_will_be_free_and_slurm_is_queried_once_a_minute(site: Any) -> None:
    (site.slurm.state / "reservations").write_text(RESERVATION)

    def requested() -> int:
        return json.dumps(site.slurm.calls("scontrol")).count("reservation")

    plans = [await site.client.forecast() for _ in range(5)]
    assert all(kind.free and len(kind.free) == 144 for plan in plans for kind in plan.kinds)
    assert plans[0].kinds
    assert requested() == 1
    # The plan follows what runs as soon as that is seen.
    running = JOB | {
        "T": "RUNNING",
        "N": "n1",
        "tres-alloc": "cpu=1,mem=1M,node=1,gres/gpu=3,gres/gpu:a100=3",
    }
    before = plans[0].kinds[0].free[0]
    await site.queue([running])
    assert (await site.client.forecast()).kinds[0].free[0] == before - 3
    assert requested() == 1
