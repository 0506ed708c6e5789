"""What a worker process does: run bodies, in batches, and report what they gave."""

import contextlib
import mmap
import pickle
import select
import socket
import struct
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from carme_runtime.petri.activation import followers
from carme_runtime.petri.channel import Reader, encode
from carme_runtime.petri.definition import Definition
from carme_runtime.petri.memory import Memory, guarding
from carme_runtime.petri.model import Place, Transition, group

#: How a task ended.
DONE, FAILED, WRONG, RETURNED = range(4)
#: Results wait for others at most so long, and not for a task that takes longer.
BATCH_SECONDS = 0.001
LONG_SECONDS = 0.0003

#: For so long a worker without tasks has the ranges of its last one mapped: the next may want the same.
IDLE_MILLISECONDS = 20

#: Steps of a chain that a worker makes before it looks for other tasks.
MOST_AHEAD = 256

#: In a worker's slot: the number of its task, and by the monotonic clock when that is over its limit, or 0.
#: In native layout each is written at once, so that who reads it meanwhile gets no half of it.
SLOT = struct.Struct("@Qd")


#: Characters of what a failed body says that the run's error shows: of its message, and of its traceback.
_LONGEST_MESSAGE, _LONGEST_TRACE = 2000, 20_000


class OutputError(Exception):
    """What a body gave cannot be tokens."""


class Worker:
    """One worker.

    Args:
        net: The net.
        tasks: Brings batches of tasks and takes results.
        control: Each byte asks for the tasks that have not begun, and for results that wait.
        slots: Shared with the coordinator, which sees there what a killed worker was at.
        slot: This worker's part of them.
        memory: The ranges of the run.
    """

    def __init__(
        self,
        net: Definition,
        tasks: socket.socket,
        control: socket.socket,
        slots: mmap.mmap,
        slot: int,
        memory: Memory,
    ) -> None:
        self._memory = memory
        self._plans = [_Plan(transition, memory, net.number_of) for transition in net.transitions.values()]
        self._followers = followers(net)
        self._tasks, self._control = tasks, control
        self._slots, self._offset = slots, slot * SLOT.size
        self._pending: deque[Any] = deque()
        self._results: deque[Any] = deque()
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._reader = Reader()

    def run(self) -> None:
        """Work until the coordinator is gone."""
        threading.Thread(target=self._serve_control, daemon=True).start()
        pending, clock = self._pending, time.perf_counter
        flushed = clock()
        idle = select.poll()
        idle.register(self._tasks, select.POLLIN)
        while True:
            if not pending:
                self._flush()
                flushed = clock()
                if self._memory.stale and not idle.poll(IDLE_MILLISECONDS):
                    self._memory.unmap()
                with self._receiving:
                    if not self._receive(0):
                        return
            try:
                number, index, attempt, tokens = pending.popleft()
            except IndexError:  # requested back
                continue
            for step in range(MOST_AHEAD):
                last = step == MOST_AHEAD - 1
                index, tokens, ended = self._run_task(number, index, attempt, tokens, last)
                if ended - flushed > BATCH_SECONDS:
                    self._flush()
                    flushed = ended
                if index < 0:
                    break

    def _run_task(
        self, number: int, index: int, attempt: int, tokens: list[bytes], last: bool
    ) -> tuple[int, list[bytes], float]:
        """Run a task: the transition to go on with at once, or -1, with its token, and the time."""
        plan, memory = self._plans[index], self._memory
        if self._results and (plan.seconds > LONG_SECONDS or plan.limit):
            self._flush()
        deadline = time.monotonic() + plan.limit if plan.limit else 0.0
        SLOT.pack_into(self._slots, self._offset, number, deadline)
        memory.task = number
        began = time.perf_counter()
        status, outcome = plan.execute(tokens, attempt)
        if deadline:
            SLOT.pack_into(self._slots, self._offset, number, 0.0)
        changes = memory.finish(status == DONE) if memory.used else None
        ended = time.perf_counter()
        plan.seconds = 0.7 * plan.seconds + 0.3 * (ended - began) if plan.known else ended - began
        plan.known = True
        following = -1
        # A task that has failed before runs alone, so that it is seen which one ends workers.
        if (
            status == DONE
            and changes is None
            and attempt == 1
            and not plan.limit
            and len(outcome) == 1
            and not last
            and not self._pending
        ):
            following = self._following(*outcome[0])
        report = (number, status, outcome, ended - began, ended, following, changes, plan.number)
        self._results.append(report)
        return following, [outcome[0][1]] if following >= 0 else [], ended

    def _following(self, place: int, token: bytes) -> int:
        """The transition to go on with, with a token of a place; -1 where the coordinator has to choose."""
        takers = self._followers.get(place)
        if not takers:
            return -1
        if takers[0].guard:
            try:
                value = pickle.loads(token)
                with guarding():
                    takers = [each for each in takers if each.guard(value)]  # type: ignore[misc]
            except Exception:  # the coordinator sees the same, and says it
                return -1
        if len(takers) != 1:
            return -1
        plan = self._plans[takers[0].index]
        # What has not run here yet may be quick; what it waits for is sent before it begins.
        return -1 if plan.known and plan.seconds > LONG_SECONDS else takers[0].index

    def _receive(self, flags: int) -> bool:
        data = self._tasks.recv(1 << 18, flags)
        for batch in self._reader.feed(data):
            self._pending.extend(batch)
        return bool(data)

    def _flush(self) -> None:
        with self._sending:
            results = []
            with contextlib.suppress(IndexError):
                while True:
                    results.append(self._results.popleft())
            if results:
                self._tasks.sendall(encode(results))

    def _serve_control(self) -> None:
        with contextlib.suppress(OSError):
            while self._control.recv(1):
                # Unless the main thread reads: then there is nothing to give back.
                if self._receiving.acquire(blocking=False):
                    try:
                        while self._receive(socket.MSG_DONTWAIT):
                            pass
                    except BlockingIOError:
                        pass
                    finally:
                        self._receiving.release()
                with contextlib.suppress(IndexError):
                    while True:
                        number = self._pending.pop()[0]
                        self._results.append((number, RETURNED, None, 0.0, 0.0, -1, None, 0))
                self._flush()


