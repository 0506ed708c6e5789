"""Transitions that choose their tokens: by conditions, by priorities, by what is free."""

from carme_runtime.petri import Net


def classify() -> Net:
    """Each number goes where its size says; guards share one place."""
    net = Net("classify")
    values, results = net.place("values", int), net.place("results", tuple)
    classes = {
        "negative": lambda value: value < 0,
        "zero": lambda value: value == 0,
        "small": lambda value: 0 < value < 100,
        "medium": lambda value: 100 <= value < 1000,
        "large": lambda value: value >= 1000,
    }
    for name, holds in classes.items():
        net.add(name, values >> results, lambda value, name=name: (value, name), guard=holds)
    return net


def atomic() -> Net:
    """Two transitions count the same counter up: a token is taken by one task at a time."""
    net = Net("atomic")
    updates, counter = net.place("updates", int), net.place("counter", int)
    final = net.place("final", int)
    for name in ("first", "second"):
        net.add(
            f"update_{name}",
            updates + counter >> updates + counter,
            lambda left, value: (left - 1, value + 1),
            guard=lambda left, value: left > 0,
        )
    net.add(
        "done", updates + counter >> final, lambda left, value: value, guard=lambda left, value: left == 0
    )
    return net


def fibonacci() -> Net:
    """A loop whose state is a token; any number of loops at once."""
    net = Net("fibonacci")
    numbers, state = net.place("numbers", int), net.place("state", tuple)
    results = net.place("results", tuple)
    net.add("begin", numbers >> state, lambda n: (0, n, 0, 1))
    net.add(
        "step", state >> state, lambda s: (s[0] + 1, s[1], s[3], s[2] + s[3]), guard=lambda s: s[0] < s[1]
    )
    net.add("done", state >> results, lambda s: (s[1], s[2]), guard=lambda s: s[0] >= s[1])
    return net


def ping_pong() -> Net:
    """Two transitions that hand a token to and fro; a third one counts."""
    net = Net("ping_pong")
    left, ping, pong = net.place("left", int), net.place("ping", int), net.place("pong", int)
    count = net.place("count", int, tokens=[0])
    net.add("start", left >> ping, lambda n: n, guard=lambda n: n > 0)
    net.add("ping", ping >> pong, lambda n: n)
    net.add("finish_step", pong + count >> left + count, lambda n, count: (n - 1, count + 1))
    net.add("stop", left >> None, lambda n: None, guard=lambda n: n == 0)
    return net


def sum_by_priority() -> Net:
    """The sum of two numbers where there are two; else the one that is there; else 0."""
    net = Net("sum_by_priority")
    a, b, c = net.place("a", int), net.place("b", int), net.place("c", int)
    start = net.place("start", int)
    net.add("both", start + a + b >> c, lambda _, x, y: x + y, priority=2)
    net.add("only_a", start + a >> c, lambda _, x: x, priority=1)
    net.add("only_b", start + b >> c, lambda _, x: x, priority=1)
    net.add("none", start >> c, lambda _: 0, priority=0)
    return net


def sum_or_product() -> Net:
    """Priorities count among transitions whose conditions hold."""
    net = Net("sum_or_product")
    a, b, c = net.place("a", int), net.place("b", int), net.place("c", int)
    magic = net.place("magic", int)
    net.add(
        "zero", magic + a + b >> c, lambda m, x, y: 0, guard=lambda m, x, y: x == m and y == m, priority=2
    )
    net.add(
        "product", magic + a + b >> c, lambda m, x, y: x * y, guard=lambda m, x, y: m in (x, y), priority=1
    )
    net.add("sum", a + b >> c, lambda x, y: x + y, priority=0)
    return net


def implementations() -> Net:
    """One transition with two implementations: the GPU's is taken where a GPU is free."""
    net = Net("implementations")
    jobs, out = net.place("jobs", int), net.place("out", str)

    @net.transition(jobs >> out, needs="gpu:1")
    def work(job: int) -> str:
        return "gpu"

    @net.implementation("work", needs="cpu:1")
    def work_on_cores(job: int) -> str:
        return "cpu"

    return net


def switch() -> Net:
    """Inhibitor arcs: numbers pass only while the place `closed` is empty."""
    net = Net("switch")
    numbers, passed, closed = net.place("numbers", int), net.place("passed", int), net.place("closed", str)
    net.add("let_through", numbers + closed.empty >> passed, lambda n: n)
    return net


def eureka() -> Net:
    """A search that ends when one task has found something: nothing more of it starts."""
    net = Net("eureka")
    candidates, found = net.place("candidates", int), net.place("found", int)
    rejected, dropped = net.place("rejected", int), net.place("dropped", int)

    @net.transition(candidates + found.empty >> found + rejected)
    def search(candidate: int):  # type: ignore[no-untyped-def]
        yield ("found" if candidate % 91 == 0 else "rejected"), candidate

    net.add("drop", candidates + found.read >> dropped, lambda candidate, _: candidate)
    return net
