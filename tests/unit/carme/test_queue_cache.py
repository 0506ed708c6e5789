"""Which jobs are parsed anew from squeue's output, and which are those of the last poll."""

import random
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from unit.carme.conftest import RUNNING, FakeSlurm

from carme.broker.feed import Feed
from carme.broker.watch import Watch
from carme.errors import SlurmError
from carme.jobs import Job, JobState
from carme.slurm import SlurmCommands, parsing, tres
from carme.slurm import commands as commands_module
from carme.slurm.queue_cache import QueueCache

S = "\x1e!"
SHORT: dict[str, Any] = {
    "A": "7", "u": "ada", "a": "lab", "P": "gpu", "T": "RUNNING", "D": "1", "N": "n1", "C": "2",
    "m": "1000M", "l": "1:00:00", "L": "59:00", "V": "1795181000", "S": "1795181010", "e": "1795184610",
    "F": "7", "K": "N/A", "B": "n1", "j": "train",
}  # fmt: skip
LONG = {"JobID": "7", "RestartCnt": "0", "NumNodes": "1", "NumTasks": "1", "tres-alloc": "cpu=2,mem=1000M"}


def short(**changes: str) -> str:
    return "".join(f"{(SHORT | changes).get(field, '(null)')}{S}" for field in parsing.QUEUE_FIELDS) + "\n"


def long(exclusive: str = "OverSubscribe", word: str = "OK", **changes: str) -> str:
    values = LONG | {exclusive: word} | {name.replace("_", "-"): text for name, text in changes.items()}
    return "".join(f"{values.get(field, 'N/A')}{S}" for field in (*tres.ALLOTTED_FIELDS, exclusive)) + "\n"


def queue(known: QueueCache, short: str, long: str) -> list[Job]:
    return known.queue(short.encode(), long.encode(), "OverSubscribe")


def test_a_job_that_squeue_prints_unchanged_is_not_parsed_again() -> None:
    known = QueueCache(S.encode())
    (first,) = queue(known, short(), long())
    assert known.count == 1
    # The time that is left of a job that runs is no change.
    (second,) = queue(known, short(L="58:58"), long())
    assert second is first
    assert queue(known, "", "") == [] and known.count == 0


@pytest.mark.parametrize(
    ("queue_line", "details"),
    [
        (short(T="COMPLETING"), long()),
        (short(l="2:00:00"), long()),
        (short(), long(tres_alloc="cpu=4,mem=1000M")),
        (short(), long(word="NO")),
        (short(), ""),
    ],
)
def test_a_job_that_has_changed_is_read_as_if_it_were_new(queue_line: str, details: str) -> None:
    known = QueueCache(S.encode())
    queue(known, short(), long())
    (job,) = queue(known, queue_line, details)
    has = tres.allotted(details, S, "OverSubscribe")
    assert [job] == parsing.queue(queue_line, S, has)


def test_the_field_that_says_whether_a_job_has_whole_nodes_counts() -> None:
    """What squeue prints may stay the same when another field is queried, and mean something else."""
    known = QueueCache(S.encode())
    found = {}
    for exclusive in ("Exclusive", "OverSubscribe", "Exclusive"):
        details = long(exclusive, "NO").encode()
        (job,) = known.queue(short().encode(), details, exclusive)
        assert [job] == parsing.queue(short(), S, tres.allotted(details.decode(), S, exclusive))
        found[exclusive] = job.whole_nodes
    assert found == {"Exclusive": False, "OverSubscribe": True}


@pytest.mark.parametrize(
    "details",
    [f"7{S}\n", f"7{S}0{S}{long()}", f"{S.join(long().split(S)[:-2])}{S}\n"],
    ids=["its number alone", "begun twice", "one field less"],
)
def test_a_long_record_that_is_not_whole_counts_as_missing(details: str) -> None:
    known = QueueCache(S.encode())
    queue(known, short(), details)
    assert known.unallotted == [7]
    (job,) = known.allot(long().encode(), "OverSubscribe")
    assert [job] == parsing.queue(short(), S, tres.allotted(long(), S, "OverSubscribe"))


def test_where_a_field_ends_counts() -> None:
    """Users name their jobs: what stands in one field cannot be taken for what stands in two."""
    known = QueueCache(S.encode())
    (first,) = queue(known, short(a="lab", P="gpu"), long())
    (second,) = queue(known, short(a="labg", P="pu"), long())
    assert [(job.account, job.partition) for job in (first, second)] == [("lab", "gpu"), ("labg", "pu")]