class _Plan:
    """A transition as a worker runs it.

    Args:
        transition: The transition.
        memory: The ranges of the run.
        number_of: Gives a token's micro-batch; None: tokens have none.
    """

    def __init__(
        self, transition: Transition, memory: Memory, number_of: Callable[[Any], int] | None
    ) -> None:
        self._number_of = number_of
        #: 1 + the micro-batch of a token that the last run gave; 0: none is known.
        self.number = 0
        self.name = transition.name
        self.limit = transition.limit
        self.body = transition.body
        self.arguments = transition.flow.arguments
        self.flat = all(arc.weight == 1 for arc in self.arguments)
        self.outputs = [(arc.place, arc.weight) for arc in transition.flow.outputs]
        self.alone = self.outputs[0][0] if len(self.outputs) == 1 and self.outputs[0][1] == 1 else None
        self.generates = transition.generates
        self.wants_attempt = transition.wants_attempt
        self.more = {"memory": memory} if transition.wants_memory else {}
        self.seconds = float("inf")
        self.known = False

    def execute(self, tokens: list[bytes], attempt: int) -> tuple[int, Any]:
        """Run the body: how it ended, and the tokens that it gave or what went wrong."""
        self.number = 0
        try:
            values = [pickle.loads(token) for token in tokens]
            arguments = values if self.flat else group(self.arguments, values)
        except Exception as error:
            return WRONG, (
                f"A token for transition {self.name} cannot be read here: {_message_of(error)}.",
                "",
            )
        try:
            if self.body is None:
                return DONE, [
                    (p.index, pickle.dumps(None)) for p, weight in self.outputs for _ in range(weight)
                ]
            more = self.more
            if self.wants_attempt:
                more = {**more, "attempt": attempt}
            result = self.body(*arguments, **more)
            if self.generates:
                return DONE, [self._token(*self._named(each)) for each in result]
            if self.alone is not None:
                return DONE, [self._token(self.alone, result)]
            return DONE, [self._token(place, value) for place, value in self._outputs_of(result)]
        except OutputError as error:
            return WRONG, (str(error), "")
        except BaseException as error:
            trace = traceback.format_exc()
            if len(trace) > _LONGEST_TRACE:
                trace = f"...\n{trace[-_LONGEST_TRACE:]}"
            return FAILED, (f"Transition {self.name} failed: {_message_of(error)}.", trace)

    def _token(self, place: Place, value: Any) -> tuple[int, bytes]:
        if place.type is not object and (refusal := place.refusal(value)):
            raise OutputError(f"Transition {self.name} gave a wrong token: {refusal}")
        if self._number_of and not self.number:
            with contextlib.suppress(Exception):  # a trace without it is still one
                self.number = int(self._number_of(value)) + 1
        try:
            return place.index, pickle.dumps(value, 5)
        except Exception as error:
            kind = type(value).__name__
            raise OutputError(
                f"Transition {self.name} gave place {place.name} a {kind} that cannot be pickled: "
                f"{_message_of(error)}."
            ) from None

    def _outputs_of(self, result: Any) -> list[tuple[Place, Any]]:
        """What a function returned, by places: an entry for each output, a list for a weight above 1."""
        if not self.outputs:
            return []
        entries = (result,) if len(self.outputs) == 1 else result
        found = []
        if isinstance(entries, tuple | list) and len(entries) == len(self.outputs):
            for (place, weight), entry in zip(self.outputs, entries, strict=True):
                if weight == 1:
                    found.append((place, entry))
                elif isinstance(entry, tuple | list) and len(entry) == weight:
                    found.extend((place, value) for value in entry)
                else:
                    raise OutputError(
                        f"Transition {self.name} must give place {place.name} a list of {weight} tokens, "
                        f"and gave {type(entry).__name__}."
                    )
            return found
        raise OutputError(
            f"Transition {self.name} must return a tuple of {len(self.outputs)} tokens, one for each output, "
            f"and returned {type(result).__name__}."
        )

    def _named(self, item: Any) -> tuple[Place, Any]:
        """Where a token of a generator goes."""
        if len(self.outputs) == 1:
            return self.outputs[0][0], item
        if isinstance(item, tuple) and len(item) == 2:
            for place, _ in self.outputs:
                if item[0] is place or item[0] == place.name:
                    return place, item[1]
        names = ", ".join(place.name for place, _ in self.outputs) or "none"
        raise OutputError(
            f"Generator {self.name} must yield (place, token), with a place of its outputs ({names})."
        )


def _message_of(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if len(text) > _LONGEST_MESSAGE:
        text = f"{text[:_LONGEST_MESSAGE]} ... ({len(text)} characters)"
    return text.rstrip(".")
