"""Kills and stops ranks inside every collective at random points, and prints a table of how that ended.

    ./test native -- -k kills --kills 500

`./test native` does this once for each kind of collective and signal. Each attempt forks ranks that repeat
one collective; one of them gets SIGKILL or SIGSTOP. All others must then raise PeerLost or Timeout, form a
group without the lost rank, compute in it, and leave with none of the core's memory, descriptors or threads.
Ends with 1 if an attempt did not, and says with which arguments it is repeated.
"""

# Ranks are forked and end with _exit: what they share with the parent is never used again.
# pyright: reportOptionalMemberAccess=false

import argparse
import contextlib
import ctypes
import gc
import json
import os
import random
import select
import signal
import socket
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from carme_runtime import gaspi
from carme_runtime.collectives import Group
from carme_runtime.gaspi.joining import join

KINDS = (
    "barrier", "allreduce of little", "allreduce", "allreduce in a segment", "planned allreduce", "broadcast",
    "reduce_scatter", "allgather", "alltoall", "messages", "forming a group",
)  # fmt: skip
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
LAYOUTS = ([0, 0], [0, 0, 0], [0, 1], [0, 1, 2], [0, 0, 1, 1])  # nodes by rank
COUNTS = (3, 1000, 20_000, 100_000, 1_000_000)
# Milliseconds that a collective has. A killed rank is noticed long before, a stopped one by nothing else.
LIMITS = {signal.SIGKILL: 30_000, signal.SIGSTOP: 1500}
AFTERWARDS = 30_000  # milliseconds for all that survivors do together
HANGS = 60.0  # seconds after which a survivor without output counts as hanging
LATEST = 0.04  # seconds after the first collective at which the signal comes
PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Attempt:
    """What is tried; the same for the same seed and number."""

    number: int
    kind: str
    how: signal.Signals
    nodes: list[int]
    victim: int
    count: int
    background: bool
    delay: float

    @classmethod
    def of(cls, seed: int, number: int) -> "Attempt":
        chance = random.Random(f"{seed} {number}")
        nodes = chance.choice(LAYOUTS)
        return cls(
            number,
            KINDS[number % len(KINDS)],
            SIGNALS[number // len(KINDS) % 2],
            nodes,
            chance.randrange(len(nodes)),
            chance.choice(COUNTS),
            chance.random() < 0.5,
            chance.uniform(0, LATEST),
        )

    def __str__(self) -> str:
        where = f"rank {self.victim} of nodes {self.nodes}"
        how = f"{self.count} elements, {'in the background' if self.background else 'waiting'}"
        return f"attempt {self.number}: {self.kind} ({how}), {self.how.name} to {where}"


@dataclass
class Outcome:
    """How one kind of collective took one kind of signal."""

    times: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    longest: float = 0.0
    went_on: int = 0
    leaks: int = 0
    faults: int = 0


# A rank


def run_rank(attempt: Attempt, rank: int, channel: socket.socket) -> None:
    """Until an error; then on with the survivors."""
    stream = channel.makefile("rw")

    def notify(**content: Any) -> None:
        stream.write(json.dumps(content) + "\n")
        stream.flush()

    def exchange(entry: dict[str, Any]) -> list[dict[str, Any]]:
        notify(entry=entry)
        return json.loads(stream.readline())

    before = resources()
    context = join(
        rank, len(attempt.nodes), exchange, b"k" * 32, f"127.0.0.{attempt.nodes[rank] + 1}", "127.0.0.1", 60
    )
    happened = repeat(attempt, context, notify)
    notify(**happened)
    alive = json.loads(stream.readline())
    computed = together(context, alive)
    context.close()
    del context
    gc.collect()
    notify(computed=computed, left=sorted(resources() - before))


def resources() -> set[str]:
    """Memory, descriptors and threads of this process, as far as the core may have made them."""
    maps = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    found = {f"memory of {name}" for name in maps if name.startswith("/memfd:")}
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):  # that of the listing itself
            name = os.readlink(f"/proc/self/fd/{entry}")  # noqa: PTH115
            if name.startswith(("/memfd:", "socket:", "anon_inode:")):
                found.add(f"descriptor {entry} of {name}")
    return found | {f"thread {task}" for task in os.listdir("/proc/self/task")}  # noqa: PTH208


def repeat(attempt: Attempt, context: Any, send: Callable[..., None]) -> dict[str, Any]:
    """The collective again and again; what it raised, and when."""
    limit = LIMITS[attempt.how]
    try:
        once = collective(attempt, context, limit)
        once()
        send(ready=True)
        while True:
            once()
    except (gaspi.PeerLost, gaspi.Timeout) as error:
        return {"error": type(error).__name__, "message": str(error), "at": time.monotonic()}
    except BaseException:
        return {"error": "another", "message": traceback.format_exc(), "at": time.monotonic()}


