"""Where the ranks are, when a call waits for long: their Python stacks, printed by one of them.

A thread of each rank looks at the other threads' stacks now and then. One that finds a call waiting
longer than CARME_HANG_SECONDS asks all ranks, by messages of their first group, to report where they are.
"""

import atexit
import os
import struct
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from carme_runtime import activity, collectives
from carme_runtime.collectives import Group, Pending
from carme_runtime.collectives.errors import GaspiError, InvalidCall

_DEFAULT = 300.0
_LONGEST_PAUSE = 5.0  # seconds between two looks
_PAUSES_TO_ANSWER = 2
_ANSWER_SECONDS = 3.0
_DEEPEST = 30  # lines of a stack that are shown
# The innermost Python frame of a thread that waits for other ranks is in one of these,
_MESSAGES = str(Path(collectives.__file__).parent / "mailboxes.py")
_ONE_SIDED = str(Path(__file__).parent / "gaspi" / "process.py")
_WAITING_IN = (str(Path(collectives.__file__).parent) + os.sep, _ONE_SIDED)
# but where GPI-2 carries the data: that waits in Python.
_GPI2 = str(Path(__file__).parent / "gaspi" / "gpi2") + os.sep
_QUESTION_TAG, _ANSWER_TAG = 2**32 - 2, 2**32 - 3
_QUESTION = struct.Struct("<Q")  # its number
_ANSWER = struct.Struct("<Q?I")  # the question's number, whether who answers asks as well, bytes that follow
_LONGEST_ANSWER = 64 * 1024


def limit(environment: Mapping[str, str] = os.environ) -> float:
    """Seconds after which a wait is reported, from CARME_HANG_SECONDS; 0: never. Raises InvalidCall."""
    text = environment.get("CARME_HANG_SECONDS", "")
    try:
        seconds = float(text) if text else _DEFAULT
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise InvalidCall(f"CARME_HANG_SECONDS is '{text}'.", "Give a number of seconds, or 0 for no report.")
    return seconds


def watch(owner: Any, group: Group, seconds: float, waiting_in: tuple[str, ...] = ()) -> "Watch | None":
    """A `Watch`, where there is somebody to wait for and `seconds` are not 0."""
    return Watch(owner, group, seconds, waiting_in) if seconds and group.size > 1 else None


