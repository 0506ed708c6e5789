"""Forks workers on a node that is not the coordinator's: `python -m carme_runtime.petri.remote`.

The job's agent starts it. It reads messages of the coordinator from its input and writes its own to its
output:

    ("tasks", slot, batch), ("recall", slot), ("start", slot)
    ("reports", slot, results), ("started", slot, process),
    ("ended", slot, process, status, number of the task), ("flood",), ("refused", message, remedy)
"""

import os
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from carme_runtime.petri.channel import Reader, encode
from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.net import Net
from carme_runtime.petri.pool import Pool
from carme_runtime.petri.scripts import net_of
from carme_runtime.petri.store import Store


def main() -> None:
    """Serve until the coordinator is gone."""
    # What scripts print while they are read must not be taken for messages.
    output = os.dup(1)
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGHUP, lambda *_: os._exit(0))
    folder = Path(sys.argv[1])

    def report(*message: Any) -> None:
        data = memoryview(encode(message))
        while data:
            data = data[os.write(output, data) :]

    try:
        os.chdir(folder.parent)
        net = net_of(folder, Net)
    except (PetriError, OSError) as error:
        sentence = f"On {os.uname().nodename}: {getattr(error, 'message', error)}"
        report("refused", sentence, "Keep the net's script and the run's folder where all nodes have them.")
        return
    count = len(os.sched_getaffinity(0))
    # Tasks that use ranges run on the coordinator's node, so nothing comes to lie here.
    pool = Pool(net, folder, count, [output], Store("", folder, 0, []))
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests, pool), daemon=True).start()
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
            _do(pool, *request)


def _listen(requests: "queue.SimpleQueue[Any]", pool: Pool) -> None:
    reader = Reader()
    while data := os.read(0, 1 << 16):
        for message in reader.feed(data):
            requests.put(message)
        pool.wake()
    requests.put(None)
    pool.wake()


def _do(pool: Pool, kind: str, slot: int, *given: Any) -> None:
    connection = pool.connections.get(slot)
    if kind == "start":
        pool.start(slot)
    elif connection and kind == "tasks":
        connection.send(given[0])
    elif connection and kind == "recall":
        connection.recall()


def _pass_on(pool: Pool, answer: tuple[Any, ...], report: Any) -> None:
    if answer[0] == "started":
        pool.connections[answer[1]].process = answer[2]
    if answer[0] != "ended":
        report(*answer)
        return
    connection = pool.connections.get(answer[1])
    if connection is None or connection.process not in (0, answer[2]):
        return
    if results := pool.last_reports(connection):
        report("reports", connection.slot, results)
    report(*answer, pool.remove(connection))


if __name__ == "__main__":
    main()
