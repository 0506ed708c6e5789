"""Why jobs and sessions are over, in one sentence that names the cause and the next step."""

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carme.jobs import FORGOTTEN, Job, JobState, Phase, ending_of, last_lines
from carme.launch.exits import Exit
from carme.sessions import ENDINGS, Ending
from carme.slurm import parsing

OVER = [state for state in JobState if state.phase is Phase.OVER]
S = "|5f|"


def job(state: JobState, kind: str = "session", **values: Any) -> Job:
    values = {
        "image": "torch",
        "node_list": "n1",
        "nodes": 1,
        "memory_mb": 2048,
        "minutes_limit": 90,
    } | values
    return Job.model_validate({"id": 7, "name": "a", "user": "ada", "kind": kind, "state": state, **values})


@pytest.mark.parametrize(
    ("values", "ready", "ending", "words"),
    [
        ({"state": JobState.TIMEOUT}, True, Ending.TIME_LIMIT, ["limit of 1 hour 30 minutes", "more time"]),
        ({"state": JobState.TIMEOUT}, False, Ending.TIME_LIMIT, ["time limit"]),
        ({"state": JobState.NODE_FAIL}, True, Ending.NODE_FAILURE, ["Node n1 failed", "start it again"]),
        (
            {"state": JobState.NODE_FAIL, "nodes": 2, "node_list": "n[1-2]", "failed_node": "n2"},
            True,
            Ending.NODE_FAILURE,
            ["Node n2 failed"],
        ),
        (
            {"state": JobState.CANCELLED, "cancelled_by": "other", "nodes": 1, "failed_node": "n2"},
            True,
            Ending.NODE_FAILURE,
            ["Node n2 failed"],
        ),
        (
            {"state": JobState.OUT_OF_MEMORY, "peak_memory_mb": 2040},
            True,
            Ending.OUT_OF_MEMORY,
            ["peak was 2040 MiB", "limit is 2048 MiB", "more memory"],
        ),
        (
            {"state": JobState.OUT_OF_MEMORY},
            False,
            Ending.OUT_OF_MEMORY,
            ["more than its limit of 2048 MiB"],
        ),
        (
            {"state": JobState.OUT_OF_MEMORY, "peak_memory_mb": 60},
            True,
            Ending.OUT_OF_MEMORY,
            ["limit of 2048 MiB", "last saw 60 MiB"],
        ),
        ({"state": JobState.PREEMPTED}, True, Ending.PREEMPTED, ["higher priority", "start it again"]),
        (
            {"state": JobState.CANCELLED, "cancelled_by": "owner"},
            True,
            Ending.STOPPED,
            ["You stopped this session."],
        ),
        (
            {"state": JobState.CANCELLED, "cancelled_by": "other"},
            True,
            Ending.CANCELLED_BY_ADMIN,
            ["An administrator cancelled the session", "ask them"],
        ),
        ({"state": JobState.CANCELLED}, True, Ending.STOPPED, ["cancelled", "does not record by whom"]),
        (
            {"state": JobState.CANCELLED, "cancelled_by": "slurm"},
            False,
            Ending.DIED_AT_START,
            ["Slurm could not launch the session on node n1"],
        ),
        (
            {"state": JobState.CANCELLED, "cancelled_by": "slurm", "node_list": ""},
            False,
            Ending.CANCELLED_BY_ADMIN,
            ["An administrator cancelled the session"],
        ),
        (
            {"state": JobState.CANCELLED, "cancelled_by": "root"},
            True,
            Ending.CANCELLED_BY_ADMIN,
            ["Slurm or an administrator cancelled the session"],
        ),
        ({"state": JobState.COMPLETED, "exit_code": 0}, True, Ending.FINISHED, ["shut down from within"]),
        ({"state": JobState.COMPLETED}, False, Ending.DIED_AT_START, ["before its server was ready"]),
        ({"state": JobState.FAILED, "exit_code": 3}, False, Ending.DIED_AT_START, ["exit code 3", "log"]),
        ({"state": JobState.FAILED, "exit_code": 0, "signal": 9}, True, Ending.DIED, ["signal 9", "log"]),
        ({"state": JobState.FAILED, "signal": 53}, False, Ending.HOME_NOT_WRITABLE, ["home", "n1"]),
        ({"state": JobState.FAILED, "reason": FORGOTTEN}, True, Ending.LOST, ["no record"]),
        ({"state": JobState.FAILED, "exit_code": Exit.BEGUN_BEFORE}, False, Ending.LOST, ["restarted"]),
        (
            {"state": JobState.FAILED, "exit_code": Exit.IMAGE_MISSING},
            False,
            Ending.IMAGE_MISSING,
            ["image torch is missing on node n1", "choose another"],
        ),
        (
            {"state": JobState.FAILED, "exit_code": Exit.HOME_NOT_WRITABLE},
            False,
            Ending.HOME_NOT_WRITABLE,
            ["is not writable on node n1"],
        ),
        (
            {"state": JobState.FAILED, "exit_code": Exit.NO_APPTAINER},
            False,
            Ending.DIED_AT_START,
            ["Apptainer is not installed on node n1", "administrator"],
        ),
    ],
)  # fmt: skip
def test_each_cause_has_an_ending_and_a_sentence(
    values: dict[str, Any], ready: bool, ending: Ending, words: list[str]
) -> None:
    found, sentence = ending_of(job(**values), None, ready)
    assert found is ending
    for word in words:
        assert word in sentence