def collective(attempt: Attempt, context: Any, limit: int) -> Callable[[], Any]:
    """What one rank does again and again."""
    size, count, kind = len(attempt.nodes), attempt.count, attempt.kind
    group = Group(context, list(range(size)), AFTERWARDS)
    full, part = np.ones(count * size, np.float32), np.ones(count, np.float32)
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "barrier": (group.barrier, ()),
        "allreduce of little": (group.allreduce, (np.ones(min(count, 4000), np.float32),)),
        "allreduce": (group.allreduce, (part,)),
        "broadcast": (group.broadcast, (part, attempt.number % size)),
        "reduce_scatter": (group.reduce_scatter, (part, full)),
        "allgather": (group.allgather, (full, part)),
        "alltoall": (group.alltoall, (full, np.ones_like(full))),
    }
    if kind == "allreduce in a segment":
        context.segment_alloc(0, part.nbytes)
        calls[kind] = group.allreduce, (context.segment_array(0).view(np.float32),)
    if kind in calls:
        method, arguments = calls[kind]
        if attempt.background:
            return lambda: method(*arguments, timeout=limit, asynchronous=True).wait()
        return lambda: method(*arguments, timeout=limit)
    if kind == "planned allreduce":
        plan = group.plan_allreduce(part, "sum", limit)
        return (lambda: plan.start().wait()) if attempt.background else plan.run
    if kind == "forming a group":
        return lambda: Group(context, list(range(size)), limit)
    rooms = {member: np.empty_like(part) for member in range(size) if member != group.index}

    def messages() -> None:
        pending = [group.send(part, member) for member in rooms]
        pending += [group.receive(room, member) for member, room in rooms.items()]
        end = time.monotonic() + limit / 1000
        while pending := [message for message in pending if not message.wait(5)]:
            if time.monotonic() > end:
                raise gaspi.Timeout("A message did not come.", "")

    return messages


def together(context: Any, alive: list[int]) -> bool:
    """Whether the survivors can compute in a group of their own."""
    end = time.monotonic() + AFTERWARDS / 1000
    while sum(context.state_vector()) != context.size - len(alive) and time.monotonic() < end:
        time.sleep(0.005)
    survivors = Group(context, alive, AFTERWARDS)
    ranks = np.full(50_000, context.rank, np.int64)
    survivors.allreduce(ranks, timeout=AFTERWARDS)
    survivors.barrier(timeout=AFTERWARDS)
    return bool((ranks == sum(alive)).all()) and survivors.size == len(alive)


# The one who kills


class Rank:
    """A rank as its parent knows it."""

    def __init__(self, attempt: Attempt, number: int, rest: list["Rank"]) -> None:
        own_end, peer_end = socket.socketpair()
        self.number = number
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            own_end.close()
            for peer in rest:
                peer.channel.close()
            try:
                run_rank(attempt, number, peer_end)
            except BaseException:
                with contextlib.suppress(OSError):
                    peer_end.sendall(json.dumps({"failed": traceback.format_exc()}).encode() + b"\n")
                os._exit(1)
            os._exit(0)
        peer_end.close()
        self.channel = own_end
        self.received = b""
        self.status: int | None = None

    def hear(self, end: float) -> dict[str, Any]:
        """What it says next; why it says nothing."""
        while b"\n" not in self.received:
            if not select.select([self.channel], [], [], max(end - time.monotonic(), 0))[0]:
                return {"hangs": True}
            data = self.channel.recv(65536)
            if not data:
                return {"ended": self.reap(end)}
            self.received += data
        line, _, self.received = self.received.partition(b"\n")
        return json.loads(line)

    def send(self, content: Any) -> None:
        with contextlib.suppress(OSError):
            self.channel.sendall(json.dumps(content).encode() + b"\n")

    def reap(self, end: float) -> int | None:
        """Its wait status; None when it has not ended."""
        while self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = status
            elif time.monotonic() > end:
                return None
            else:
                time.sleep(0.002)
        return self.status

    def kill(self) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.reap(float("inf"))
        self.channel.close()


def carry_out(attempt: Attempt, outcome: Outcome) -> list[str]:
    """Try it; what went wrong."""
    ranks: list[Rank] = []
    for number in range(len(attempt.nodes)):
        ranks.append(Rank(attempt, number, ranks))
    try:
        return watch(attempt, ranks, outcome)
    finally:
        for rank in ranks:
            rank.kill()


