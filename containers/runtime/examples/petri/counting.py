"""Arcs that give the number of tokens of a place, with those of tasks that run."""

from pathlib import Path

from carme_runtime.petri import Net


def even_numbers() -> Net:
    """Adds the even ones of 2n numbers, while there are more than n."""
    net = Net("even_numbers")
    start, threshold, state = net.place("start", int), net.place("threshold", int), net.place("state", int)
    numbers, total = net.place("numbers", int), net.place("total", tuple, tokens=[(0, 0)])

    @net.transition(start >> threshold + numbers + state)
    def begin(n: int):  # type: ignore[no-untyped-def]
        for i in range(2 * n):
            yield numbers, i
        yield threshold, n

    net.add(
        "add",
        numbers + numbers.count + threshold.read + total >> total,
        lambda i, count, n, total: (total[0] + i, total[1] + count),
        guard=lambda i, count, n, total: i % 2 == 0 and count > n,
    )
    return net


def co_generate() -> Net:
    """A generator without an end that is throttled: no more tasks are ready than there are workers."""
    net = Net("co_generate")
    credits, workers = net.place("credits", int), net.place("workers", int)
    state, ready = net.place("state", int, tokens=[0]), net.place("ready", int)
    results, total = net.place("results", int), net.place("total", int, tokens=[0])
    net.add(
        "generate",
        state + ready.count + workers.read >> state + ready,
        lambda i, count, most: (i + 1, i),
        guard=lambda i, count, most: count < most,
    )
    net.add("process", credits + ready >> results, lambda credit, task: task)
    net.add("add", total + results >> total, lambda total, result: total + result)
    return net


def threshold() -> Net:
    """Begins to add when more than n values have come; ends when no more come and none is left."""
    net = Net("threshold")
    enough, values = net.place("enough", int), net.place("values", int)
    started, ended = net.place("started", int), net.place("ended", str)
    total, result = net.place("total", int, tokens=[0]), net.place("result", int)
    net.add("start", enough + values.count >> started, lambda n, count: n, guard=lambda n, count: count >= n)
    net.add("add", started.read + values + total >> total, lambda n, value, total: total + value)
    net.add("done", ended + values.empty + total >> result, lambda end, total: total)
    return net


def reduce_after_process(folder: Path) -> Net:
    """No reduction begins before all tasks are processed, which leave a file each."""
    net = Net("reduce_after_process")
    start, tasks, generated = net.place("start", int), net.place("tasks", int), net.place("generated", int)
    results, total = net.place("results", int), net.place("total", int)

    @net.transition(start >> tasks + generated)
    def generate(n: int):  # type: ignore[no-untyped-def]
        for i in range(n):
            yield tasks, i
        yield generated, n

    @net.transition(tasks >> results)
    def process(task: int) -> int:
        assert not (folder / "reduce").exists()
        (folder / str(task)).touch()
        return task

    @net.transition(generated + tasks.count >> total, guard=lambda n, unfinished: unfinished == 0)
    def begin_reduction(n: int, unfinished: int) -> int:
        (folder / "reduce").touch()
        assert all((folder / str(i)).exists() for i in range(n))
        return 0

    net.add("add", results + total >> total, lambda result, total: result + total)
    return net