@pytest.mark.parametrize("note", [Ending.STOPPED, Ending.IDLE])
def test_what_the_hub_noted_before_it_cancelled_is_the_cause(note: Ending) -> None:
    for state in (JobState.CANCELLED, JobState.OUT_OF_MEMORY, JobState.COMPLETED):
        assert ending_of(job(state, cancelled_by="owner"), note, True)[0] is note


def test_a_server_that_the_hub_gave_up_has_failed_to_start() -> None:
    words = "The server did not answer within 120 seconds; start it again."
    cancelled = job(JobState.CANCELLED, cancelled_by="owner")
    for note in (None, Ending.STOPPED):
        assert ending_of(cancelled, note, False, words) == (Ending.DIED_AT_START, words)
    # A message of an earlier trouble does not make a stopped session a failed one.
    assert ending_of(cancelled, Ending.STOPPED, True, words)[0] is Ending.STOPPED
    # Slurm's own cause is nearer to the truth.
    assert ending_of(job(JobState.TIMEOUT), None, False, words)[0] is Ending.TIME_LIMIT


def test_every_ending_has_one_sentence_with_a_next_step() -> None:
    codes = [0, 1, *Exit]
    for state, kind, ready, code, nodes in product(OVER, ("session", "batch"), (True, False), codes, (1, 2)):
        ended = job(state, kind, exit_code=code, nodes=nodes)
        ending, sentence = ending_of(ended, None, ready)
        assert ending in ENDINGS
        assert sentence[0].isupper() and sentence.endswith(".") and ". " not in sentence
        assert "; " in sentence or ending is Ending.STOPPED  # its owner knows what to do
        assert ("session" in sentence) <= (kind == "session")


def test_a_batch_job_reports_the_same() -> None:
    assert job(JobState.FAILED, "batch", exit_code=3).explanation.startswith(
        "The job ended with exit code 3;"
    )
    out = job(JobState.OUT_OF_MEMORY, "batch", peak_memory_mb=2047)
    assert out.explanation.startswith("The job ran out of memory: its peak was 2047 MiB")
    assert (
        "An administrator cancelled the job"
        in job(JobState.CANCELLED, "batch", cancelled_by="other").explanation
    )


def test_the_last_lines_follow_a_death_alone() -> None:
    log = "\n".join(f"line {number}\x1b[0m\r" for number in range(50)) + "\n\n"
    _, sentence = ending_of(job(JobState.FAILED, exit_code=1), None, False, log=log)
    head, _, tail = sentence.partition(" The end of its log says:\n")
    assert "exit code 1" in head
    assert tail.splitlines()[-1] == "line 49[0m"
    assert len(tail.splitlines()) < 10
    assert ending_of(job(JobState.TIMEOUT), None, True, log=log)[1].count("\n") == 0


@given(st.text())
def test_no_log_moves_the_cursor_or_floods_the_page(log: str) -> None:
    shown = last_lines(log)
    assert len(shown) <= 1200
    assert all(letter.isprintable() or letter in "\n\t" for letter in shown)


