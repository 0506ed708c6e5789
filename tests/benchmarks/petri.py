"""What a task of a Petri net costs that does nothing, and to hand 1 GB on, against Dask, Parsl and Ray.

    ./test bench petri --quick
    ./test bench petri --json result.json

Two worker processes each, and a process of its own for each contestant and round, which take turns so that
what else the machine does hits them alike. Each is warmed up before it is timed. `independent` are tasks
that can all run at once, timed from the first one handed over until all results are there; `chain` are tasks
that each wait for the one before. `handover_1GB` is the time from the end of a task that has filled
1 GB to the moment at which the next task has read its first and last element: ours hands on the name of a
range in shared memory, Dask sends the array to another worker process, Ray copies it into its store; Parsl is
not measured with it, as it sends arrays through the main program. Ours journals every task to the disk; the
others keep none. Contestants that are not installed are left out. Medians are reported; the rows *_cpu_us are
the processor time of all processes per task, which depends less on what else the machine does. The rows
*_on_dask_us are those of a net whose tasks Dask places, as it may over nodes that are not of one job.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from report import print_table, row, tidy_up_when_ended, write_json

WORKERS = 2
AIMS = {"independent": 60.0, "chain": 100.0}
#: Bytes that are handed over, how often, and the most milliseconds: no copy of them is that quick.
GIGABYTE, HANDOVERS, MOST_MS = 10**9, 3, 20.0
#: Of the better peer.
RATIO = 10.0
#: By contestant, as some take far longer: independent tasks and links of a chain.
SIZES = {
    "ours": (20_000, 2_000),
    "ours on dask": (1_000, 100),
    "dask": (2_000, 200),
    "parsl": (2_000, 200),
    "ray": (2_000, 200),
}
NEEDS = {"ours on dask": "distributed", "dask": "distributed", "parsl": "parsl", "ray": "ray"}
LIMIT_SECONDS = 600


def increase(value: int) -> int:
    """The task."""
    return value + 1


def handed_over(run_pair: Callable[[], float]) -> float:
    """Milliseconds of a handover, after one that warms up."""
    run_pair()
    return statistics.median(run_pair() for _ in range(HANDOVERS)) * 1e3


def ends_of(array: Any) -> int:
    """Read the first and the last element."""
    return int(array[0]) + int(array[-1])


def seconds(work: Callable[[], Any]) -> tuple[float, float]:
    """How long it takes, and the processor time of this process meanwhile."""
    began, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - used


def processor(processes: list[int]) -> float:
    """Seconds of processor time that processes have used."""
    ticks = 0
    for process in processes:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def carme(tasks: int, links: int) -> dict[str, float]:
    """Tasks of nets with workers here, and a range that is handed over."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        return nets(WORKERS, tasks, links, Path(folder)) | {
            "handover": our_handover(Path(folder, "handover"))
        }


def ours_on_dask(tasks: int, links: int) -> dict[str, float]:
    """Tasks of the same nets; Dask places each of them."""
    with dask_cluster() as client, tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        return nets(client, tasks, links, Path(folder))


def nets(workers: Any, tasks: int, links: int, folder: Path) -> dict[str, float]:
    """A net with one transition, and one that is a circle, in which a token makes so many steps."""
    from carme_runtime.petri import Net

    flat = Net("independent")
    jobs, done = flat.place("jobs", int), flat.place("done", int)
    flat.add("increase", jobs >> done, increase)
    length = 20
    chain = Net("chain")
    places = [chain.place(f"p{number}", int, entry=not number) for number in range(length)]
    end = chain.place("end", int)
    for number, place in enumerate(places):
        after = places[(number + 1) % length]
        chain.add(f"t{number}", place >> after, increase, guard=(lambda x: x < links) if not number else None)
    chain.add("finish", places[0] >> end, guard=lambda x: x >= links)
    found = {}
    for name, net, place, values, count in (
        ("independent", flat, jobs, range(tasks), tasks),
        ("chain", chain, places[0], [0], links),
    ):
        with net.start(workers, folder=folder / name, checked=False) as run:
            run.put(place, *(range(200) if name == "independent" else [links - length]))
            run.wait()
            before = processor(run.workers)
            wall, own = seconds(
                lambda run=run, place=place, values=values: (run.put(place, *values), run.wait())
            )
            found[name] = wall / count * 1e6
            found[f"{name}_cpu"] = (own + processor(run.workers) - before) / count * 1e6
    return found