class Watch:
    """The thread that looks.

    Args:
        owner: Whose life it shares.
        group: All ranks of the run. Each member that others query watches, too.
        seconds: See `limit`.
        waiting_in: Further folders of Python files, with a separator at the end: the innermost frame of a
            thread that waits for other ranks may be in one of them, too.
    """

    def __init__(self, owner: Any, group: Group, seconds: float, waiting_in: tuple[str, ...] = ()) -> None:
        self._talk = _Talk(group)
        self._ranks, self._member = group.ranks, group.index
        self._seconds = seconds
        self._waiting_in = (*_WAITING_IN, *waiting_in)
        self._pause = min(seconds / 4, _LONGEST_PAUSE)
        # Frames that were seen waiting, and since when. While they are held no other has their place.
        self._waiting: dict[int, tuple[FrameType, float, bool]] = {}
        self._stopped = stopped = threading.Event()
        self._until = weakref.ref(owner, lambda _: stopped.set())
        self._thread = threading.Thread(target=self._work, name="carme-hangs", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        atexit.unregister(self.stop)

    def _work(self) -> None:
        try:
            while not self._stopped.wait(self._pause):
                waiting = self._check_threads()
                requested = self._answer(asking=False)
                if waiting and not requested:  # else another one was the first to ask
                    self._report(waiting)
        finally:
            del self._talk  # the group goes with its owner
            self._waiting.clear()
            atexit.unregister(self.stop)

    def _check_threads(self) -> str:
        """What has waited for too long, unless that was reported already."""
        now, before, self._waiting = time.monotonic(), self._waiting, {}
        found = ""
        for thread, innermost in sys._current_frames().items():
            frame = _outside_gpi2(innermost)
            if not frame.f_code.co_filename.startswith(self._waiting_in) or thread == threading.get_ident():
                continue
            seen, since, reported = before.get(thread, (None, now, False))
            if seen is not frame:
                since, reported = now, False
            if not reported and now - since >= self._seconds:
                reported = True
                found = _named(frame)
            self._waiting[thread] = (frame, since, reported)
        return found

    def _answer(self, asking: bool) -> list[int]:
        """Answer members that ask where this one is; return who they are."""
        questions = list(self._talk.questions())
        if questions:
            where = self._stacks()
            for member, number in questions:
                self._talk.answer(member, number, asking, where)
            # What waits now is in their report.
            self._waiting = {thread: (frame, at, True) for thread, (frame, at, _) in self._waiting.items()}
        return [member for member, _ in questions]

    def _stacks(self) -> str:
        """The stacks of the main thread, and of others that wait."""
        parts = []
        main = threading.main_thread().ident
        for thread, frame in sys._current_frames().items():
            waits = thread in self._waiting
            if thread != main and not waits:
                continue
            verb = "waits" if waits else "runs"
            lines = traceback.format_stack(frame)[-_DEEPEST:]
            name = "" if thread == main else ", in a further thread"
            place = activity.of_thread(thread)
            name += f" in {place}" if place else ""
            parts.append((thread != main, f"{verb}{name}:\n{''.join(lines)}".rstrip()))
        return "\n".join(text for _, text in sorted(parts))

    def _report(self, operation: str) -> None:
        number = self._talk.ask()
        end = time.monotonic() + _PAUSES_TO_ANSWER * self._pause + _ANSWER_SECONDS
        places = {self._stacks(): [self._member]}
        missing = set(range(len(self._ranks))) - {self._member}
        while missing and time.monotonic() < end and not self._stopped.wait(self._pause / 10):
            # Of several who ask at a time the first member reports.
            if any(member < self._member for member in self._answer(asking=True)):
                return
            for member, asking, where in self._talk.answers(number):
                if asking and member < self._member:
                    return
                places.setdefault(where, []).append(member)
                missing.discard(member)
        text = [f"carme: {operation} has waited for {self._seconds:g} s. Where the ranks are:"]
        text += [f"{self._each(members)} {place}" for place, members in places.items()]
        if missing:
            text.append(
                f"{self._each(list(missing))} did not answer: ended, was stopped, or is in a program part "
                "that holds up Python."
            )
        print("\n".join(text), file=sys.stderr, flush=True)

    def _each(self, members: list[int]) -> str:
        ranks = sorted(self._ranks[member] for member in members)
        return f"Rank {ranks[0]}" if len(ranks) == 1 else f"Each of ranks {', '.join(map(str, ranks))}"


class _Talk:
    """Questions to all other members of a group, and their answers."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._peers = [member for member in range(group.size) if member != group.index]
        self._question_count = 0
        # What is under way. A letter that is given up leaves those that follow it without an addressee.
        self._sent: list[Pending] = []
        self._questions = {member: self._expect(member, _QUESTION_TAG, _QUESTION) for member in self._peers}
        self._answers: dict[int, tuple[bytearray, Pending]] = {}
        self._owed = dict.fromkeys(self._peers, 0)

    def ask(self) -> int:
        """Ask all others where they are; the number of the question."""
        self._question_count += 1
        for member in self._peers:
            self._send(member, _QUESTION_TAG, bytearray(_QUESTION.pack(self._question_count)))
            self._owed[member] += 1
            if member not in self._answers:
                self._answers[member] = self._expect(member, _ANSWER_TAG, _ANSWER, _LONGEST_ANSWER)
        return self._question_count

    def answer(self, member: int, number: int, asking: bool, where: str) -> None:
        """Answer question `number` of `member`."""
        text = where.encode(errors="replace")[:_LONGEST_ANSWER]
        reported = _ANSWER.pack(number, asking, len(text)) + text
        self._send(member, _ANSWER_TAG, bytearray(reported.ljust(_ANSWER.size + _LONGEST_ANSWER, b"\0")))

    def questions(self) -> Iterator[tuple[int, int]]:
        """The ranks that have sent queries since the last time, and the numbers of these."""
        for member, reported in self._arrived(self._questions):
            self._questions[member] = self._expect(member, _QUESTION_TAG, _QUESTION)
            yield member, _QUESTION.unpack(reported)[0]

    def answers(self, number: int) -> Iterator[tuple[int, bool, str]]:
        """Who has answered question `number`, whether that one asks as well, and where it is."""
        for member, reported in self._arrived(self._answers):
            self._owed[member] -= 1
            if self._owed[member]:
                self._answers[member] = self._expect(member, _ANSWER_TAG, _ANSWER, _LONGEST_ANSWER)
            answered, asking, size = _ANSWER.unpack_from(reported)
            if answered == number:  # else it comes too late
                text = reported[_ANSWER.size : _ANSWER.size + size]
                yield member, asking, text.decode(errors="replace")

    def _arrived(self, expected: dict[int, tuple[bytearray, Pending]]) -> Iterator[tuple[int, bytearray]]:
        """What has come, which is no longer expected. Of members that are lost nothing is."""
        for member, (room, pending) in list(expected.items()):
            if not pending.done():
                continue
            del expected[member]
            try:
                pending.wait(0)
            except GaspiError:
                continue
            yield member, room

    def _expect(self, member: int, tag: int, head: struct.Struct, more: int = 0) -> tuple[bytearray, Pending]:
        room = bytearray(head.size + more)
        return room, self._group.receive(room, member, tag)

    def _send(self, member: int, tag: int, content: bytearray) -> None:
        self._sent = [pending for pending in self._sent if not pending.done()]
        self._sent.append(self._group.send(content, member, tag))


def _outside_gpi2(frame: FrameType) -> FrameType:
    """The innermost frame of a thread, or the one that called what waits for GPI-2."""
    outer: FrameType | None = frame
    while outer and outer.f_code.co_filename == threading.__file__:
        outer = outer.f_back
    if not outer or not outer.f_code.co_filename.startswith(_GPI2):
        return frame
    while outer and outer.f_code.co_filename.startswith(_GPI2):
        outer = outer.f_back
    return outer or frame


def _named(frame: FrameType) -> str:
    """What waits, for people."""
    if frame.f_code.co_filename == _MESSAGES:
        return "A stage of a pipeline"
    one_sided = frame.f_code.co_filename == _ONE_SIDED
    return f"A call of {frame.f_code.co_name}" if one_sided else "A collective"
