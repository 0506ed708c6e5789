"""A run: puts tokens, starts tasks, journals what they gave, and lives through what is killed."""

import contextlib
import math
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from carme_runtime.petri.activation import Activation, Task, Token
from carme_runtime.petri.asking import answer_here
from carme_runtime.petri.control import Door
from carme_runtime.petri.dask import forwarded, is_client
from carme_runtime.petri.definition import Definition
from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.failures import (
    KILLED_RETRIES,
    coordinator_failed,
    count_failure,
    gave_up,
    loaded,
    overdue,
)
from carme_runtime.petri.firings import Firings
from carme_runtime.petri.journal import FIRE, PUT, START, Journal, State, read
from carme_runtime.petri.live import publish
from carme_runtime.petri.memory import Changes, Memory, handed_over
from carme_runtime.petri.model import Place
from carme_runtime.petri.observed import Observed
from carme_runtime.petri.placing import Placing
from carme_runtime.petri.pool import Connection, Pool
from carme_runtime.petri.ranges import Ranges
from carme_runtime.petri.slurm_jobs import SlurmJobs
from carme_runtime.petri.starting import (
    check_units,
    is_job,
    limit_of,
    number_of,
    per_node,
    pickled,
    run_folder,
    still_full,
    still_running,
)
from carme_runtime.petri.worker import DONE, FAILED, RETURNED

#: Workers that may end one after the other without having begun a task.
USELESS_WORKERS = 20
#: What a task is taken to last before one has ended.
_UNKNOWN_SECONDS = 1.0
#: Between two checks of a waiting program whether the coordinator is still there.
_POLL_SECONDS = 5.0