def test_the_accounting_shows_who_cancelled_and_the_peak() -> None:
    lines = [
        ("7", "1000", "CANCELLED by 0", ""),
        ("7.batch", "", "CANCELLED", "512K"),
        ("8", "1000", "CANCELLED by 1000", ""),
        ("9", "1000", "OUT_OF_MEMORY", ""),
        ("9.extern", "", "COMPLETED", "262144"),
        ("9.batch", "", "OUT_OF_MEMORY", "104288256"),
        ("9.0", "", "OUT_OF_MEMORY", "64M"),
        ("10", "1000", "CANCELLED by 0", ""),
        ("10.extern", "", "CANCELLED", ""),
        ("11", "1000", "CANCELLED by 998", ""),
    ]
    found = parsing.outcomes("".join(S.join(line) + S + "\n" for line in lines), S)
    assert {key: outcome.cancelled_by for key, outcome in found.items()} == {
        7: "other",
        8: "owner",
        9: None,
        10: "slurm",  # it has no batch step: its launch had failed
        11: "other",
    }
    assert found[9].peak_memory_mb == 99


# What the broker finds out

SESSION_JOB: dict[str, Any] = {
    "A": 7, "j": "session-s1", "u": "ada", "P": "gpu", "D": 1, "N": "n1", "C": 1, "m": "100M", "l": "1:00:00",
    "k": f"carme/1 kind=session image=torch key={'0' * 32}",
}  # fmt: skip


async def explained(site: Any, *words: str) -> str:
    """The job's explanation, once it holds the words; the test's own time limit ends it otherwise."""
    cursor = None
    while True:
        batch = await site.client.events(cursor, wait=30)
        cursor = batch.cursor
        for known in batch.jobs:
            if all(word in known.explanation for word in words):
                return known.explanation


async def test_the_broker_asks_once_who_cancelled_a_job(site: Any) -> None:
    site.slurm.account(
        {"JobIDRaw": 7, "UID": 1000, "User": "ada", "State": "CANCELLED by 0", "ExitCode": "0:15"},
        {"JobIDRaw": "7.batch", "State": "CANCELLED"},
    )
    site.slurm.jobs = [SESSION_JOB | {"T": "CANCELLED"}]
    await explained(site, "An administrator cancelled the session")
    # A later poll reports another job's end and has nothing left to query.
    site.slurm.jobs = [SESSION_JOB | {"T": "CANCELLED"}, SESSION_JOB | {"A": 8, "T": "TIMEOUT"}]
    await explained(site, "reached its time limit")
    assert len(site.slurm.calls("sacct")) == 1


async def test_the_peak_may_come_late(site: Any) -> None:
    job = {"JobIDRaw": 7, "UID": 1000, "User": "ada", "State": "OUT_OF_MEMORY", "ExitCode": "0:125"}
    site.slurm.account(job)
    site.slurm.jobs = [SESSION_JOB | {"T": "OUT_OF_MEMORY"}]
    assert "peak" not in await explained(site, "ran out of memory", "more than its limit of 100 MiB")
    site.slurm.account(job, {"JobIDRaw": "7.batch", "State": "OUT_OF_MEMORY", "MaxRSS": "101844K"})
    await explained(site, "its peak was 99 MiB and its limit is 100 MiB")


async def test_a_launch_that_slurm_gave_up_is_nobodys_cancellation(site: Any) -> None:
    site.slurm.account(
        {"JobIDRaw": 7, "UID": 1000, "User": "ada", "State": "CANCELLED by 0", "ExitCode": "0:0"},
    )
    site.slurm.jobs = [SESSION_JOB | {"T": "CANCELLED"}]
    await explained(site, "Slurm could not launch the session on node n1")


async def test_without_accounting_the_end_is_reported_all_the_same(site: Any) -> None:
    site.slurm.fail("sacct", "Slurm accounting storage is disabled")
    site.slurm.jobs = [SESSION_JOB | {"T": "CANCELLED"}]
    await explained(site, "was cancelled", "does not record by whom")
    site.slurm.jobs = [SESSION_JOB | {"A": 8, "T": "RUNNING"}]
    assert [known.id for known in await site.client.jobs()] in ([], [8])


def test_what_the_hub_lost_is_reported_in_its_own_words() -> None:
    over = job(JobState.CANCELLED, cancelled_by="owner")
    assert ending_of(over, Ending.LOST, True, "The hub did not know it.") == (
        Ending.LOST,
        "The hub did not know it.",
    )