def our_handover(folder: Path) -> float:
    """A range that one task fills and another one, in another process, reads and deletes."""
    from carme_runtime.petri import Net, Range

    net = Net("handover")
    start, arrays, begun = net.place("start", int), net.place("arrays", Range), net.place("begun", tuple)
    times = net.place("times", float)

    def fill(number: int, memory: Any) -> Any:
        array = memory.allocate(f"array-{number}", GIGABYTE)
        array.array()[:] = 1
        return array, (os.getpid(), time.monotonic())

    def read(array: Any, before: tuple[int, float], memory: Any) -> float:
        assert ends_of(array.array()) == 2
        taken = time.monotonic() - before[1]
        memory.delete(array)
        return taken

    net.add("fill", start >> arrays + begun, fill)
    net.add("read", arrays + begun >> times, read)
    with net.start(WORKERS, folder=folder, memory="3GB") as run:

        def pair() -> float:
            done = len(run.marking()["times"])
            run.put(start, done)
            return run.wait()["times"][done]

        return handed_over(pair)


@contextlib.contextmanager
def dask_cluster() -> Iterator[Any]:
    """A client of Dask's distributed with processes on this machine."""
    from distributed import Client, LocalCluster

    options: dict[str, Any] = {"threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with LocalCluster(n_workers=WORKERS, **options) as cluster, Client(cluster) as client:
        yield client


def dask(tasks: int, links: int) -> dict[str, float]:
    """Dask's distributed with processes on this machine."""
    with dask_cluster() as client:

        def independent(count: int) -> None:
            client.gather(client.map(increase, range(count), pure=False))

        def chain(count: int) -> None:
            value = client.submit(increase, 0, pure=False)
            for _ in range(count - 1):
                value = client.submit(increase, value, pure=False)
            value.result()

        first, second = client.scheduler_info()["workers"]

        def pair() -> float:
            array = client.submit(fill_array, pure=False, workers=[first])
            return client.submit(read_array, array, pure=False, workers=[second]).result()

        return timed(independent, chain, tasks, links) | {"handover": handed_over(pair)}


def fill_array() -> tuple[Any, float]:
    """An array, and when it was filled."""
    import numpy as np

    array = np.ones(GIGABYTE, np.uint8)
    return array, time.monotonic()


def read_array(given: tuple[Any, float]) -> float:
    """The seconds from there to here."""
    assert ends_of(given[0]) == 2
    return time.monotonic() - given[1]


def parsl(tasks: int, links: int) -> dict[str, float]:
    """Parsl with its high-throughput executor on this machine."""
    import parsl as library
    from parsl.config import Config
    from parsl.executors import HighThroughputExecutor
    from parsl.providers import LocalProvider

    with tempfile.TemporaryDirectory() as folder:
        executor = HighThroughputExecutor(
            label="here",
            address="127.0.0.1",
            max_workers_per_node=WORKERS,
            provider=LocalProvider(init_blocks=1, max_blocks=1),
        )
        library.load(Config(executors=[executor], run_dir=folder, usage_tracking=0))
        app = library.python_app(increase)

        def independent(count: int) -> None:
            for each in [app(value) for value in range(count)]:
                each.result()

        def chain(count: int) -> None:
            value = app(0)
            for _ in range(count - 1):
                value = app(value)
            value.result()

        try:
            return timed(independent, chain, tasks, links)
        finally:
            library.dfk().cleanup()
            library.clear()


def ray(tasks: int, links: int) -> dict[str, float]:
    """Ray on this machine."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray as library

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        library.init(
            num_cpus=WORKERS,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=3 * GIGABYTE,
            _temp_dir=folder,
        )
        task, fill, read = map(library.remote, (increase, fill_array, read_array))

        def independent(count: int) -> None:
            library.get([task.remote(value) for value in range(count)])

        def chain(count: int) -> None:
            value = task.remote(0)
            for _ in range(count - 1):
                value = task.remote(value)
            library.get(value)

        try:
            found = timed(independent, chain, tasks, links)
            return found | {"handover": handed_over(lambda: library.get(read.remote(fill.remote())))}
        finally:
            library.shutdown()


def timed(
    independent: Callable[[int], None], chain: Callable[[int], None], tasks: int, links: int
) -> dict[str, float]:
    """Microseconds per task, after a round that warms up."""
    independent(100)
    chain(10)
    return {
        "independent": seconds(lambda: independent(tasks))[0] / tasks * 1e6,
        "chain": seconds(lambda: chain(links))[0] / links * 1e6,
    }


CONTESTANTS = {"ours": carme, "ours on dask": ours_on_dask, "dask": dask, "parsl": parsl, "ray": ray}


def measure(name: str, quick: bool) -> dict[str, float]:
    """One contestant in a process of its own."""
    tasks, links = (max(100, size // 5) if quick else size for size in SIZES[name])
    command = [sys.executable, __file__, "--contestant", name, str(tasks), str(links)]
    # Parsl starts programs that lie beside this Python.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=LIMIT_SECONDS,
        env={**os.environ, "PATH": path},
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure, print the table, write the JSON."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="fewer tasks and rounds")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the report here, too")
    options.add_argument("--contestant", nargs=3, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.contestant:
        name, tasks, links = chosen.contestant
        print(json.dumps(CONTESTANTS[name](int(tasks), int(links))))
        return
    tidy_up_when_ended()
    there = [name for name in CONTESTANTS if name not in NEEDS or importlib.util.find_spec(NEEDS[name])]
    for name in CONTESTANTS.keys() - set(there):
        print(f"petri: {name} is not installed and is left out.", file=sys.stderr)
    rounds = [{name: measure(name, chosen.quick) for name in there} for _ in range(3 if chosen.quick else 7)]
    rows = report(rounds)
    print_table(rows)
    if chosen.json:
        write_json(chosen.json, rows, rounds=rounds, workers=WORKERS)


def report(rounds: list[dict[str, dict[str, float]]]) -> list[dict[str, Any]]:
    """The rows: medians of the rounds."""
    rows = []
    placed = [each["ours on dask"] for each in rounds if "ours on dask" in each]
    rounds = [{name: found for name, found in each.items() if name != "ours on dask"} for each in rounds]
    for kind, aim in AIMS.items():
        middle = {name: statistics.median(each[name][kind] for each in rounds) for name in rounds[0]}
        measured = middle.pop("ours")
        best = min(middle.values(), default=None)
        words = f"at most {aim:.0f} us" + (f", and {RATIO:.0f}x the better peer" if best else "")
        holds = measured <= aim and (best is None or best >= RATIO * measured)
        rows.append(row(f"task_us_{kind}", "us", measured, peers=middle, aim=words, holds=holds))
    middle = {
        name: statistics.median(each[name]["handover"] for each in rounds)
        for name in rounds[0]
        if "handover" in rounds[0][name]
    }
    measured = middle.pop("ours")
    words = f"no copy: at most {MOST_MS:.0f} ms"
    rows.append(row("handover_1GB_ms", "ms", measured, peers=middle, aim=words, holds=measured <= MOST_MS))
    for kind in AIMS:
        used = statistics.median(each["ours"][f"{kind}_cpu"] for each in rounds)
        rows.append(row(f"{kind}_cpu_us", "us", used))
    for kind in AIMS if placed else ():
        rows.append(row(f"{kind}_on_dask_us", "us", statistics.median(each[kind] for each in placed)))
    return rows


if __name__ == "__main__":
    main()
