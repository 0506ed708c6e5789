"""What a run says at its end, from events of nodes in an order that a test chooses."""

import asyncio
from typing import Any

import pytest

from carme_runtime.fabric.client import Event
from carme_runtime.fabric.members import Member, Members
from carme_runtime.launcher.placement import place
from carme_runtime.launcher.rank_options import RankOptions
from carme_runtime.launcher.run import Run

MEMBERS = Members.of([Member(0, "n1", "127.0.0.1", devices=0, cpus=64)], [], 1)


class ScriptedFabric:
    """A node whose events are given."""

    members = MEMBERS
    in_job = True

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self._events = iter(events)

    def send(self, node: int, request: dict[str, Any]) -> None:
        pass

    async def next_event(self) -> Event:
        return Event(0, next(self._events))

    async def close(self) -> None:
        pass


def exits(rank: int, code: int, stopped: bool = False) -> dict[str, Any]:
    return {"type": "exit", "rank": rank, "code": code, "stopped": stopped}


def error_output(rank: int, text: str) -> dict[str, Any]:
    return {"type": "output", "rank": rank, "stream": 2, "text": text, "bytes": len(text)}


def report(ranks: int, events: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]) -> str:
    """Run with these events between start and end, and give what carme-run says of it."""

    async def run() -> None:
        # A run takes signals over for good; the tests' process needs its own afterwards.
        vars(asyncio.get_running_loop())["add_signal_handler"] = lambda *_: None
        fabric = ScriptedFabric([{"type": "port", "port": 1}, *events, {"type": "over"}])
        await Run(fabric, place(MEMBERS, ranks=ranks), ["true"], "/", {}, RankOptions()).execute()

    asyncio.run(run())
    return capfd.readouterr().err.partition("carme-run: ")[2]


@pytest.mark.parametrize(
    ("ended", "named"),
    [([1], "Rank 1"), ([2, 1], "Ranks 1 and 2"), ([3, 1, 2], "Ranks 1, 2 and 3"), (range(1, 10), "9 ranks")],
)
def test_a_failure_after_ranks_that_ended_well_names_these(
    ended: list[int], named: str, capfd: pytest.CaptureFixture[str]
) -> None:
    error = "Traceback (most recent call last):\nPeerLost: Rank 1 was lost\n"
    events = [*(exits(rank, 0) for rank in ended), error_output(0, error), exits(0, 1)]
    assert report(12, [*events, exits(11, 0)], capfd) == (
        f"Rank 0 on n1 ended with exit code 1, so the others were stopped. {named} had ended with exit code "
        "0 before. If rank 0 waited for one that had ended, let all ranks make the same number of steps. "
        f"The last error output of rank 0:\n{error}"
    )


def test_a_failure_deep_within_calls_names_ranks_that_ended_well(capfd: pytest.CaptureFixture[str]) -> None:
    """The report has room for the last lines of its traceback alone."""
    frames = [f'  File "x.py", line {n}, in f\n    g(x)\n    ^^^^\n' for n in range(15)]
    error = "".join(["Traceback (most recent call last):\n", *frames, "PeerLost: Rank 1 was lost\n"])
    text = report(2, [exits(1, 0), error_output(0, error), exits(0, 1)], capfd)
    assert "Rank 1 had ended with exit code 0 before." in text
    assert "Traceback" not in text
    assert text.endswith(frames[-1] + "PeerLost: Rank 1 was lost\n")


def test_other_failures_name_no_rank_that_ended_well(capfd: pytest.CaptureFixture[str]) -> None:
    stopped = "so the others were stopped."
    wrong = report(2, [error_output(0, "wrong\n"), exits(0, 1), exits(1, 0)], capfd)
    assert wrong == f"Rank 0 on n1 ended with exit code 1, {stopped} Its last error output:\nwrong\n"
    refused = report(2, [exits(1, 0), error_output(0, "carme-run --plan: no plan\n"), exits(0, 2)], capfd)
    assert refused == (
        f"Rank 0 on n1 ended with exit code 2, {stopped} Its last error output:\ncarme-run --plan: no plan\n"
    )
    killed = report(2, [exits(1, 0), exits(0, -9)], capfd)
    assert "SIGKILL" in killed
    assert "exit code 0" not in killed


def test_the_report_begins_with_a_traceback_that_torch_distributed_labels(
    capfd: pytest.CaptureFixture[str],
) -> None:
    text = "starting\n[rank1]: Traceback (most recent call last):\n[rank1]:   here\n[rank1]: ValueError: x\n"
    assert report(2, [error_output(1, text), exits(1, 1), exits(0, -15, stopped=True)], capfd).endswith(
        " Its last error output:\nTraceback (most recent call last):\n  here\nValueError: x\n"
    )
