"""Patterns of larger workflows: map and reduce, tiles, a stencil, a result that is good enough, programs."""

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from carme_runtime.petri import Memory, Net, Range


def mapped(function: Callable[[Any], Any]) -> Net:
    """What a function makes of each value, beside the number that the value came with."""
    net = Net("mapped")
    values, results = net.place("values", tuple), net.place("results", tuple)
    net.add("map", values >> results, lambda pair: (pair[0], function(pair[1])))
    return net


def primes() -> Net:
    """Numbers are tested at once; each goes where the test says."""
    net = Net("primes")
    numbers, prime, composite = (net.place(name, int) for name in ("numbers", "prime", "composite"))

    @net.transition(numbers >> prime + composite)
    def test(number: int) -> Iterator[tuple[str, int]]:
        has_divisor = any(number % divisor == 0 for divisor in range(2, math.isqrt(number) + 1))
        yield ("composite" if has_divisor or number < 2 else "prime"), number

    return net


def word_count() -> Net:
    """Map and reduce: the words of each file are counted by itself, and the counts are added as they come."""
    net = Net("word_count")
    files, counts = net.place("files", Path), net.place("counts", Counter)
    total = net.place("total", Counter, tokens=[Counter()])
    net.add("count", files >> counts, lambda file: Counter(file.read_text().split()))
    net.add("add", counts + total >> total, lambda new, old: old + new)
    return net


def choice() -> Net:
    """Of several offers the first that comes is taken; the others are turned down."""
    net = Net("choice")
    offers, open_ = net.place("offers", str), net.place("open", str, tokens=["order"])
    taken, refused = net.place("taken", tuple), net.place("refused", str)
    net.add("take", offers + open_ >> taken, lambda offer, order: (order, offer), priority=1)
    net.add("refuse", offers + open_.empty >> refused, lambda offer: offer)
    return net


def unreliable(failures: int) -> Net:
    """A task that fails so often before it succeeds, and is repeated; it gets the number of its attempt."""
    net = Net("unreliable")
    jobs, done = net.place("jobs", int), net.place("done", tuple)

    @net.transition(jobs >> done, retries=failures)
    def work(job: int, attempt: int) -> tuple[int, int]:
        if attempt <= failures:
            raise RuntimeError("no luck this time")
        return job, attempt

    return net


def sorted_by_programs() -> Net:
    """A program sorts each file, as many at once as there are workers; then all are merged."""
    net = Net("sorted_by_programs")
    unsorted, done = net.place("unsorted", Path), net.place("done", Path)
    ended, merged = net.place("ended", int), net.place("merged", list)
    net.transition("sort -n {unsorted} -o {unsorted}.sorted", unsorted >> done, gives="{unsorted}.sorted")

    @net.transition(ended + 3 * done >> merged)
    def merge(_: int, files: list[Path]) -> list[int]:
        return list(heapq.merge(*(map(int, file.read_text().split()) for file in files)))

    return net


def good_enough(within: float) -> Net:
    """Chance, until the result is good enough: then what is left of the work is dropped."""
    net = Net("good_enough")
    seeds, throws, dropped = net.place("seeds", int), net.place("throws", tuple), net.place("dropped", object)
    sums, result = net.place("sums", tuple, tokens=[(0, 0)]), net.place("result", float)

    @net.transition(seeds + result.empty >> throws)
    def throw(seed: int) -> tuple[int, int]:
        chance = random.Random(seed)
        return sum(chance.random() ** 2 + chance.random() ** 2 < 1 for _ in range(1000)), 1000

    def error(inside: int, points: int) -> float:
        share = inside / points if points else 0.5
        return 4 * math.sqrt(share * (1 - share) / max(points, 1))

    net.add("add", throws + sums >> sums, lambda new, old: (old[0] + new[0], old[1] + new[1]))
    net.add("stop", sums >> result, lambda s: 4 * s[0] / s[1], guard=lambda s: error(*s) < within, priority=1)
    net.add("drop_seed", seeds + result.read >> dropped, lambda seed, _: seed)
    net.add("drop_throw", throws + result.read >> dropped, lambda throw, _: throw)
    return net


def tiles(size: int, edge: int) -> Net:
    """A picture is computed in tiles, which all write into one range: a sphere that is lit from one side."""
    net = Net("tiles")
    start, picture, left = net.place("start", int), net.place("picture", Range), net.place("left", tuple)
    ready, pixels = net.place("ready", tuple), net.place("pixels", list)
    corners = [(x, y) for y in range(0, size, edge) for x in range(0, size, edge)]

    @net.transition(start >> picture + left)
    def begin(_: int, memory: Memory) -> Iterator[tuple[str, Any]]:
        yield "picture", memory.allocate("picture", (size, size), "float64")
        for corner in corners:
            yield "left", corner

    @net.transition(left + picture.read >> ready)
    def render(corner: tuple[int, int], picture: Range) -> tuple[int, int]:
        rows = picture.array()
        for y in range(corner[1], min(corner[1] + edge, size)):
            for x in range(corner[0], min(corner[0] + edge, size)):
                rows[y, x] = light(x, y, size)
        return corner

    @net.transition(len(corners) * ready + picture >> pixels)
    def end(_: list[tuple[int, int]], picture: Range, memory: Memory) -> list[list[float]]:
        found = picture.array().tolist()
        memory.delete(picture)
        return found

    return net


def light(x: int, y: int, size: int) -> float:
    """How bright a pixel of a sphere is."""
    across, down = 2 * (x + 0.5) / size - 1, 2 * (y + 0.5) / size - 1
    depth = 1 - across * across - down * down
    return max(0.0, (math.sqrt(depth) - across - down) / math.sqrt(3)) if depth > 0 else 0.0


def heat(parts: int, steps: int) -> Net:
    """A stencil: parts of a ring of cells are worked on at once, and read their neighbours' edges (halos).

    A step begins when all parts, two at least, have made the one before it.
    """
    net = Net("heat")
    start, field = net.place("start", int), net.place("field", Range)
    ready, stepped, result = net.place("ready", tuple), net.place("stepped", tuple), net.place("result", list)

    @net.transition(start >> field + ready)
    def begin(cells: int, memory: Memory) -> Iterator[tuple[str, Any]]:
        fields = memory.allocate("field", (2, cells), "float64")
        fields.array()[:] = 0
        fields.array()[0, 0] = 1
        yield "field", fields
        for part in range(parts):
            yield "ready", (0, part)

    @net.transition(ready + field.read >> stepped)
    def step(work: tuple[int, int], field: Range) -> tuple[int, int]:
        number, part = work
        old, new = field.array()[number % 2], field.array()[1 - number % 2]
        first, last = part * len(old) // parts, (part + 1) * len(old) // parts
        halo = old.take(range(first - 1, last + 1), mode="wrap")
        new[first:last] = (halo[:-2] + halo[1:-1] + halo[2:]) / 3
        return number + 1, part

    @net.transition(parts * stepped >> ready, guard=lambda done: done[0][0] < steps)
    def begin_step(done: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        yield from done

    @net.transition(parts * stepped + field >> result, guard=lambda done, _: done[0][0] == steps)
    def end(_: list[tuple[int, int]], field: Range, memory: Memory) -> list[float]:
        values = field.array()[steps % 2].tolist()
        memory.delete(field)
        return values

    return net
