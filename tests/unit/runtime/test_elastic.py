"""Runs that go on after ranks or nodes were lost."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from carme_runtime import CarmeRuntimeError
from carme_runtime.fabric.members import Member, Members
from carme_runtime.launcher import place
from carme_runtime.launcher.elastic import Limits, Seats

from .conftest import MEET, Job, Process, Witness

Script = Callable[[str], str]
Launch = Callable[..., Process]
MakeJob = Callable[..., Job]
ABOUT = """
import os, signal, sys, time
rank, size, start = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "CARME_RESTARTS"))
print(f"start {start}: {rank} of {size}", flush=True)
def lost(): os.kill(os.getpid(), signal.SIGKILL)
def wait(): time.sleep(1000)
"""


def starts_in(out: str) -> list[str]:
    return sorted(line.partition("] ")[2] for line in out.splitlines())


def test_a_lost_rank_shrinks_the_run(local: Launch, script: Script, tmp_path: Path) -> None:
    path = script(ABOUT + "if start == 0: lost() if rank == 1 else wait()")
    logs = tmp_path / "logs"
    code, out, errors = local("-n", "3", "--max-restarts", "2", "--log-folder", str(logs), path).wait()
    assert code == 0, errors
    starts = ["start 0: 0 of 3", "start 0: 1 of 3", "start 0: 2 of 3", "start 1: 0 of 2", "start 1: 1 of 2"]
    assert [line for line in starts_in(out) if not line.startswith("start 0")] == starts[3:]
    assert "was killed by signal 9 (SIGKILL), so the others were stopped." in errors
    assert "carme-run: Restart 1 of 2: 2 ranks go on, 3 there were before.\n" in errors
    assert (logs / "rank-1.log").read_text().splitlines() == [starts[1], starts[4]]


def test_a_rank_that_fails_is_not_lost(local: Launch, script: Script) -> None:
    path = script(ABOUT + "if start < 2: sys.exit('no') if rank == 0 else wait()")
    code, out, errors = local("-n", "2", "--max-restarts", "2", path).wait()
    assert code == 0, errors
    assert starts_in(out)[-2:] == ["start 2: 0 of 2", "start 2: 1 of 2"]


def test_a_rank_that_fails_because_another_was_lost_does_not_count(
    local: Launch, script: Script, witness: Witness
) -> None:
    # Rank 0 ends first, because of rank 1: only that one was lost. Not by a handler: where the signal comes
    # just before a sleep, Python runs it only afterwards.
    ready = MEET + "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])"
    first = "\n    if rank > 0: signal.sigwait([signal.SIGTERM])\n    lost() if rank == 1 else sys.exit(1)"
    then = "\nwitness.send(b'r'), witness.recv(2)\nif start == 0:" + first
    run = local("-n", "3", "--max-restarts", "1", script(ABOUT + ready + then), **witness.environment)
    witness.expect(3)
    witness.wait_until_ready()
    witness.release()
    witness.expect(2)
    witness.release()
    code, out, errors = run.wait()
    assert (code, starts_in(out)[-2:]) == (0, ["start 1: 0 of 2", "start 1: 1 of 2"]), errors


def test_restarts_come_to_an_end(local: Launch, script: Script) -> None:
    code, out, errors = local(
        "-n", "4", "--max-restarts", "2", script(ABOUT + "lost() if rank == 0 else wait()")
    ).wait()
    assert code == 128 + signal.SIGKILL
    assert {line for line in starts_in(out) if " 0 of " in line} == {
        f"start {n}: 0 of {4 - n}" for n in range(3)
    }
    assert errors.endswith("carme-run: The run had its 2 restarts, and is over.\n")


def test_too_few_ranks_do_not_go_on(local: Launch, script: Script) -> None:
    path = script(ABOUT + "lost() if rank == 0 else wait()")
    code, _, errors = local("-n", "2", "--max-restarts", "5", "--min-ranks", "2", path).wait()
    assert code == 128 + signal.SIGKILL
    assert errors.endswith("carme-run: 1 rank could go on, and --min-ranks asks for 2: the run is over.\n")


def test_an_interrupt_ends_all_of_it(local: Launch, script: Script, witness: Witness) -> None:
    process = local("-n", "2", "--max-restarts", "5", script(ABOUT + MEET + "wait()"), **witness.environment)
    witness.expect(2)
    process.popen.send_signal(signal.SIGINT)
    code, out, _ = process.wait()
    assert code == 128 + signal.SIGINT
    assert "start 1" not in out


def test_a_lost_node_shrinks_the_run_and_a_returned_one_grows_it(
    make_job: MakeJob, script: Script, witness: Witness
) -> None:
    job = make_job("n1", "n2")
    release = MEET + "\nif witness.recv(2) != b'go': wait()"
    run = job.launch(
        "-n", "4", "--max-restarts", "1", script(ABOUT + release), environment=witness.environment
    )
    witness.expect(4)
    job.joined[0].popen.kill()
    witness.expect(2)
    run.wait_for_error("Restart 1 of 1: 2 ranks go on, 4 there were before.")
    again = job.join(1)
    again.wait_for_error("n2 joined")
    run.wait_for_error("A node has come: 4 ranks go on, 2 there were before.")
    witness.expect(4)
    witness.release()
    code, out, errors = run.wait()
    assert code == 0, errors
    assert [line for line in starts_in(out) if line.startswith("start 2")] == [
        f"start 2: {r} of 4" for r in range(4)
    ]
    assert "The agent of n2 was lost" in errors


def members(*counts: int, lost: tuple[str, ...] = ()) -> Members:
    present = [
        Member(number, f"n{number}", "127.0.0.1", 0, 8) for number, count in enumerate(counts) if count
    ]
    return Members(tuple(present), lost, len(counts))


def test_seats_of_lost_ranks_are_filled_again() -> None:
    everybody = members(1, 1, 1)
    first = place(everybody, ranks=6)
    seats = Seats(first, 6)
    assert len(seats.places(everybody, None)) == 6
    seats.lose(first, {0, 5})
    places = seats.places(everybody, None)
    assert [(each.rank, each.member.host) for each in places] == [(0, "n0"), (1, "n1"), (2, "n1"), (3, "n2")]
    assert len(seats.places(members(1, 0, 1), None)) == 2
    seats.lose(places, {0})
    assert [each.member.host for each in seats.places(members(1, 0, 1), None)] == ["n2"]
    assert seats.places(members(1), None) == []


def test_spare_nodes_take_the_place_of_lost_ones() -> None:
    first = place(members(1, 1, 1), ranks=2)
    assert [each.member.host for each in first] == ["n0", "n1"]
    assert [each.member.host for each in Seats(first, 2).places(members(1, 0, 1), None)] == ["n0", "n2"]
    named = Seats(first, 2, hosts={"n0", "n1"})
    assert [each.member.host for each in named.places(members(1, 0, 1), None)] == ["n0"]


@pytest.mark.parametrize(
    ("limits", "word"),
    [
        (Limits(1, 3), "--min-ranks asks for 3"),
        (Limits(1, 1, 1), "--max-ranks allows 1"),
        (Limits(1, 3, 2), "Exchange"),
    ],
)
def test_limits_that_cannot_hold_are_refused(limits: Limits, word: str) -> None:
    with pytest.raises(CarmeRuntimeError, match=word):
        limits.check(2)


def test_limits_without_restarts_are_refused(local: Launch, script: Script) -> None:
    code, _, errors = local("-n", "2", "--min-ranks", "1", script("")).wait()
    assert code == 2
    assert "Add --max-restarts 3" in errors
