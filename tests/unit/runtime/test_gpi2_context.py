"""What a rank makes of what GPI-2's functions return; with functions that return what a test says."""

import os
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from carme_runtime.collectives.errors import GaspiError, InvalidCall, PeerLost
from carme_runtime.gaspi.gpi2 import context
from carme_runtime.gaspi.gpi2.context import Gpi2Context, start
from carme_runtime.gaspi.gpi2.library import SUCCESS, TIMEOUT, Library
from patience import HANG

FAILED = -1
NUMBERS = {"segment_max": 32, "queue_num": 8, "queue_size_max": 64, "queue_size": 0}


class Functions:
    """Those of GPI-2. `codes`: by function what is returned next; after that SUCCESS."""

    def __init__(self) -> None:
        self.codes: dict[str, list[int]] = {}
        self.during: Callable[[str], None] = lambda function: None
        self.called: list[str] = []

    def raw(self, function: str, *arguments: Any) -> int:
        self.called.append(function)
        self.during(function)
        if function == "state_vec_get":
            arguments[0][:] = [0] * len(arguments[0])
        codes = self.codes.get(function)
        return codes.pop(0) if codes else SUCCESS

    def call(self, function: str, *arguments: Any) -> None:
        code = self.raw(function, *arguments)
        if code != SUCCESS:
            raise self.failure(function, code)

    def number(self, function: str, *arguments: Any) -> int:
        self.call(function)
        return NUMBERS[function]

    def failure(self, function: str, code: int) -> GaspiError:
        return GaspiError(f"{function} failed with {code}.", "Try again.")


class Beside:
    """What else a rank has: messages, and who is there."""

    gone: set[int]

    def __init__(self, *arguments: Any) -> None:
        self.gone = set()

    def start(self) -> None:
        pass

    def lost(self) -> set[int]:
        return self.gone


@pytest.fixture
def functions() -> Functions:
    return Functions()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(context.time, "sleep", found.append)
    return found


@pytest.fixture
def rank(functions: Functions, pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> Gpi2Context:
    monkeypatch.setattr(context, "Mail", Beside)
    monkeypatch.setattr(context, "Health", Beside)
    return Gpi2Context(cast(Library, functions), 0, 4, ["a"] * 4, 1000)


def lose(rank: Gpi2Context, *lost: int) -> None:
    cast(Beside, rank._health).gone.update(lost)
    assert not any(rank.ping(peer) for peer in lost)


def post(rank: Gpi2Context, peer: int, queue: int = 0) -> None:
    rank.post("notify", peer, queue, (0, peer, 1, 1))


def test_an_operation_that_failed_is_not_done_though_another_rank_was_lost(
    rank: Gpi2Context, functions: Functions
):
    lose(rank, 1)
    post(rank, 2)
    functions.codes["wait"] = [FAILED]
    with pytest.raises(GaspiError, match="wait failed with -1"):
        rank.wait(0, -1)


def test_more_errors_of_a_lost_rank_are_waited_for_with_a_pause(
    rank: Gpi2Context, functions: Functions, pauses: list[float]
):
    post(rank, 1)
    post(rank, 1)
    lose(rank, 1)
    functions.codes["wait"] = [FAILED]
    with pytest.raises(PeerLost, match="Rank 1 was lost during waiting for queue 0"):
        rank.wait(0, -1)
    functions.codes["wait"] = [FAILED, TIMEOUT, FAILED]
    assert rank.wait(0, -1)
    assert len(pauses) == 2 and min(pauses) > 0
    for queue in (0, 1):  # what is over has no more, and other queues had none
        functions.codes["wait"] = [FAILED]
        with pytest.raises(GaspiError, match="wait failed with -1"):
            rank.wait(queue, -1)


@pytest.mark.parametrize("begun", [False, True])
def test_what_is_posted_during_a_wait_is_waited_for_by_the_next_one(
    rank: Gpi2Context, functions: Functions, begun: bool
):
    """By another thread, all during the wait, or from before it until later."""
    posting, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=post, args=(rank, 1))

    def during(function: str) -> None:
        if function == "notify":
            posting.set()
            go_on.wait(HANG)
        elif function == "wait" and not begun:
            go_on.set()
            thread.start()
            thread.join()

    post(rank, 3)
    functions.during = during
    if begun:
        thread.start()
        posting.wait(HANG)
    assert rank.wait(0, -1)
    go_on.set()
    thread.join()
    functions.during = lambda function: None
    lose(rank, 1, 3)
    functions.codes["wait"] = [FAILED]
    with pytest.raises(PeerLost, match="Rank 1 was lost during waiting for queue 0"):
        rank.wait(0, -1)


