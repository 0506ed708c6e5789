"""Forks workers on a node that is not the coordinator's, and has that node's ranges.

The job's agent starts it: `python -m carme_runtime.petri.remote FOLDER`. It reads messages of the coordinator
from its input and writes its own to its output:

    ("begin", 0, settings), ("tasks", slot, batch), ("recall", slot), ("start", slot)
    ("reports", slot, results), ("started", slot, process), ("overdue", slot, process, number of the task),
    ("ended", slot, process, status, number of the task), ("flood",), ("refused", message, remedy)

and of ranges (see `holders` and `serving`):

    ("held", address, descriptions)            -> ("keep", 0, names): the others go
    ("ask", number, kind, name)                -> ("answer", 0, number, answer)
    ("pull", 0, name, copy, source)            -> ("pulled", name, copy, well)
    ("drop", 0, names), ("clean", 0, names, task): what the task has made and is not among them goes
    ("finish", 0, names): these go to the disk -> ("finished", sentences)
"""

import itertools
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from carme_runtime import __version__
from carme_runtime.out_of_core.sizes import show_size
from carme_runtime.petri import forks
from carme_runtime.petri.channel import Reader, encode
from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.net import Net
from carme_runtime.petri.pool import Pool
from carme_runtime.petri.ranges import lasting
from carme_runtime.petri.scripts import net_of
from carme_runtime.petri.serving import RangeServer
from carme_runtime.petri.store import Store, sweep

Report = Callable[..., None]


def main() -> None:
    """Serve until the coordinator is gone."""
    # What scripts print while they are read must not be taken for messages.
    output = os.dup(1)
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGHUP, lambda *_: os._exit(0))
    folder = Path(sys.argv[1])
    lock = threading.Lock()

    def report(*message: Any) -> None:
        data = memoryview(encode(message))
        with lock:
            while data:
                data = data[os.write(output, data) :]

    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    listener = _Listener(requests)
    listener.start()
    first = requests.get()
    if first is None:
        return
    try:
        _refuse_other_versions(first[2].get("version", "another"))
        os.chdir(folder.parent)
        net = net_of(folder, Net)
        ranges = _Ranges(folder, first[2], report)
    except (PetriError, OSError) as error:
        sentence = f"On {os.uname().nodename}: {getattr(error, 'message', error)}"
        usual = "Keep the net's script and the run's folder where all nodes have them."
        report("refused", sentence, getattr(error, "remedy", "") or usual)
        return
    count = first[2]["workers"] or len(os.sched_getaffinity(0))
    pool = Pool(net, folder, count, [output], ranges.store)
    listener.wake = pool.wake
    try:
        ranges.serve()
    except PetriError as error:
        pool.close()
        report("refused", error.message, error.remedy)
        return
    while True:
        reports, answers = pool.wait(1.0)
        for connection, results in reports:
            report("reports", connection.slot, results)
        for answer in answers:
            _pass_on(pool, answer, report)
        while not requests.empty():
            request = requests.get()
            if request is None:
                pool.close()
                return
            _do(pool, ranges, *request)


def _refuse_other_versions(version: str) -> None:
    """Messages and tokens are understood between equal versions alone. Raises PetriError."""
    if version != __version__:
        raise PetriError(
            f"carme_runtime is {__version__} here, and {version} where the net was started.",
            "Install the same version on all nodes, or the package in a folder that all nodes see.",
        )


class _Listener(threading.Thread):
    """Reads what the coordinator sends."""

    def __init__(self, requests: "queue.SimpleQueue[Any]") -> None:
        super().__init__(daemon=True)
        self._requests = requests
        self.wake: Callable[[], None] = lambda: None

    def run(self) -> None:
        """Read to the end."""
        reader = Reader()
        while data := os.read(0, 1 << 16):
            for message in reader.feed(data):
                self._requests.put(message)
            self.wake()
        self._requests.put(None)
        self.wake()


class _Ranges:
    """The ranges of this node."""

    def __init__(self, folder: Path, settings: dict[str, Any], report: Report) -> None:
        spills = [Path(each) for each in settings["spills"]]
        self.store = Store(settings["identity"], folder, settings["limit"], spills, settings["node"])
        self._settings, self._report = settings, report
        self._numbers = itertools.count()
        self._questions: dict[int, Callable[[Any], None]] = {}
        self._server: RangeServer | None = None
        self.store.has_peers = settings["has_peers"]
        if self.store.has_peers:
            sweep(self.store.identity, lasting)
            self.store.begin()
            forks.open_descriptors.add(self.store.alive)

    def serve(self) -> None:
        """Begin, where the net uses ranges."""
        if self.store.has_peers:
            address, secret = self._settings["address"], self._settings["secret"]
            self._server = RangeServer(self.store, address, secret, self._ask)
            self._report("held", self._server.where, self.store.descriptions())

    def do(self, kind: str, *arguments: Any) -> None:
        """What the coordinator wants of them."""
        if kind == "answer":
            number, answer = arguments
            self._questions.pop(number)(answer)
        elif kind == "drop":
            for name in arguments[0]:
                self.store.remove(name)
        elif kind == "keep":
            self.store.clean(set(arguments[0]))
        elif kind == "clean":
            self.store.clean(set(arguments[0]), arguments[1])
        elif kind == "pull":
            threading.Thread(target=self._pull, args=arguments, daemon=True).start()

    def finish(self, names: list[str]) -> None:
        """The net has ended: what is to last goes to the disk, all else goes."""
        if self._server is None:
            self._report("finished", [])
            return
        self._server.close()
        descriptions, trouble = self.store.descriptions(), []
        self.store.clean(set(names))
        for name in names:
            try:
                self.store.move_to_disk(name)
            except OSError as error:
                size = show_size(descriptions[name].size)
                trouble.append(
                    f"Range {name} of {size} stays in the memory of {self.store.node} until the run is "
                    f"resumed: {error.strerror}."
                )
        if not trouble:
            self.store.end()
        self._report("finished", trouble)

    def _ask(self, kind: str, name: str, reply: Callable[[Any], None]) -> None:
        number = next(self._numbers)
        self._questions[number] = reply
        self._report("ask", number, kind, name)

    def _pull(self, name: str, copy: int, source: tuple[str, int]) -> None:
        assert self._server is not None
        try:
            well = self._server.pull(name, copy, source)
        except PetriError:  # no room
            well = False
        self._report("pulled", name, copy, well)


def _do(pool: Pool, ranges: _Ranges, kind: str, slot: int, *arguments: Any) -> None:
    connection = pool.connections.get(slot)
    if kind == "start":
        pool.start(slot)
    elif kind == "tasks":
        if connection:
            connection.send(arguments[0])
    elif kind == "recall":
        if connection:
            connection.recall()
    elif kind == "finish":
        pool.close()
        ranges.finish(arguments[0])
        threading.Event().wait()  # until the coordinator ends this program
    else:
        ranges.do(kind, *arguments)


def _pass_on(pool: Pool, answer: tuple[Any, ...], report: Report) -> None:
    if answer[0] == "started":
        pool.connections[answer[1]].process = answer[2]
    if answer[0] != "ended":
        report(*answer)
        return
    connection = pool.connections.get(answer[1])
    if connection is None or connection.process not in (0, answer[2]):
        return
    if results := connection.last_reports():
        report("reports", connection.slot, results)
    report(*answer, pool.remove(connection))


if __name__ == "__main__":
    main()
