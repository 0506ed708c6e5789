"""Work that many do at once, and what keeps it in bounds and in order."""

import random
from pathlib import Path

from carme_runtime.petri import Net, Place, Range


def hello() -> Net:
    """Two transitions that only say something."""
    net = Net("hello")
    start, out = net.place("start", str), net.place("out", type(None))
    for name in ("hello", "world"):
        net.add(name, start >> out, lambda word: print(word), guard=lambda word, name=name: word == name)
    return net


def work_and_wait() -> Net:
    """n tasks; one token when all are done."""
    net = Net("work_and_wait")
    start, tasks, left = net.place("start", int), net.place("tasks", int), net.place("left", int)
    done = net.place("done", str)

    @net.transition(start >> tasks + left)
    def begin(n: int):  # type: ignore[no-untyped-def]
        yield left, n
        for i in range(n):
            yield tasks, i

    ended = net.place("ended", int)
    net.add("work", tasks >> ended, lambda i: i)
    net.add("count", ended + left >> left, lambda i, left: left - 1)
    net.add("finish", left >> done, lambda left: "done", guard=lambda left: left == 0)
    return net


def work_with_credit() -> Net:
    """The same with at most as many tasks under way as there are credits."""
    net = Net("work_with_credit")
    start, state, left = net.place("start", int), net.place("state", tuple), net.place("left", int)
    credit, tasks, ended = net.place("credit", int), net.place("tasks", int), net.place("ended", int)
    done = net.place("done", str)
    net.add("begin", start >> state + left, lambda n: ((0, n), n))
    net.add(
        "generate",
        state + credit >> state + tasks,
        lambda s, c: ((s[0] + 1, s[1]), s[0]),
        guard=lambda s, c: s[0] < s[1],
    )
    net.add("work", tasks >> ended, lambda i: i)
    net.add("count", ended + left >> left + credit, lambda i, left: (left - 1, i))
    net.add("finish", left >> done, lambda left: "done", guard=lambda left: left == 0)
    return net


def in_order(file: Path) -> Net:
    """Results are made in any order and written in that of their numbers."""
    net = Net("in_order")
    start, tasks, results = net.place("start", list), net.place("tasks", tuple), net.place("results", tuple)
    position, done = net.place("position", int, tokens=[0]), net.place("done", str)
    end = net.place("end", int)

    @net.transition(start >> tasks + end)
    def begin(sizes: list):  # type: ignore[type-arg, no-untyped-def]
        for number, size in enumerate(sizes):
            yield tasks, (number, size)
        yield end, len(sizes)

    net.add("work", tasks >> results, lambda task: (task[0], bytes([task[0]]) * task[1]))

    @net.transition(position + results >> position, guard=lambda at, result: result[0] == at)
    def write(at: int, result: tuple[int, bytes]) -> int:
        with file.open("ab") as opened:
            opened.write(result[1])
        return at + 1

    net.add("finish", position + end >> done, lambda at, end: "done", guard=lambda at, end: at == end)
    return net


def pi() -> Net:
    """Random points in packets, each with a seed of its own; what falls into the circle is added up."""
    net = Net("pi")
    packets, counts = net.place("packets", tuple), net.place("counts", tuple)
    ratio = net.place("ratio", tuple, tokens=[(0, 0)])
    net.add("throw", packets >> counts, throw)
    net.add("add", counts + ratio >> ratio, lambda new, old: (new[0] + old[0], new[1] + old[1]))
    return net


def throw(packet: tuple[int, int]) -> tuple[int, int]:
    """Points in the circle, and points."""
    seed, points = packet
    chance = random.Random(seed)
    return sum(chance.random() ** 2 + chance.random() ** 2 < 1 for _ in range(points)), points