def test_each_of_several_lost_ranks_is_reported(rank: Gpi2Context, functions: Functions):
    for peer in (1, 2, 3):
        post(rank, peer)
    lose(rank, 1, 3)
    for code, peer in ((FAILED, 1), (TIMEOUT, 3)):
        functions.codes["wait"] = [code]
        with pytest.raises(PeerLost, match=f"Rank {peer} was lost during waiting for queue 0"):
            rank.wait(0, -1)
    functions.codes["wait"] = [FAILED]
    assert rank.wait(0, -1)


def test_what_a_lost_rank_never_ends_is_not_waited_for_without_end(
    rank: Gpi2Context, functions: Functions, monkeypatch: pytest.MonkeyPatch
):
    """Nor is it taken for done, as it hides whether what other ranks were to do is."""
    for peer in (1, 2):
        post(rank, peer)
    lose(rank, 1)
    monkeypatch.setitem(NUMBERS, "queue_size", 2)
    monkeypatch.setattr(context, "_STUCK", 0.0)
    for _ in range(2):
        functions.codes["wait"] = [TIMEOUT]
        with pytest.raises(PeerLost, match="Rank 1 was lost during waiting for queue 0"):
            rank.wait(0, -1)
    monkeypatch.setattr(context, "_STUCK", HANG)
    functions.codes["wait"] = [TIMEOUT] * 3
    assert rank.wait(0, -1) and not functions.codes["wait"]


def test_a_child_process_does_not_leave_the_run(rank: Gpi2Context, functions: Functions):
    """It has a copy of the context, whose threads are with its parent alone."""
    child = os.fork()
    if not child:
        functions.called.clear()
        try:
            rank.close()
            os._exit(len(functions.called))
        finally:
            os._exit(100)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_error_that_was_found_while_room_was_made_is_reported(
    rank: Gpi2Context, functions: Functions, pauses: list[float], monkeypatch: pytest.MonkeyPatch
):
    functions.during = lambda function: monkeypatch.setitem(
        NUMBERS, "queue_size", 0 if function == "wait" else NUMBERS["queue_size"]
    )
    monkeypatch.setitem(NUMBERS, "queue_size", 64)
    functions.codes["wait"] = [FAILED]
    post(rank, 2)
    assert len(pauses) == 1
    with pytest.raises(GaspiError, match="wait failed with -1"):
        rank.wait(0, -1)
    assert rank.wait(0, -1)


def test_a_segment_that_gpi2_does_not_delete_stays(rank: Gpi2Context, functions: Functions):
    rank.segment_alloc(3, 100)
    functions.codes["segment_delete"] = [FAILED]
    with pytest.raises(GaspiError, match="segment_delete failed"):
        rank.segment_delete(3)
    assert rank.segment_size(3, 0) == 100
    rank.segment_delete(3)
    with pytest.raises(InvalidCall, match="There is no segment 3"):
        rank.segment_delete(3)


def test_gpi2_is_started_again_only_where_it_did_not_start(
    functions: Functions, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(context, "_STARTED", threading.Lock())

    def begin() -> None:
        start(cast(Library, functions), None, None, None, None, 1)

    functions.codes = {"proc_init": [FAILED, TIMEOUT], "proc_rank": [FAILED]}
    for sentence in ("proc_init failed", "did not all come in time", "proc_rank failed"):
        with pytest.raises(GaspiError, match=sentence):
            begin()
    with pytest.raises(InvalidCall, match="can be started once in a process"):
        begin()
    assert functions.called.count("proc_init") == 3