def test_the_remaining_time_of_a_suspended_job_counts() -> None:
    known = QueueCache(S.encode())
    jobs = [queue(known, short(T="SUSPENDED", L=left), long())[0] for left in ("59:00", "9:00")]
    assert [job.seconds_left for job in jobs] == [59 * 60, 9 * 60]
    assert jobs[0].state is JobState.SUSPENDED


#: As squeue prints a job of `sbatch --gpus=2`: in the short form there are no GPUs of it.
GPUS = {"b": "N/A", "tres-per-job": "gres/gpu:2", "tres-alloc": "cpu=1,mem=1M,node=1,gres/gpu=2"}


def named(slurm: FakeSlurm) -> list[list[str]]:
    """For which jobs squeue's long form was queried, call by call; none are all."""
    calls = slurm.calls("squeue")
    long_forms = [call["arguments"] for call in calls if "SQUEUE_FORMAT2" in call["environment"]]
    return [[word for word in words if word.startswith("--jobs=")] for words in long_forms]


async def test_a_job_submitted_between_the_two_forms_has_its_gpus_at_once(slurm: FakeSlurm) -> None:
    adapter = SlurmCommands(cluster="test")
    slurm.jobs = [RUNNING, *(RUNNING | GPUS | {"A": number} for number in (8, 9, 10))]
    slurm.late({8: "submitted", 9: "ended", 10: "submitted"})
    jobs = await adapter.queue()
    assert [(job.id, job.gpus) for job in jobs] == [(7, 0), (8, 2), (9, 0), (10, 2)]
    assert named(slurm) == [[], ["--jobs=8,9,10"]]
    # It is known then: once the long form has it, the same record makes no new job.
    slurm.late({})
    again = await adapter.queue()
    assert again[1] is jobs[1] and again[2].gpus == 2
    assert named(slurm) == [[], ["--jobs=8,9,10"], []]  # nothing is missing


async def test_a_job_that_slurm_has_dropped_keeps_its_short_form(slurm: FakeSlurm) -> None:
    slurm.jobs = [RUNNING, RUNNING | {"A": 8, "b": "gres:gpu:a100:2", "T": "CANCELLED"}]
    slurm.late({8: "ended"})
    jobs = await SlurmCommands(cluster="test").queue()
    assert [(job.id, job.gpus) for job in jobs] == [(7, 0), (8, 2)]


async def test_more_jobs_than_can_be_named_have_their_gpus_at_the_next_poll(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands_module, "_MOST_NAMED", 1)
    adapter = SlurmCommands(cluster="test")
    slurm.jobs = [RUNNING | GPUS | {"A": number} for number in (7, 8)]
    slurm.late({7: "submitted", 8: "submitted"})
    assert [(job.id, job.gpus) for job in await adapter.queue()] == [(7, 0), (8, 0)]
    slurm.late({})
    assert [(job.id, job.gpus) for job in await adapter.queue()] == [(7, 2), (8, 2)]
    assert named(slurm) == [[], []]