def watch(attempt: Attempt, ranks: list[Rank], outcome: Outcome) -> list[str]:
    end = time.monotonic() + 2 * HANGS
    entries = [rank.hear(end) for rank in ranks]
    if any("entry" not in entry for entry in entries):
        return [f"did not join: {entries}"]
    for rank in ranks:
        rank.send([entry["entry"] for entry in entries])
    ready = [rank.hear(end) for rank in ranks]
    if any("ready" not in answer for answer in ready):
        return [f"did not begin: {ready}"]
    victim = ranks[attempt.victim]
    survivors = [rank for rank in ranks if rank is not victim]
    time.sleep(attempt.delay)
    hit = time.monotonic()
    os.kill(victim.pid, attempt.how)
    end = time.monotonic() + HANGS
    wrong: list[str] = []
    for rank in survivors:
        message = rank.hear(end)
        outcome.errors[message.get("error", "hang" if "hangs" in message else "crash")] += 1
        if message.get("error") not in ("PeerLost", "Timeout"):
            wrong.append(f"rank {rank.number}: {message.get('message', message)}")
            continue
        outcome.longest = max(outcome.longest, message["at"] - hit)
        if attempt.how == signal.SIGKILL and not (
            message["error"] == "PeerLost" and f"ank {attempt.victim} was lost" in message["message"]
        ):
            wrong.append(f"rank {rank.number} did not say that rank {attempt.victim} was lost: {message}")
    os.kill(victim.pid, signal.SIGKILL)
    victim.reap(float("inf"))
    if wrong:
        return wrong
    for rank in survivors:
        rank.send([rank.number for rank in survivors])
    for rank in survivors:
        message = rank.hear(end)
        outcome.went_on += bool(message.get("computed"))
        outcome.leaks += len(message.get("left", []))
        if not message.get("computed") or message.get("left") or rank.reap(end) != 0:
            wrong.append(f"rank {rank.number} afterwards: {message.get('failed', message)}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=2 * len(KINDS), help="how often in all")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(10**6), help="default: another each time"
    )
    parser.add_argument("--only", type=int, help="the number of one attempt that is repeated as often")
    options = parser.parse_args()
    # A process that a rank would leave behind becomes a child of this process.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    shared = set(Path("/dev/shm").glob("*carme*"))
    outcomes: dict[tuple[str, signal.Signals], Outcome] = defaultdict(Outcome)
    failed = 0
    for number in range(options.times):
        attempt = Attempt.of(options.seed, options.only if options.only is not None else number)
        outcome = outcomes[attempt.kind, attempt.how]
        outcome.times += 1
        wrong = carry_out(attempt, outcome)
        if wrong:
            failed += 1
            outcome.faults += 1
            print(f"{attempt}\n  " + "\n  ".join(wrong))
            print(
                f"  again: {sys.argv[0]} --seed {options.seed} --only {attempt.number} --times 20", flush=True
            )
    with contextlib.suppress(ChildProcessError):
        print(f"A process was left behind: {os.waitpid(-1, os.WNOHANG)}")
        failed += 1
    if left := left_behind(shared):
        print(f"Shared memory was left behind: {left}")
        failed += 1
    report(outcomes)
    print(f"{options.times} attempts with seed {options.seed}: {failed} failed.")
    return int(failed > 0)


def left_behind(before: set[Path]) -> set[Path]:
    """Shared memory that nobody uses and that was not there before.

    Ranks of other runs may begin and end meanwhile: what they have made may not be mapped yet.
    """
    until = time.monotonic() + HANGS
    while True:
        new = set(Path("/dev/shm").glob("*carme*")) - before
        left = {file for file in new if not is_used(file) and file.exists()}
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.1)


def is_used(file: Path) -> bool:
    """Whether a process maps this file."""
    names = {str(file), f"{file} (deleted)"}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended
            lines = (line.split(maxsplit=5) for line in maps.read_text().splitlines())
            if any(fields[-1] in names for fields in lines):
                return True
    return False


def report(outcomes: dict[tuple[str, signal.Signals], Outcome]) -> None:
    """The table. `went on`: survivors that computed in a new group; `leaks`: what they did not give back."""
    line = "{:24}{:9}{:>6}{:>10}{:>9}{:>7}{:>7}{:>9}{:>7}{:>12}"
    heads = ("collective", "signal", "times", "PeerLost", "Timeout", "other", "hang", "went on", "leaks")
    print(line.format(*heads, "longest ms"))
    for kind in KINDS:
        for how in SIGNALS:
            if (kind, how) not in outcomes:
                continue
            found = outcomes[kind, how]
            peer = found.errors["another"] + found.errors["crash"]
            print(
                line.format(
                    kind, how.name, found.times, found.errors["PeerLost"], found.errors["Timeout"], peer,
                    found.errors["hang"], found.went_on, found.leaks, f"{1000 * found.longest:.0f}",
                )
            )  # fmt: skip


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.exit(main())