class Run(Observed):
    """A net that runs. Use it with `with`, or `close` it; one that nobody has any more is closed by itself.

    Attributes:
        folder: Where its journal is, for `Net.resume`.
        resumed: Whether it goes on with what an earlier program left.
        notices: What happened that is worth a sentence, such as workers that were killed.
        fired: How often each transition has ended well since this program has the run.
    """

    def __init__(
        self,
        net: Definition,
        workers: Any,
        folder: str | os.PathLike[str] | None,
        units: dict[str, int],
        resume: bool,
        memory: int | str | None = None,
        spill: str | os.PathLike[str] | None = None,
    ) -> None:
        self.net = net
        self._count = number_of(workers)
        self._job, self._per_node = is_job(workers), per_node(workers)
        self._worked = forwarded(net, workers) if is_client(workers) else net
        self._slurm = workers if isinstance(workers, SlurmJobs) else None
        check_units(net, units)
        limit = limit_of(memory)
        self._units = units
        self._placing = Placing(units)
        self.folder = run_folder(net, folder, resume)
        self._header = {
            "net": net.name,
            "origin": net.origin,
            "places": list(net.places),
            "node": socket.gethostname(),
        }
        if net.origin[0] == "__main__":  # tokens of a run that `carme net` has started name it like this
            sys.modules.setdefault("__carme_main__", sys.modules["__main__"])
        initial = [(place.index, pickled(place, t)) for place in net.places.values() for t in place.tokens]
        spills = [] if spill is None else [Path(spill).absolute()]
        self._journal = Journal(self.folder, self._header, initial, spills)
        self.resumed = self._journal.resumed
        self.notices: list[str] = []
        self.fired = dict.fromkeys(net.transitions, 0)
        self._firings = Firings()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._error: PetriError | None = None
        self._rest = self._closing = self._closed = False
        self._exhausted = False
        self._broken_off = False  # by an exception of the program
        self._watchers = 0  # who waits for more than rest: waking them for each step has its cost
        self._useless = 0
        self._seconds: dict[int, float] = {}
        self._pictures = []
        try:
            uses = any(rule.uses_ranges for rule in Activation(net, {}).rules)
            self._ranges = Ranges(self._journal, limit, has_peers=self._job and uses)
        except BaseException:
            self._journal.close()
            raise
        self._start_workers()
        self._placing.begin(self._activation, self._pool.members)
        self.notices += filter(None, [self._pool.notice])
        self._door = Door(self, self._ranges.store.identity)
        self._begin()
        self._pictures += filter(None, [publish(self)])

    def _begin(self) -> None:
        self._program = os.getpid()
        self._left: list[Run] = []  # itself, when nobody has it any more
        self._thread = threading.Thread(
            target=_coordinate,
            args=(weakref.ref(self), self._pool, self._left),
            name=f"carme-petri-{self.net.name}",
            daemon=True,
        )
        self._thread.start()

    def __del__(self) -> None:
        # In whichever thread this is, at whatever moment: the coordinator has the time to close the run.
        if "_thread" in vars(self) and not self._closed and self._program == os.getpid():
            self._left.append(self)
            self._pool.wake()

    def _start_workers(self) -> None:
        try:
            if self._slurm:
                self._worked = self._slurm.forwarded(self.net, self.folder)
                self.notices += self._slurm.cancel_left(self.folder)
            has_peers = self._ranges.store.has_peers
            if has_peers or any(transition.wants_memory for transition in self.net.transitions.values()):
                self._ranges.begin()
            lost = self._ranges.lost
            self._restore(self._journal.state)
            self._journal.state = State()
            closed = self._journal.descriptors()
            own = {"has_peers": has_peers, "workers": self._per_node}
            settings = self._ranges.settings | own if self._job else None
            self._pool = Pool(self._worked, self.folder, self._count, closed, self._ranges.store, settings)
            if has_peers:
                hosts = [member.host for member in self._pool.members.values()]
                lost = lost + self._ranges.share(hosts, self._pool.host, self._pool.notify, self._lock)
                self._ranges.of_program(self._commit_changes)  # which finds the ranges of tokens
            self._note_lost(lost, "this node")
        except BaseException:
            with contextlib.ExitStack() as last:
                last.callback(self._journal.close)
                last.callback(self._ranges.close, self._journal, ended=False)
                if "_pool" in vars(self):
                    last.callback(self._pool.close)
            raise

    def put(self, place: Place | str, *tokens: Any, timeout: float | None = None) -> None:
        """Put tokens into a place, at any time; waits for room where the place has a capacity.

        When it returns, the death of this program cannot undo it; `sync` makes that true of the machine's.
        Ranges in tokens, however deep, are the tasks' from there on: this program's are closed.

        Raises:
            PetriError: A token is of another type or cannot be pickled, there is no room and nothing runs
                that would make some, or the run has failed.
        """
        found = self.place(place)
        for token in tokens:
            if refusal := found.refusal(token):
                raise PetriError(refusal, "Put tokens of the place's type.")
        with handed_over():
            data = [pickled(found, token) for token in tokens]
        with self._changed:
            if found.capacity is None:
                self._put(found, data)
                return
            for each in data:
                self._wait_for(lambda: self._activation.has_room(found.index), timeout, watch=True)
                if not self._activation.has_room(found.index):
                    raise still_full(found)
                self._put(found, [each])

    def take(self, place: Place | str, timeout: float | None = None) -> list[Any]:
        """Take tokens out of the net while it runs: all that a place has, as soon as it has some.

        They are this program's from there on: the run does not know them any more, also when it is resumed.
        What tasks have at that moment stays the net's.

        Returns:
            The tokens; none where nothing can start and nothing runs that would bring some.

        Raises:
            PetriError: As for `wait`, or a token cannot be read here: all stay in the net.
        """
        found = self.place(place)
        with self._changed:
            self._wait_for(lambda: self._activation.holds(found.index), timeout, watch=True)
            taken = loaded(found, self._activation.free(found.index))  # before they leave the net
            if tokens := self._activation.take(found.index):
                self._write([(FIRE, [token.number for token in tokens], [])])
                self._rest = False  # something may have waited for room
                self._pool.wake()
        return taken

    def wait(self, timeout: float | None = None) -> dict[str, list[Any]]:
        """Wait until nothing can start and nothing runs, and all is on the disk: the marking then.

        Raises:
            PetriError: A task failed for good, the journal cannot be written, or `timeout` seconds passed.
        """
        with self._changed:
            self._wait_for(lambda: self._rest, timeout)
            self._journal.sync()
            return self.marking()

    def follow(self, seconds: float = 1.0, show: Callable[[str], Any] = print) -> dict[str, list[Any]]:
        """As `wait`, with a line about the run whenever it has changed, at most every `seconds`."""
        last, reported = "", 0
        while True:
            with self._changed:
                resting = self._changed.wait_for(lambda: self._rest or self._error is not None, seconds)
                line, notices = self._line(), self.notices[reported:]
            reported += len(notices)
            for text in (*notices, *([line] if line != last else [])):
                show(text)
            last = line
            if resting:
                return self.wait()

    def sync(self) -> None:
        """Return when all that has happened until now is on the disk."""
        self._journal.sync()

    def close(self) -> None:
        """End the workers. What has not ended runs again when the run is resumed."""
        with self._changed:
            if self._closed:
                return
            self._closing = self._closed = True
            self._changed.notify_all()
        self._door.close()
        self._pool.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for picture in self._pictures:
            picture.end()
        ended = self._ranges.discarded or (not self._broken_off and self._has_ended())
        with contextlib.ExitStack() as last:  # all of it, whatever fails
            last.callback(self._journal.close)
            last.callback(lambda: self.notices.extend(self._ranges.close(self._journal, ended)))
            if self._slurm:  # when nobody waits for them any more
                last.callback(lambda slurm: self.notices.extend(slurm.cancel_left(self.folder)), self._slurm)
            last.callback(self._pool.close)
            if ended and self._ranges.store.has_peers:
                self.notices += self._ranges.finish_elsewhere(lambda: self._pool.wait(1.0)[1])

    def discard(self) -> None:
        """Nobody is to resume the run: when it is closed, no node's memory has anything of it any more."""
        self._ranges.discarded, self._journal.commits = True, False

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        self._broken_off = kind is not None
        self.close()

    def _has_ended(self) -> bool:
        """Whether nothing could start any more when the workers had ended."""
        try:
            return self._error is None and not self._activation.running and self._activation.next() is None
        except PetriError:  # of a guard
            return False

    @property
    def memory(self) -> Memory:
        """The ranges of the run, for this program. Raises PetriError when the run is over."""
        with self._lock:
            self._refuse_if_over()
            return self._ranges.of_program(self._commit_changes)

    def _note_lost(self, names: list[str], where: str) -> None:
        self.notices += [f"Range {name} was lost with the memory of {where}." for name in names]

    def _commit_changes(self, changes: Changes) -> None:
        with self._lock:
            self._refuse_if_over()
            if changes[0] or changes[1]:
                entries: list[Any] = []
                self._ranges.take(self._ranges.store.node, changes, entries)
                self._write(entries)
                self._ranges.settle()

    def _put(self, place: Place, data: list[bytes]) -> None:
        self._refuse_if_over()
        self._write([(PUT, place.index, each) for each in data])
        for each in data:
            self._activation.add(place.index, self._token(each))
        self._rest = False
        self._pool.wake()

    def _wait_for(self, condition: Callable[[], bool], timeout: float | None, watch: bool = False) -> None:
        """Wait until it holds, or the run is over; `watch`: look after each step, and end when it rests."""

        def over() -> bool:
            return condition() or (watch and self._rest) or self._closing or self._error is not None

        end = math.inf if timeout is None else time.monotonic() + timeout
        self._watchers += watch
        while not (came := over()) and (left := end - time.monotonic()) > 0:
            if self._thread.is_alive():
                self._changed.wait(min(left, _POLL_SECONDS))
            else:
                self._fail(coordinator_failed("its thread has ended"))
        self._watchers -= watch
        if not came:
            raise still_running(self, timeout)
        self._refuse_if_over()

    # What follows runs in the coordinator's thread, with the lock.

    def _take_turn(self, reports: list[tuple[Connection, list[Any]]], answers: list[tuple[Any, ...]]) -> bool:
        """Take what has come, and start what can: whether the run goes on."""
        with self._changed:
            if self._closing:
                return False
            try:
                self._turn(reports, answers)
            except PetriError as error:
                self._fail(error)
            return True

    def _turn(self, reports: list[tuple[Connection, list[Any]]], answers: list[tuple[Any, ...]]) -> None:
        entries: list[Any] = []
        now = time.monotonic()
        for connection, results in reports:
            connection.reported = now
            connection.stuck = connection.stuck and any(result[1] == RETURNED for result in results)
            self._take_results(connection, results, entries)
        for answer in answers:
            self._take_answer(answer, entries)
        entries += self._ranges.take_entries()
        batches: list[tuple[Connection, list[Any]]] = []
        if self._error is None:
            try:
                batches = self._choose(entries)
            except PetriError as error:  # of a guard; what has ended is written nevertheless
                self._fail(error)
        if entries:
            self._write(entries)
            self._ranges.settle()
        for connection, batch in batches:
            connection.reported = now
            connection.send(batch)
        self._pool.recall(now)
        rest = self._error is None and self._exhausted and not self._activation.running
        if rest != self._rest or self._watchers:
            self._rest = rest
            self._changed.notify_all()

    def _choose(self, entries: list[Any]) -> list[tuple[Connection, list[Any]]]:
        """Start tasks, in turn among the workers that accept some."""
        accepting = [each for each in self._pool.connections.values() if each.process and each.accepts()]
        accepting.sort(key=lambda each: (each.load, -each.reported))
        batches: dict[Connection, list[Any]] = {}
        start = self._activation.next
        self._exhausted = False  # as long as no worker could have taken a task
        idle: set[Connection] = set()
        while accepting:
            for connection in accepting:
                if self._job:
                    awaited = self._ranges.are_awaited
                    task = start(self._placing.unfit(self._activation, connection.node, awaited))
                else:
                    task, awaited = start(), False
                if task is None:
                    # Every task could run here if only this node were free.
                    self._exhausted = self._exhausted or (connection.node is None and not awaited)
                    if not self._job:
                        return list(batches.items())
                    idle.add(connection)
                    continue
                if self._job:
                    connection = self._placing.nearest(task, connection, accepting, self._ranges)
                self._placing.reserve(connection, task)
                seconds = self._seconds.get(task.rule.index, _UNKNOWN_SECONDS)
                connection.assigned[task.number] = (task, seconds)
                connection.load += seconds
                message = (task.number, task.rule.index, task.attempt, [t.data for t in task.tokens])
                batches.setdefault(connection, []).append(message)
                if task.taken:
                    entries.append((START, [token.number for token in task.taken]))
            accepting = [each for each in accepting if each not in idle and each.accepts()]
        return list(batches.items())

    def _take_results(self, connection: Connection, results: list[Any], entries: list[Any]) -> None:
        if results:
            self._useless, connection.useful = 0, True
        for number, status, outcome, seconds, ended, following, changes, batch in results:
            task = connection.take(number)
            if task is None:
                continue
            self._placing.reserve(connection, task, 1)
            if status == RETURNED:
                self._activation.give_back(task, begun=False)
                continue
            rule = task.rule
            mean = self._seconds.get(rule.index)
            self._seconds[rule.index] = seconds if mean is None else 0.9 * mean + 0.1 * seconds
            if status == DONE and changes and not self._is_good(connection, task, changes):
                continue
            if status == DONE:
                entries.append((FIRE, [token.number for token in task.taken], outcome))
                if changes is not None:
                    self._ranges.take(self._placing.hosts[connection.node], changes, entries)
                tokens = [(place, self._token(data)) for place, data in outcome]
                self._activation.finish(task, tokens if following < 0 else [])
                if following >= 0:  # the worker goes on with it by itself, under the same number
                    entries.append((START, [tokens[0][1].number]))
                    task = self._activation.follow(self._activation.rules[following], tokens[0][1])
                    connection.assigned[number] = (task, 0.0)
                self.fired[rule.transition.name] += 1
                name, host = rule.transition.name, self._placing.hosts[connection.node]
                self._firings.add(connection, host, name, (ended - seconds, ended), batch)
            else:
                self._take_failure(task, status, *outcome)

    def _is_good(self, connection: Connection, task: Task, changes: Changes) -> bool:
        """Whether what a task has changed can count; if not, it has failed, or runs again."""
        host = self._placing.hosts[connection.node]
        kind, _, name = self._ranges.refusal(host, changes).partition(" ")
        if not kind:
            return True
        self._ranges.give_back(task.number)
        self._ranges.drop(host, changes)
        if kind == "changed":  # by a task on another node, which has ended before
            self._activation.give_back(task)
            return False
        sentence = f"Transition {task.rule.transition.name} failed: there is a range {name} already."
        self._take_failure(task, FAILED, sentence, "")
        return False

    def _take_failure(self, task: Task, status: int, sentence: str, trace: str) -> None:
        transition = task.rule.transition
        self._activation.give_back(task)
        failures = count_failure(task)
        if status == FAILED and failures <= transition.retries:
            return
        self._give_up(sentence, trace)

    def _give_up(self, sentence: str, trace: str) -> None:
        remedy = f"Its tokens are unchanged. Fix it and resume the run in {self.folder}."
        self._fail(PetriError(sentence, f"{remedy}\n{trace}" if trace else remedy))

    def _take_answer(self, answer: tuple[Any, ...], entries: list[Any]) -> None:
        if answer[0] == "flood":
            self.notices.append(f"Workers print a lot: {self.folder / 'output.log'} takes no more of it.")
            return
        if answer[0] == "refused":
            raise PetriError(*answer[1:])
        if answer[0] == "lost":
            self._placing.lose(self._activation, answer[1])
            self.notices.append(f"Node {answer[2]} was lost; its tasks run again on the others.")
            self._note_lost(self._ranges.take_message("lost", answer[2]), answer[2])
            return
        if answer[0] in ("held", "ask", "pulled", "gone"):
            self._note_lost(self._ranges.take_message(*answer), answer[1])
            return
        connection = self._pool.connections.get(answer[1])
        if connection is None:
            return
        if answer[0] == "started":
            connection.process = answer[2]
            return
        if answer[0] == "overdue":
            connection.overdue = answer[3] if connection.process == answer[2] else 0
            return
        if connection.process not in (0, answer[2]):  # of one before it in this slot
            return
        self._take_results(connection, connection.last_reports(), entries)
        number = self._pool.remove(connection)
        useful = connection.useful or number in connection.assigned
        self._take_death(connection, number, answer[3])
        if answer[0] == "ended":
            self._useless = 0 if useful else self._useless + 1
        if self._useless > USELESS_WORKERS:
            raise PetriError(
                "Workers end as soon as they start.", f"See {self.folder / 'output.log'}, and resume."
            )
        self._pool.start(connection.slot)

    def _take_death(self, connection: Connection, number: int, status: int) -> None:
        """A worker has ended: its tasks run again. Only the one that it was at may be why."""
        ending = f"signal {status & 127}" if status & 127 else f"code {status >> 8}"
        begun = number in connection.assigned
        for assigned_number, (task, _) in list(connection.assigned.items()):
            self._ranges.give_back(assigned_number)
            self._placing.reserve(connection, task, 1)
            if not begun:
                self._activation.give_back(task, begun=False)
                continue
            self._activation.give_back(task)
            if assigned_number != number:
                continue
            begun = False
            if connection.overdue:
                self._take_overdue(task, connection.overdue == number)
                continue
            transition = task.rule.transition
            self.notices.append(
                f"The worker of transition {transition.name} was ended by {ending}; the task runs again."
            )
            if count_failure(task) > max(transition.retries, KILLED_RETRIES):
                self._fail(gave_up(task, ending, self.folder))

    def _take_overdue(self, task: Task, itself: bool) -> None:
        """A worker was ended at a task: `itself` took longer than its limit, or the one ahead of it."""
        if not itself:
            return
        failures, transition = count_failure(task), task.rule.transition
        if failures > transition.retries:
            self._give_up(overdue(task), "")
        else:
            self.notices.append(f"{overdue(task)} It was ended; the task runs again.")

    def _write(self, entries: list[Any]) -> None:
        """Journal entries that the marking has already; if that fails, the marking is the journal's again."""
        try:
            self._journal.write(entries)
        except PetriError as error:
            self._fail(error)
            with contextlib.suppress(PetriError):
                state = read(self.folder / "journal", self._header)
                self._ranges.restore(state.ranges, state.homes)
                self._restore(state)
                self._placing.begin(self._activation, self._pool.members)
            for connection in self._pool.connections.values():
                connection.assigned.clear()
            raise

    def _restore(self, state: State) -> None:
        self._activation = Activation(self.net, self._units)
        self._number = state.next_number
        for place, token in state.tokens.values():
            self._activation.add(place, token)

    def _token(self, data: bytes) -> Token:
        token = Token(self._number, data)
        self._number += 1
        return token

    def _fail(self, error: PetriError) -> None:
        if self._error is None:
            self._error = error
        self._rest = False
        self._changed.notify_all()


def _coordinate(reference: "weakref.ref[Run]", pool: Pool, left: list[Run]) -> None:
    """What the coordinator's thread does until the run is closed; it closes one that nobody has any more."""
    answer_here()  # what nodes ask of ranges
    try:
        while not left:
            run = reference()
            seconds = pool.patience() if run else 0.0
            del run  # the thread alone does not keep it
            found = pool.wait(seconds)
            run = reference()
            if run and not run._take_turn(*found):
                return
            del run
    except Exception as error:  # of ours, or of a system without memory: reported, so that no run hangs
        if run := reference():
            with run._changed:
                run._fail(coordinator_failed(f"{type(error).__name__}: {error}"))
        raise
    left.pop().close()