async def test_without_an_answer_on_a_new_job_the_others_are_there(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_answer(*arguments: str, **options: Any) -> Any:
        if any(word.startswith("--jobs=") for word in arguments):
            raise SlurmError("squeue did not answer.")
        return await run(*arguments, **options)

    run = commands_module.run
    monkeypatch.setattr(commands_module, "run", no_answer)
    slurm.jobs = [RUNNING, RUNNING | GPUS | {"A": 8}]
    slurm.late({8: "submitted"})
    jobs = await SlurmCommands(cluster="test").queue()
    assert [(job.id, job.gpus) for job in jobs] == [(7, 0), (8, 0)]


@pytest.mark.parametrize(("most", "beside"), [(1, True), (2, False)])
async def test_the_loop_does_not_wait_for_many_jobs_to_be_read(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, most: int, beside: bool
) -> None:
    threads = []

    class Watched(QueueCache):
        def queue(self, *records: Any, **named: Any) -> list[Job]:
            threads.append(threading.current_thread())
            return super().queue(*records, **named)

        def allot(self, *records: Any, **named: Any) -> list[Job]:
            threads.append(threading.current_thread())
            return super().allot(*records, **named)

    monkeypatch.setattr(commands_module, "QueueCache", Watched)
    monkeypatch.setattr(commands_module, "MANY_JOBS", most)
    slurm.jobs = [RUNNING, RUNNING | GPUS | {"A": 8}]
    slurm.late({8: "submitted"})
    assert [job.gpus for job in await SlurmCommands(cluster="test").queue()] == [0, 2]
    assert [thread is not threading.main_thread() for thread in threads] == [beside, beside]


async def test_with_many_jobs_the_queue_is_read_without_asking_what_has_changed(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = SlurmCommands(cluster="test")
    slurm.jobs = [RUNNING, RUNNING | {"A": 8}]
    monkeypatch.setattr(commands_module, "MANY_JOBS", 1)
    # Before the first poll nobody knows how many there are.
    assert await adapter.pulse() == await adapter.pulse()
    assert len(slurm.calls("scontrol")) == 2
    assert [job.id for job in await adapter.queue()] == [7, 8]
    assert await adapter.pulse() != await adapter.pulse()
    assert len(slurm.calls("scontrol")) == 2


async def test_with_many_jobs_the_broker_pauses_after_a_slow_poll(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Busy:
        has_many_jobs = False

        async def pulse(self) -> str:
            begun = time.process_time()
            while time.process_time() < begun + 0.05:
                pass
            raise SlurmError("Slurm is away.")

    async def save() -> None: ...

    slurm = Busy()
    watch = Watch(cast(Any, slurm), 0.01, Feed(), cast(Any, SimpleNamespace(save=save)))
    assert watch._pause() == 0.01
    # What else the broker did meanwhile does not let a small site's sessions end later.
    await watch._poll()
    assert watch._pause() == 0.01
    slurm.has_many_jobs = True
    await watch._poll()
    assert watch._pause() >= 0.15
    monkeypatch.setattr("carme.broker.watch.REST_SECONDS", 0.1)
    await watch._poll()
    assert watch._pause() == 0.1


async def test_the_separator_is_no_argument_and_stays_for_all_looks(slurm: FakeSlurm) -> None:
    """Users read the arguments of others' programs: who knows it can write records into a job's name."""
    adapter = SlurmCommands(cluster="test")
    slurm.jobs = [RUNNING]
    first, second = [await adapter.queue() for _ in range(2)]
    assert first[0] is second[0]
    calls = [call for call in slurm.calls("squeue") if "--helpFormat" not in call["arguments"]]
    forms = {call["environment"].get("SQUEUE_FORMAT", "") for call in calls} - {""}
    (separator,) = {form.split("%")[1][1:] for form in forms}
    assert len(calls) == 4 and len(separator) > 8
    assert not any(separator in word for call in calls for word in call["arguments"])


def random_queue(draw: random.Random, jobs: dict[int, tuple[str, str]], exclusive: str) -> None:
    """Change some jobs, drop some, and add some, with words that look like records."""
    traps = (
        "train",
        "",
        "\n",
        f"\n7{S[:1]}",
        "a\nPENDING",
        "PENDING",
        "SUSPENDED",
        "\n\n9",
        "\N{SNOWMAN}",
        "x" * 500,
    )
    for number in draw.sample(sorted(jobs), k=min(len(jobs), 5)):
        del jobs[number]
    for number in draw.sample(range(1, 60), k=15):
        state = draw.choice(("PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "COMPLETED", "FAILED"))
        values = {
            "A": str(number),
            "F": str(number),
            "T": state,
            "j": draw.choice(traps),
            "k": draw.choice(traps),
        }
        values |= {
            "L": f"{draw.randrange(60)}:00",
            "u": draw.choice(("ada", "bob")),
            "Q": str(draw.randrange(9)),
        }
        has = long(exclusive, draw.choice(("OK", "NO")), JobID=str(number), RestartCnt=str(draw.randrange(2)))
        jobs[number] = short(**values), has if draw.random() < 0.9 else ""


@pytest.mark.parametrize("seed", range(20))
def test_after_any_changes_the_queue_is_what_a_full_read_gives(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, known, jobs = random.Random(seed), QueueCache(S.encode()), {}
    # However the output is cut, also within a record whose fields begin with line ends.
    monkeypatch.setattr("carme.slurm.queue_cache._BLOCK", draw.choice((1, 40, 300, 1 << 20)))
    for _ in range(15):
        random_queue(draw, jobs, "OverSubscribe")
        numbers = sorted(jobs)
        draw.shuffle(numbers)
        short, long = ("".join(jobs[number][part] for number in numbers) for part in (0, 1))
        found = queue(known, short, long)
        assert found == parsing.queue(short, S, tres.allotted(long, S, "OverSubscribe"))
        assert [job.id for job in found] == numbers
