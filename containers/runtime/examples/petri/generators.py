"""Transitions that make many tokens of one, and one of many."""

from carme_runtime.petri import Net


def numbers(first: object = 0, following: object = None) -> Net:
    """Counts up from `first`; `following` makes the next token of one."""
    net = Net("numbers")
    start, out = net.place("start", int), net.place("out")
    step = following or (lambda value: value + 1)

    @net.transition(start >> out)
    def generate(count: int):  # type: ignore[no-untyped-def]
        value = first
        for _ in range(count):
            yield value
            value = step(value)  # type: ignore[operator]

    return net


def letters() -> Net:
    """a, b, c and so on."""
    return numbers("a", lambda letter: chr(ord(letter) + 1))


def words() -> Net:
    """a, ..., z, aa, ab and so on."""

    def following(word: str) -> str:
        head, last = word[:-1], word[-1]
        return head + chr(ord(last) + 1) if last < "z" else (following(head) if head else "a") + "a"

    return numbers("a", following)


def sequence() -> Net:
    """The same without a generator: a loop that gives a token in each step."""
    net = Net("sequence")
    start, state, out = net.place("start", int), net.place("state", tuple), net.place("out", int)
    net.add("begin", start >> state, lambda n: (0, n))
    net.add("step", state >> state + out, lambda s: ((s[0] + 1, s[1]), s[0]), guard=lambda s: s[0] < s[1])
    net.add("done", state >> None, lambda s: None, guard=lambda s: s[0] >= s[1])
    return net


def sequence_of_sequences() -> Net:
    """Each token of a first sequence starts one of its own."""
    net = Net("sequence_of_sequences")
    start, inner, out = net.place("start", int), net.place("inner", int), net.place("out", int)
    net.add("outer", start >> inner, count_down)
    net.add("inner", inner >> out, lambda n: n)
    return net


def count_down(n: int):  # type: ignore[no-untyped-def]
    """n - 1 times 0, n - 2 times 1 and so on."""
    for i in range(n):
        for _ in range(n - i - 1):
            yield i


def bounded_sequence() -> Net:
    """A sequence that makes at most `room` tokens ahead: the place of its tokens has a capacity."""
    net = Net("bounded_sequence")
    start, state = net.place("start", int), net.place("state", tuple)
    ahead, out = net.place("ahead", int, capacity=3), net.place("out", int)
    net.add("begin", start >> state, lambda n: (0, n))
    net.add("step", state >> state + ahead, lambda s: ((s[0] + 1, s[1]), s[0]), guard=lambda s: s[0] < s[1])
    net.add("use", ahead >> out, lambda n: n)
    return net


def totient() -> Net:
    """Euler's phi: a generator gives all numbers that are prime to n, an arc counts them."""
    import math

    net = Net("totient")
    start, coprime, phi = net.place("start", int), net.place("coprime", int), net.place("phi", int)
    generated = net.place("generated", int)

    @net.transition(start >> coprime + generated)
    def generate(n: int):  # type: ignore[no-untyped-def]
        for i in range(1, n + 1):
            if math.gcd(i, n) == 1:
                yield coprime, i
        yield generated, n

    net.add("count", generated + coprime.count >> phi, lambda n, count: count)
    return net


def split_and_join() -> Net:
    """n becomes 1 to n, each is squared, and their sum is taken when all are there."""
    net = Net("split_and_join")
    start, parts, squares = net.place("start", int), net.place("parts", int), net.place("squares", int)
    open_sums, results = net.place("open_sums", tuple), net.place("results", int)

    @net.transition(start >> parts + open_sums)
    def split(n: int):  # type: ignore[no-untyped-def]
        yield open_sums, (n, 0)
        for i in range(1, n + 1):
            yield parts, i

    net.add("square", parts >> squares, lambda i: i * i)
    net.add("add", open_sums + squares >> open_sums, lambda state, s: (state[0] - 1, state[1] + s))
    net.add("join", open_sums >> results, lambda state: state[1], guard=lambda s: s[0] == 0, priority=1)
    return net


def pairs() -> Net:
    """The sum of each pair."""
    net = Net("pairs")
    values, sums = net.place("values", tuple), net.place("sums", int)
    net.add("add", values >> sums, lambda pair: pair[0] + pair[1])
    return net


def reduce_all() -> Net:
    """A sum of any number of tokens: two are taken and one is given, until one is left."""
    net = Net("reduce_all")
    values = net.place("values", int, entry=True)
    net.add("add", 2 * values >> values, lambda two: sum(two))
    return net
