"""Arrays: their tasks as people write them, what goes to Slurm, and what can be done with one task alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from carme.errors import InvalidRequest, NotFound, SlurmError
from carme.jobs import JobRequest, arrays
from carme.launch.exits import Exit

from .test_broker import until
from .test_launch import Node


@pytest.fixture
def array(request_: JobRequest) -> JobRequest:
    return request_.model_copy(update={"array": "0-9%2", "results": "/home/ada/out"})


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0-3", [0, 1, 2, 3]),
        ("1,5,3", [1, 3, 5]),
        ("0-9:4%2", [0, 4, 8]),
        ("7", [7]),
        ("1-3, 2-4", [1, 2, 3, 4]),
    ],
)
def test_a_task_list_selects_its_numbers(request_: JobRequest, text: str, numbers: list[int]) -> None:
    reported = JobRequest.read(request_.model_dump() | {"array": text}).array
    assert reported is not None
    assert list(arrays.numbers(reported)) == numbers and arrays.count(reported) == len(numbers)
    assert all(arrays.includes(reported, number) for number in numbers) and not arrays.includes(reported, 99)


@pytest.mark.parametrize(
    "text",
    ["", "a", "3-1", "1-", "1,,2", "0-9%0", "0-9%", "0-9:0", "-1", "1;2", "0-99999999", "%2", "0-9%%2", "٣"],
)
def test_an_invalid_task_list_is_refused(request_: JobRequest, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        JobRequest.read(request_.model_dump() | {"array": text})
    assert caught.value.field == "array"


def test_a_session_is_no_array(request_: JobRequest) -> None:
    with pytest.raises(InvalidRequest, match="must not be an array"):
        JobRequest.read(request_.model_dump() | {"array": "0-3", "kind": "session", "image": "torch"})


def test_items_become_tasks() -> None:
    assert [arrays.expression(1), arrays.expression(3), arrays.expression(3, 2)] == ["0", "0-2", "0-2%2"]
    assert arrays.read_name("12") == (12, None) and arrays.read_name("12_3") == (12, 3)
    with pytest.raises(ValueError, match="123_4"):
        arrays.read_name("12_x")


async def test_one_submission_makes_all_tasks(site: Any, array: JobRequest) -> None:
    number = await site.client.submit(array)
    (call,) = site.slurm.calls("sbatch")
    options = {k: v for k, _, v in (word.removeprefix("--").partition("=") for word in call["arguments"])}
    assert options["array"] == "0-9%2" and options["output"].endswith("/output-%a.log")
    job = await site.client.job(number, task=7)
    assert (job.id, job.array_id, job.task, job.tasks) == (number, number, None, "0-9%2")
    with pytest.raises(NotFound, match=f"no job {number}_10"):
        await site.client.job(number, task=10)
    assert json.loads(site.settings.broker.audit_log.read_text().splitlines()[0])["array"] == "0-9%2"


async def test_one_task_or_all_are_cancelled(site: Any, array: JobRequest) -> None:
    number = await site.client.submit(array)
    waiting, *_ = site.slurm.jobs
    site.slurm.jobs = [
        waiting | {"K": "2-9%2"},
        waiting | {"A": 200, "K": "0", "T": "RUNNING"},
        waiting | {"A": 201, "K": "1", "T": "RUNNING"},
    ]

    async def seen() -> bool:
        return len(await site.client.jobs()) == 3

    await until(seen)
    await site.client.cancel(number, task=0)
    await site.client.cancel(201)  # by Slurm's own number of the task
    await site.client.cancel(number, task=5)  # which waits with others
    await site.client.cancel(number)
    names = [call["arguments"][-1] for call in site.slurm.calls("scancel")]
    assert names == [f"{number}_0", f"{number}_1", f"{number}_5", str(number)]
    site.act("bob")
    with pytest.raises(NotFound):
        await site.client.cancel(number, task=1)


async def test_the_array_is_cancelled_although_the_task_with_its_number_is_over(
    site: Any, array: JobRequest
) -> None:
    number = await site.client.submit(array)
    (last,) = site.slurm.jobs
    site.slurm.jobs = [last | {"K": "9", "T": "COMPLETED"}, last | {"A": 200, "K": "0", "T": "RUNNING"}]

    async def seen() -> bool:
        return (await site.client.job(number)).is_over

    await until(seen)
    await site.client.cancel(number, task=9)  # over: nothing to do
    assert not site.slurm.calls("scancel")
    await site.client.cancel(number)
    assert [call["arguments"][-1] for call in site.slurm.calls("scancel")] == [str(number)]


async def test_each_task_has_its_own_log_and_result(site: Any, array: JobRequest) -> None:
    number = await site.client.submit(array)
    (waiting,) = site.slurm.jobs
    site.slurm.jobs = [waiting | {"K": "4-9%2"}, waiting | {"A": 203, "K": "3", "T": "RUNNING"}]
    key = (await site.client.job(number)).key
    folder = site.home / ".local/share/carme/jobs" / key
    (folder / "output-3.log").write_text("three\n")
    (folder / "tasks/3").mkdir(parents=True)
    (folder / "tasks/3/result").write_text("3!")

    async def seen() -> bool:
        return (await site.client.job(number, task=3)).id == 203

    await until(seen)
    for requested in ({"job_id": number, "task": 3}, {"job_id": 203}):
        assert (await site.client.log(**requested)).text == "three\n"
        assert (await site.client.result(**requested)).text == "3!"
    assert (await site.client.log(number, task=5)).text == "" == (await site.client.log(number)).text


async def test_a_task_or_the_array_is_submitted_again(site: Any, array: JobRequest) -> None:
    number = await site.client.submit(array)
    for task, expected in ((4, "4"), (None, "0-9%2")):
        await site.client.resubmit(number, task=task)
        assert f"--array={expected}" in site.slurm.calls("sbatch")[-1]["arguments"]
    await site.client.resubmit(number, tasks=arrays.listed([7, 1, 2, 3]))
    assert "--array=1-3,7%2" in site.slurm.calls("sbatch")[-1]["arguments"]


async def test_a_job_that_is_no_array_has_no_tasks_to_submit_again(site: Any, request_: JobRequest) -> None:
    number = await site.client.submit(request_)
    with pytest.raises(InvalidRequest, match="is not an array"):
        await site.client.resubmit(number, tasks="1-3")
    assert len(site.slurm.calls("sbatch")) == 1


async def test_a_task_that_only_the_accounting_knows_is_found(site: Any, array: JobRequest) -> None:
    record = {"JobIDRaw": "303", "JobID": "300_3", "User": "ada", "State": "COMPLETED", "JobName": "a"}
    site.slurm.account(record, record | {"JobIDRaw": "300", "JobID": "300_[4-9]", "State": "CANCELLED by 0"})
    assert (await site.client.job(300, task=3)).id == 303
    assert (await site.client.job(300, task=8)).state == "CANCELLED"


async def test_a_task_that_was_cancelled_while_it_waited_is_still_one(site: Any, array: JobRequest) -> None:
    number = await site.client.submit(array)
    waiting, *_ = site.slurm.jobs
    site.slurm.jobs = [waiting | {"K": "0-4%2"}]  # of the others Slurm keeps nothing

    async def seen() -> bool:
        return not (await site.client.job(number)).has_task(number, 7)

    await until(seen)
    job = await site.client.job(number, task=7)
    assert (job.state, job.array_id, job.task, job.name) == ("CANCELLED", number, 7, "train 1")
    assert job.explanation.startswith("You cancelled this job before it began")
    assert (
        (await site.client.log(number, task=7)).text == "" == (await site.client.result(number, task=7)).text
    )
    with pytest.raises(NotFound):
        await site.client.job(number, task=10)  # never one of it
    site.act("bob")
    with pytest.raises(NotFound):
        await site.client.job(number, task=7)


async def test_an_array_with_too_many_tasks_is_refused_with_a_sentence(site: Any, array: JobRequest) -> None:
    site.slurm.fail("sbatch", "sbatch: error: Batch job submission failed: Invalid job array specification")
    with pytest.raises(SlurmError, match="more tasks") as caught:
        await site.client.submit(array)
    assert caught.value.field == "array"


def test_tasks_share_files_and_write_into_folders_of_their_own(tmp_path: Path) -> None:
    node = Node(tmp_path)
    (node.key / "files").mkdir()
    (node.key / "files/data").write_text("shared")
    script = 'cat "$CARME_JOB_FOLDER/files/data"; echo $SLURM_ARRAY_TASK_ID > "$CARME_JOB_FOLDER/result"'
    node.spec(command=["sh", "-c", script], array=True, results=None, stage=[])
    for task in ("3", "4"):
        node.environment["SLURM_ARRAY_TASK_ID"] = task
        code, output, errors = node.run()
        assert (code, output) == (0, "shared"), errors
        assert (node.key / f"tasks/{task}/result").read_text() == f"{task}\n"
        assert (node.key / f"tasks/{task}").stat().st_mode & 0o777 == 0o700
    assert not (node.key / "result").exists() and not (node.key / "begun").exists()
    del node.environment["SLURM_ARRAY_TASK_ID"]
    code, _, errors = node.run()
    assert (code, "not a task" in errors) == (Exit.FAILED, True)
