"""The examples of nets: each gives what it is to give.

They are those that GPI-Space documents (github.com/cc-hpc-itwm/gpispace, share/doc/example), written anew;
inputs and results are those of its tests. `patterns` has more, of what such nets are used for.
"""

import inspect
import itertools
import math
import os
import random
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from carme_runtime.petri import Net
from patience import HANG

EXAMPLES = Path(__file__).parents[3] / "containers/runtime/examples/petri"


def example(module: str, name: str, *given: Any) -> Net:
    """A net of the examples."""
    return runpy.run_path(str(EXAMPLES / f"{module}.py"))[name](*given)


def end(net: Net, folder: Path, puts: dict[str, list[Any]], **options: Any) -> dict[str, list[Any]]:
    """The marking at the end."""
    net.check()
    net.draw()
    with net.start(2, folder=folder / "run", checked=False, **options) as run:
        for place, tokens in puts.items():
            run.put(place, *tokens)
        return run.wait(HANG)


def fib(n: int) -> int:
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


FIBS = [0, 1, 2, 3, 4, 5, 10, 50, 100, 150]
SIZES = [3, 3, 10, 6, 1]
WORDS = ["".join(each) for n in (1, 2) for each in itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=n)]
NUMBERS = [-(10**30), -1, 0, 1, 99, 100, 999, 1000, 10**40]
CLASSES = ["negative", "negative", "zero", "small", "small", "medium", "medium", "large", "large"]
PACKETS = [(seed, 1000) for seed in range(20)]


def points(packets: list[tuple[int, int]]) -> int:
    found = 0
    for seed, count in packets:
        chance = random.Random(seed)
        found += sum(chance.random() ** 2 + chance.random() ** 2 < 1 for _ in range(count))
    return found