def mean_of_file(file: Path, size: int) -> Net:
    """Mean and variance of numbers in a file of bytes, read in pieces by many tasks."""
    net = Net("mean_of_file")
    start, pieces, parts = net.place("start", int), net.place("pieces", int), net.place("parts", tuple)
    left, result = net.place("left", tuple), net.place("result", tuple)

    @net.transition(start >> pieces + left)
    def split(length: int):  # type: ignore[no-untyped-def]
        offsets = range(0, length, size)
        yield left, (len(offsets), 0, 0, 0)
        for offset in offsets:
            yield pieces, offset

    @net.transition(pieces >> parts)
    def read(offset: int) -> tuple[int, int, int]:
        with file.open("rb") as opened:
            opened.seek(offset)
            data = opened.read(size)
        return len(data), sum(data), sum(each * each for each in data)

    net.add(
        "add",
        parts + left >> left,
        lambda p, s: (s[0] - 1, s[1] + p[0], s[2] + p[1], s[3] + p[2]),
    )
    net.add(
        "finish",
        left >> result,
        lambda s: (s[2] / s[1], s[3] / s[1] - (s[2] / s[1]) ** 2),
        guard=lambda s: s[0] == 0,
    )
    return net


def shared() -> Net:
    """What two tasks use is cleaned up when both have ended."""
    net = Net("shared")
    words, a, b = net.place("words", str), net.place("a", str), net.place("b", str)
    cleanup, result = net.place("cleanup", str), net.place("result", str)
    net.add("copy", words >> a + b + cleanup, lambda word: (word, word, word))
    net.add("use_a", a >> None, print)
    net.add("use_b", b >> None, print)
    net.add("clean", cleanup + a.empty + b.empty >> result, lambda word: word)
    return net


def template(net: Net, name: str, jobs: Place, done: Place) -> None:
    """A subnet for many uses: works on a job in two steps."""
    part = Net(name)
    first, middle, last = part.place("jobs", int), part.place("middle", int), part.place("done", int)
    part.add("prepare", first >> middle, lambda n: n + 1)
    part.add("finish", middle >> last, lambda n: 10 * n)
    net.include(part, name, jobs=jobs, done=done)


def subnets() -> Net:
    """The same subnet three times over, in a row."""
    net = Net("subnets")
    places = [net.place(f"p{number}", int) for number in range(4)]
    for number in range(3):
        template(net, f"part{number}", places[number], places[number + 1])
    return net


def blocks() -> Net:
    """Blocks of a range are worked on in as many slots as it has room for."""
    net = Net("blocks")
    count, size = net.place("count", int), 8
    memories, slots, blocks_left = (
        net.place("memory", Range),
        net.place("slots", int),
        net.place("left", int),
    )
    ready, worked, done = net.place("ready", tuple), net.place("worked", tuple), net.place("done", int)

    @net.transition(count >> memories + slots + blocks_left)
    def begin(number: int, memory):  # type: ignore[no-untyped-def]
        yield memories, memory.allocate("slots", (3, size))
        for slot in range(3):
            yield slots, slot
        for block in range(number):
            yield blocks_left, block

    net.add("assign", blocks_left + slots >> ready, lambda block, slot: (block, slot))

    @net.transition(ready + memories.read >> worked)
    def work(task: tuple[int, int], range: Range) -> tuple[int, int]:
        block, slot = task
        range.array()[slot] = block
        assert (range.array()[slot] == block).all()
        return task

    net.add("free", worked >> done + slots, lambda task: task)
    return net


def one_to_many() -> Net:
    """One range that many tasks read, each a part, and that goes when all have."""
    net = Net("one_to_many")
    start, whole, parts = net.place("start", int), net.place("whole", Range), net.place("parts", int)
    sums, total, left = net.place("sums", int), net.place("total", int), net.place("left", tuple)

    @net.transition(start >> whole + parts + left)
    def fill(n: int, memory):  # type: ignore[no-untyped-def]
        allocated = memory.allocate("whole", (n, 100), "int64")
        allocated.array()[:] = 1
        yield whole, allocated
        yield left, (n, 0)
        for part in range(n):
            yield parts, part

    net.add(
        "read",
        whole.read + parts >> sums,
        lambda allocated, part: int(allocated.array(write=False)[part].sum()),
    )
    net.add("add", sums + left >> left, lambda value, s: (s[0] - 1, s[1] + value))

    @net.transition(left + whole >> total, guard=lambda s, allocated: s[0] == 0)
    def finish(state: tuple[int, int], allocated: Range, memory) -> int:  # type: ignore[no-untyped-def]
        memory.delete(allocated)
        return state[1]

    return net