# module, name, what is put, and what the places have in the end.
CASES: list[tuple[str, str, dict[str, list[Any]], dict[str, list[Any]]]] = [
    ("conditions", "classify", {"values": NUMBERS}, {"results": list(zip(NUMBERS, CLASSES, strict=True))}),
    ("conditions", "atomic", {"updates": [100], "counter": [12]}, {"final": [112]}),
    ("conditions", "fibonacci", {"numbers": FIBS}, {"results": [(n, fib(n)) for n in FIBS]}),
    ("conditions", "ping_pong", {"left": [64]}, {"count": [64], "left": []}),
    ("conditions", "sum_by_priority", {"a": [3], "b": [4], "start": [0]}, {"c": [7], "a": [], "b": []}),
    ("conditions", "sum_by_priority", {"b": [4], "start": [0]}, {"c": [4], "b": []}),
    ("conditions", "sum_by_priority", {"start": [0]}, {"c": [0]}),
    ("conditions", "sum_or_product", {"magic": [7], "a": [7], "b": [7]}, {"c": [0]}),
    ("conditions", "sum_or_product", {"magic": [7], "a": [7], "b": [5]}, {"c": [35]}),
    ("conditions", "sum_or_product", {"magic": [7], "a": [4], "b": [5]}, {"c": [9]}),
    ("conditions", "switch", {"closed": ["now"], "numbers": [1, 2]}, {"passed": [], "numbers": [1, 2]}),
    ("generators", "numbers", {"start": [1000]}, {"out": list(range(1000))}),
    ("generators", "letters", {"start": [30]}, {"out": [chr(ord("a") + i) for i in range(30)]}),
    ("generators", "words", {"start": [600]}, {"out": WORDS[:600]}),
    ("generators", "sequence", {"start": [5]}, {"out": [0, 1, 2, 3, 4]}),
    (
        "generators",
        "sequence_of_sequences",
        {"start": [5]},
        {"out": [i for i in range(5) for _ in range(5 - i - 1)]},
    ),
    ("generators", "bounded_sequence", {"start": [20]}, {"out": list(range(20)), "ahead": []}),
    *(("generators", "totient", {"start": [n]}, {"phi": [phi]}) for n, phi in ((1, 1), (12, 4), (97, 96))),
    ("generators", "split_and_join", {"start": [200]}, {"results": [200 * 201 * 401 // 6]}),
    ("generators", "pairs", {"values": [(0, 1), (3, 4)]}, {"sums": [1, 7]}),
    ("generators", "reduce_all", {"values": list(range(101))}, {"values": [5050]}),
    ("parallel", "hello", {"start": ["hello", "world"]}, {"out": [None, None]}),
    ("parallel", "work_and_wait", {"start": [12]}, {"done": ["done"]}),
    ("parallel", "work_with_credit", {"credit": [0, 0], "start": [12]}, {"done": ["done"], "tasks": []}),
    ("parallel", "work_with_credit", {"credit": [0, 0], "start": [25]}, {"done": ["done"], "tasks": []}),
    ("parallel", "pi", {"packets": PACKETS}, {"ratio": [(points(PACKETS), 20_000)]}),
    ("parallel", "shared", {"words": ["value"]}, {"result": ["value"], "a": [], "b": []}),
    ("parallel", "subnets", {"p0": [1, 2]}, {"p3": [2110, 3110]}),
    ("parallel", "blocks", {"count": [7]}, {"done": list(range(7)), "slots": [0, 1, 2]}),
    ("parallel", "one_to_many", {"start": [5]}, {"total": [500], "whole": []}),
    (
        "patterns",
        "primes",
        {"numbers": list(range(30))},
        {
            "prime": [2, 3, 5, 7, 11, 13, 17, 19, 23, 29],
            "composite": [n for n in range(30) if n < 2 or any(n % d == 0 for d in range(2, n))],
        },
    ),
    (
        "patterns",
        "choice",
        {"offers": ["red"]},
        {"taken": [("order", "red")], "refused": [], "offers": [], "open": []},
    ),
]


@pytest.mark.parametrize(("module", "name", "puts", "expected"), CASES)
def test_an_example_gives_its_result(
    module: str, name: str, puts: dict[str, list[Any]], expected: dict[str, list[Any]], tmp_path: Path
):
    marking = end(example(module, name), tmp_path, puts)
    assert {place: Counter(marking[place]) for place in expected} == {
        place: Counter(tokens) for place, tokens in expected.items()
    }


@pytest.mark.parametrize(("offers", "chosen"), [("gpu:1,cpu:1", "gpu"), ("cpu:1", "cpu"), ("gpu:1", "gpu")])
def test_the_preferred_implementation_is_taken_where_it_can(tmp_path: Path, offers: str, chosen: str):
    marking = end(example("conditions", "implementations"), tmp_path, {"jobs": [1]}, offers=offers)
    assert marking["out"] == [chosen]


def test_other_implementations_help_when_the_preferred_one_is_busy(tmp_path: Path):
    net = Net("busy")
    jobs, out = net.place("jobs", str), net.place("out", str)

    @net.transition(jobs >> out, needs="gpu:1")
    def work(job: str) -> str:
        with Path(job).open() as fifo:  # until the other one, on cores, has opened it too
            return fifo.read()

    @net.implementation("work", needs="cpu:1")
    def work_on_cores(job: str) -> str:
        with Path(job).open("w") as fifo:
            fifo.write("gpu")
        return "cpu"

    os.mkfifo(tmp_path / "fifo")
    marking = end(net, tmp_path, {"jobs": [str(tmp_path / "fifo")] * 2}, offers="gpu:1,cpu:1")
    assert sorted(marking["out"]) == ["cpu", "gpu"]


def test_a_search_ends_when_something_is_found(tmp_path: Path):
    marking = end(example("conditions", "eureka"), tmp_path, {"candidates": list(range(1, 400))})
    assert len(marking["found"]) == 1 and marking["found"][0] % 91 == 0
    assert marking["candidates"] == []
    assert len(marking["rejected"]) + len(marking["dropped"]) == 398


@pytest.mark.parametrize("n", [0, 1, 40])
def test_numbers_are_added_while_there_are_enough(tmp_path: Path, n: int):
    marking = end(example("counting", "even_numbers"), tmp_path, {"start": [n]})
    ((total, counts),) = marking["total"]
    assert total == n * (n - 1) and counts >= n * (n + 1)
    assert sorted(marking["numbers"]) == list(range(1, 2 * n, 2))


def test_a_generator_without_an_end_is_throttled(tmp_path: Path):
    marking = end(example("counting", "co_generate"), tmp_path, {"workers": [2], "credits": [0] * 30})
    created = 30 + len(marking["ready"])
    assert len(marking["ready"]) == 2
    assert marking["total"][0] + sum(marking["ready"]) == created * (created - 1) // 2


def test_adding_begins_when_enough_values_have_come(tmp_path: Path):
    net = example("counting", "threshold")
    values = [random.Random(7).randrange(100) for _ in range(30)]
    with net.start(2, folder=tmp_path / "run", checked=False) as run:
        run.put("enough", 20)
        run.put("values", *values[:19])
        assert len(run.wait(HANG)["values"]) == 19
        run.put("values", *values[19:])
        run.put("ended", "now")
        assert run.wait(HANG)["result"] == [sum(values)]


@pytest.mark.parametrize("n", [1, 60])
def test_reductions_begin_after_all_tasks(tmp_path: Path, n: int):
    pebbles = tmp_path / "pebbles"
    pebbles.mkdir()
    marking = end(example("counting", "reduce_after_process", pebbles), tmp_path, {"start": [n]})
    assert marking["total"] == [n * (n - 1) // 2]


def test_results_are_written_in_order(tmp_path: Path):
    marking = end(example("parallel", "in_order", tmp_path / "file"), tmp_path, {"start": [SIZES]})
    assert marking["done"] == ["done"]
    expected = b"".join(bytes([number]) * size for number, size in enumerate(SIZES))
    assert (tmp_path / "file").read_bytes() == expected


def test_a_file_is_read_in_pieces(tmp_path: Path):
    data = random.Random(31415926).randbytes(100_000)
    (tmp_path / "data").write_bytes(data)
    net = example("parallel", "mean_of_file", tmp_path / "data", 7_000)
    ((mean, variance),) = end(net, tmp_path, {"start": [len(data)]})["result"]
    exact = sum(data) / len(data)
    assert math.isclose(mean, exact)
    assert math.isclose(variance, sum((each - exact) ** 2 for each in data) / len(data), rel_tol=1e-9)


def test_results_of_several_runs_are_for_the_program_to_add(tmp_path: Path):
    net = Net("negate")
    net.add("negate", net.place("given", int) >> net.place("out", int), lambda value: -value)
    found = []
    for number, value in enumerate((3, 4)):
        with net.start(1, folder=tmp_path / str(number)) as run:
            run.put("given", value)
            found += run.wait(HANG)["out"]
    assert found == [-3, -4]


def test_a_subnet_is_connected_by_places_of_its_types(tmp_path: Path):
    part, net = Net("part"), Net("whole")
    part.place("given", int)
    words = net.place("words", str)
    with pytest.raises(Exception, match="Net part has no place given of str to be place words"):
        net.include(part, "first", given=words)


def test_the_number_of_tokens_has_no_weight():
    place = Net("weights").place("place", int)
    with pytest.raises(Exception, match="number of tokens in place place has no weight"):
        2 * place.count


def test_each_value_is_mapped(tmp_path: Path):
    marking = end(example("patterns", "mapped", abs), tmp_path, {"values": list(enumerate([-3, 0, 5]))})
    assert sorted(marking["results"]) == [(0, 3), (1, 0), (2, 5)]


def test_words_of_files_are_counted(tmp_path: Path):
    texts = ["a rose is a rose", "is a", "", "rose"]
    files = [tmp_path / f"text-{number}" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    marking = end(example("patterns", "word_count"), tmp_path, {"files": files})
    assert marking["total"] == [Counter(a=3, rose=3, **{"is": 2})]


def test_one_of_several_offers_is_taken(tmp_path: Path):
    marking = end(example("patterns", "choice"), tmp_path, {"offers": ["red", "blue", "green"]})
    ((_, taken),) = marking["taken"]
    assert sorted([taken, *marking["refused"]]) == ["blue", "green", "red"]


@pytest.mark.parametrize("failures", [0, 3])
def test_what_fails_by_chance_is_repeated(tmp_path: Path, failures: int):
    marking = end(example("patterns", "unreliable", failures), tmp_path, {"jobs": [1, 2]})
    assert sorted(marking["done"]) == [(1, failures + 1), (2, failures + 1)]


def test_files_are_sorted_by_programs_and_merged(tmp_path: Path):
    values = random.Random(5).sample(range(1000), 300)
    files = [tmp_path / f"numbers {number}" for number in range(3)]
    for number, file in enumerate(files):
        file.write_text("\n".join(map(str, values[number::3])))
    marking = end(example("patterns", "sorted_by_programs"), tmp_path, {"unsorted": files, "ended": [1]})
    assert marking["merged"] == [sorted(values)]


def test_chance_is_used_until_the_result_is_good_enough(tmp_path: Path):
    marking = end(example("patterns", "good_enough", 0.02), tmp_path, {"seeds": list(range(200))})
    (found,) = marking["result"]
    assert abs(found - math.pi) < 6 * 0.02
    assert marking["seeds"] == marking["throws"] == marking["sums"] == [] and marking["dropped"]


@pytest.mark.parametrize(("size", "edge"), [(12, 5), (8, 8)])
def test_a_picture_is_computed_in_tiles(tmp_path: Path, size: int, edge: int):
    light: Any = runpy.run_path(str(EXAMPLES / "patterns.py"))["light"]
    (rows,) = end(example("patterns", "tiles", size, edge), tmp_path, {"start": [1]})["pixels"]
    assert rows == [[light(x, y, size) for x in range(size)] for y in range(size)]
    assert max(map(max, rows)) > 0.9 and rows[0][0] == 0


def test_a_stencil_reads_its_neighbours_edges(tmp_path: Path):
    cells, steps = 50, 7
    expected = [1.0] + [0.0] * (cells - 1)
    for _ in range(steps):
        expected = [(expected[i - 1] + expected[i] + expected[(i + 1) % cells]) / 3 for i in range(cells)]
    (found,) = end(example("patterns", "heat", 4, steps), tmp_path, {"start": [cells]})["result"]
    assert found == pytest.approx(expected, abs=1e-15)


def test_all_examples_are_run_here_and_there_are_thirty_at_least():
    own = Path(__file__).read_text()
    created = {
        (file.stem, name)
        for file in EXAMPLES.glob("*.py")
        for name, value in runpy.run_path(str(file)).items()
        if inspect.isfunction(value) and value.__annotations__.get("return") is Net
    }
    assert len(created) >= 30
    assert {name for module, name in created if f'"{module}", "{name}"' not in " ".join(own.split())} == set()
