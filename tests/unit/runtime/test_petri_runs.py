"""Nets that run: what tasks get and give, what goes wrong, and what a journal brings back."""

import contextlib
import gc
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import carme_runtime
from carme_runtime.petri import Net, PetriError
from carme_runtime.petri.journal import Journal
from patience import HANG


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_a_transition_takes_and_gives_several_tokens(folder: Path):
    net = Net("several")
    a, factor = net.place("a", int, tokens=[1, 2, 3, 4]), net.place("factor", int, tokens=[10])
    sums, products = net.place("sums", int), net.place("products", int)

    @net.transition(2 * a + factor.read >> sums + 2 * products)
    def both(pair, factor):
        return sum(pair), [each * factor for each in pair]

    with net.start(folder=folder) as run:
        marking = run.wait(HANG)
    assert sorted(marking["products"]) == [10, 20, 30, 40] and sum(marking["sums"]) == 10
    assert marking["factor"] == [10] and marking["a"] == []
    assert run.fired == {"both": 2}


def test_generators_give_any_number_to_any_place(folder: Path):
    net = Net("generators")
    numbers = net.place("numbers", int)
    even, odd = net.place("even", int), net.place("odd", int)

    @net.transition(numbers >> even + odd)
    def split(number):
        for each in range(number):
            yield ("odd", each) if each % 2 else (even, each)

    with net.start(folder=folder, workers=1) as run:
        run.put(numbers, 5, 0)
        marking = run.wait(HANG)
    assert marking == {"numbers": [], "even": [0, 2, 4], "odd": [1, 3]}


def test_guards_choose_tokens_that_belong_together(folder: Path):
    net = Net("guards")
    left, right, pairs = net.place("left"), net.place("right"), net.place("pairs", tuple)
    big = net.place("big", int)
    net.add("join", left + right >> pairs, lambda x, y: (x, y), guard=lambda x, y: x == y)
    net.add("take", right >> big, lambda y: y, guard=lambda y: y > 5)
    with net.start(folder=folder) as run:
        run.put(left, 1, 2, 3)
        run.put(right, 9, 3, 2, 5)
        marking = run.wait(HANG)
    assert sorted(marking["pairs"]) == [(2, 2), (3, 3)]
    assert marking["left"] == [1] and marking["right"] == [5] and marking["big"] == [9]


def test_higher_priorities_start_first(folder: Path):
    net = Net("priorities")
    start, order = net.place("start", tokens=[None]), net.place("order", str)
    for name, priority in (("low", 0), ("high", 2), ("middle", 1)):
        go = net.place(f"go_{name}")
        net.add(f"begin_{name}", go >> order, lambda _, name=name: name, priority=priority)
    net.add("all", start >> all_of(net, "go_low", "go_high", "go_middle"), lambda _: (1, 2, 3), priority=9)
    with net.start(folder=folder, workers=1) as run:
        assert run.wait(HANG)["order"][0] == "high"


def all_of(net: Net, *names: str):
    first, *rest = (net.places[name] for name in names)
    for each in rest:
        first = first + each
    return first


def test_a_capacity_holds_while_tasks_run(folder: Path):
    net = Net("capacity")
    jobs, slots, done = net.place("jobs", int), net.place("slots", int, capacity=2), net.place("done", int)
    record = folder.parent / "record"
    record.write_bytes(b"")

    @net.transition(jobs >> slots)
    def fill(job):
        with record.open("ab") as file:
            file.write(b"+")
        return job

    @net.transition(slots >> done)
    def empty(job):
        with record.open("ab") as file:
            file.write(b"-")
        return job

    with net.start(folder=folder) as run:
        run.put(jobs, *range(20))
        assert sorted(run.wait(HANG)["done"]) == list(range(20))
    level = highest = 0
    for sign in record.read_bytes():
        level += 1 if sign == ord("+") else -1
        highest = max(highest, level)
    assert highest <= 4  # two that lie there, and two whose takers have begun


def test_put_waits_for_room_and_says_when_there_will_be_none(folder: Path):
    net = Net("room")
    jobs, done = net.place("jobs", int, capacity=1), net.place("done", int, capacity=3)
    net.add("move", jobs >> done, lambda x: x)
    with net.start(folder=folder, workers=1) as run:
        run.put(jobs, 1, 2, 3, 4)
        with pytest.raises(PetriError, match="Place jobs is full with its capacity of 1"):
            run.put(jobs, 5)
        assert run.marking() == {"jobs": [4], "done": [1, 2, 3]}


def test_a_program_takes_tokens_while_the_net_runs(folder: Path):
    net = Net("taking")
    numbers, squares = net.place("numbers", int), net.place("squares", int, capacity=2)
    further = net.place("other", int, tokens=[7])

    @net.transition(numbers >> squares)
    def square(number):
        return number * number

    with net.start(folder=folder, workers=2) as run:
        run.put(numbers, *range(50))
        assert len(run.wait(HANG)["squares"]) == 2  # there is no room for more
        taken: list[int] = []
        while found := run.take(squares, HANG):
            assert len(found) <= 2  # which makes room for the next
            taken += found
        assert sorted(taken) == [each * each for each in range(50)]
        assert run.wait(HANG) == {"numbers": [], "squares": [], "other": [7]}
        assert run.take("other") == [7] and run.take(further) == []
        with pytest.raises(PetriError, match="no such place more"):
            run.take("more")
    with net.start(folder=folder, resume=True) as run:  # what was taken does not come again
        assert run.wait(HANG) == {"numbers": [], "squares": [], "other": []}


def test_what_cannot_be_taken_is_one_sentence(folder: Path):
    net = Net("failing")
    numbers, squares = net.place("numbers", int), net.place("squares", int)

    @net.transition(numbers >> squares)
    def square(number):
        raise ValueError(f"not {number}")

    with net.start(folder=folder) as run:
        run.put(numbers, 3)
        with pytest.raises(PetriError, match="Transition square failed: ValueError: not 3"):
            run.take(squares, HANG)
        assert run.marking()["numbers"] == [3]


def test_programs_are_started_without_a_shell(folder: Path, tmp_path: Path):
    net = Net("programs")
    text, out, code = net.place("text", str), net.place("out", str), net.place("code", int)
    many, joined = net.place("many", int, tokens=[1, 2]), net.place("joined", str)
    net.transition(
        "printf '%s|' a {text} '$HOME;{text}' {attempt}", text >> out + code, gives=["{stdout}", "7"]
    )
    net.transition(["echo", "{many}"], 2 * many >> joined)
    with net.start(folder=folder) as run:
        run.put(text, "x y; touch z")
        marking = run.wait(HANG)
    assert marking["out"] == ["a|x y; touch z|$HOME;x y; touch z|1|"] and marking["code"] == [7]
    assert marking["joined"] == ["1 2"]


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("sh -c 'echo broken >&2; exit 3'", "sh ended with code 3: broken"),
        ("/no/such/program {x}", "cannot be started: No such file"),
        ("sh -c 'kill -9 $$'", "was ended by signal 9"),
        ("head -c 17000000 /dev/zero", "printed more than 16 MiB"),
    ],
)
def test_programs_that_fail_end_in_one_sentence(folder: Path, command: str, sentence: str):
    net = Net("failing")
    x, y = net.place("x", int, tokens=[1]), net.place("y", str)
    net.transition(command, x >> y, name="program")
    with net.start(folder=folder, workers=1) as run, pytest.raises(PetriError, match=sentence) as caught:
        run.wait(HANG)
    assert caught.value.message.startswith("Transition program failed")


def test_a_task_that_fails_runs_again_and_knows_it(folder: Path):
    net = Net("again")
    x, y = net.place("x", int, tokens=[5]), net.place("y", int)

    @net.transition(x >> y, retries=2)
    def third_time(value, attempt):
        if attempt < 3:
            raise ValueError("not yet")
        return value * attempt

    with net.start(folder=folder) as run:
        assert run.wait(HANG) == {"x": [], "y": [15]}


def unpicklable(value):
    return lambda: value


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (lambda x: 1 / 0, "Transition bad failed: ZeroDivisionError: division by zero."),
        (lambda x: "text", "Transition bad gave a wrong token: Place y holds int, not str ('text')."),
        (unpicklable, "gave place z a function that cannot be pickled"),
        (lambda x: sys.exit(3), "Transition bad failed: SystemExit: 3."),
    ],
)
def test_a_body_that_fails_loses_nothing_and_resumes_when_fixed(folder: Path, body, sentence: str):
    def make(body) -> Net:
        net = Net("mended")
        x, y, z = net.place("x", int), net.place("y", int), net.place("z")
        net.add("bad", x >> (z if body is unpicklable else y), body)
        return net

    with make(body).start(folder=folder, workers=1) as run:
        run.put("x", 4)
        with pytest.raises(PetriError) as caught:
            run.wait(HANG)
        assert sentence in caught.value.message and "resume" in caught.value.remedy
        assert run.marking()["x"] == [4]
    with Net.resume(folder, net=make(lambda x: x + 1), workers=1) as run:
        assert run.resumed and run.wait(HANG)["x"] == []


def test_what_a_function_returns_must_fit_its_outputs(folder: Path):
    net = Net("outputs")
    x, y, z = net.place("x", tokens=[1]), net.place("y"), net.place("z")
    net.add("pair", x >> y + 2 * z, lambda x: (x, 3))
    with (
        net.start(folder=folder) as run,
        pytest.raises(PetriError, match="must give place z a list of 2 tokens"),
    ):
        run.wait(HANG)


def test_a_guard_that_fails_ends_in_one_sentence(folder: Path):
    net = Net("guard")
    x = net.place("x", tokens=[None])
    net.add("t", x >> None, print, guard=lambda value: value < 3)
    with (
        net.start(folder=folder) as run,
        pytest.raises(PetriError, match="guard of transition t failed: TypeError"),
    ):
        run.wait(HANG)


def test_wrong_tokens_are_refused(folder: Path):
    net = Net("tokens")
    x, y = net.place("x", int), net.place("y")
    net.add("t", x >> y, lambda x: x)
    with net.start(folder=folder, workers=1) as run:
        with pytest.raises(PetriError, match="Place x holds int, not str"):
            run.put(x, 1, "2")
        with pytest.raises(PetriError, match="for place y cannot be pickled"):
            run.put(y, lambda: 1)
        with pytest.raises(PetriError, match="no such place z"):
            run.put("z", 1)
        assert run.wait(HANG) == {"x": [], "y": []}
    with pytest.raises(PetriError, match="is closed"):
        run.put(x, 1)


@pytest.mark.parametrize("workers", ["there", 0, True])
def test_wrong_workers_are_refused(folder: Path, workers):
    net = Net("workers")
    net.add("t", net.place("x") >> None, print)
    with pytest.raises(PetriError, match="are not workers"):
        net.start(workers, folder=folder)


def test_resources_limit_what_runs_at_once(folder: Path):
    net = Net("resources")
    x, y = net.place("x", int, tokens=range(6)), net.place("y", int)
    busy = folder.parent / "busy"

    @net.transition(x >> y, needs="gpu:1")
    def alone(value):
        busy.mkdir()  # fails if another has it
        busy.rmdir()
        return value

    with pytest.raises(PetriError, match="alone needs gpu:1, and this run offers 0"):
        net.start(folder=folder)
    with net.start(folder=folder, offers="gpu:1") as run:
        assert len(run.wait(HANG)["y"]) == 6


def test_a_run_has_one_coordinator(folder: Path):
    net = Net("single")
    net.add("t", net.place("x") >> None, print)
    with net.start(folder=folder, workers=1):
        with pytest.raises(PetriError, match="There is a run in"):
            net.start(folder=folder)
        with pytest.raises(PetriError, match="has a coordinator already"):
            Net.resume(folder, net=net)
        program = (
            "import sys; from pathlib import Path; from carme_runtime.petri.journal import Journal\n"
            "try: Journal(Path(sys.argv[1]), {'places': ['x'], 'net': 'single'}, [])\n"
            "except Exception as error: print(error.message)"
        )
        message = subprocess.run(
            [sys.executable, "-c", program, str(folder)], env=_environment(), capture_output=True, text=True
        )
        assert "has a coordinator already" in message.stdout, message
    Net.resume(folder, net=net, workers=1).close()
    with pytest.raises(PetriError, match="There is no run in"):
        Net.resume(folder.parent / "none")


def test_a_run_that_nobody_has_any_more_is_closed(folder: Path):
    net = Net("left")
    x, y = net.place("x", int), net.place("y", int)
    net.add("t", x >> y, lambda x: x + 1)
    before = set(threading.enumerate())
    for number in range(2):
        run = net.start(folder=folder, workers=2, resume=True)
        run.put(x, number)
        assert run.wait(HANG)["y"] == [*range(1, number + 2)]
        attached = Net.attach(folder)  # which does not keep it either
        coordinator = next(thread for thread in threading.enumerate() if thread.name == "carme-petri-left")
        del run
        gc.collect()
        coordinator.join(HANG)
        with pytest.raises(PetriError):
            attached.status()
        attached.close()
    for thread in set(threading.enumerate()) - before:  # who serves what is attached
        thread.join(HANG)
    assert not set(threading.enumerate()) - before
    with Net.resume(folder, net=net, workers=1) as run:
        assert run.wait(HANG) == {"x": [], "y": [1, 2]}


def test_a_net_with_other_places_is_refused(folder: Path):
    net = Net("places")
    net.add("t", net.place("x") >> None, print)
    net.start(folder=folder, workers=1).close()
    changed = Net("places")
    changed.add("t", changed.place("z") >> None, print)
    with pytest.raises(PetriError, match="has a place x, which net places lacks"):
        Net.resume(folder, net=changed)


def test_a_torn_end_of_the_journal_is_left_out_and_saved(folder: Path):
    net = Net("torn")
    net.place("x", int, tokens=[1])
    run = net.start(folder=folder, workers=1)
    run.put("x", 2)
    run.close()
    whole = (folder / "journal").read_bytes()
    run = Net.resume(folder, net=net, workers=1)
    run.put("x", 3)
    run.close()
    with (folder / "journal").open("r+b") as file:
        file.truncate(len((folder / "journal").read_bytes()) - 3)
    with Net.resume(folder, net=net, workers=1) as run:
        assert run.marking() == {"x": [1, 2]}
    assert (folder / "journal.cut").stat().st_size > 0
    (folder / "journal").write_bytes(whole[:5])
    with pytest.raises(PetriError, match="is damaged"):
        Net.resume(folder, net=net)


def test_a_full_disk_stops_the_run_as_it_was_last_written(folder: Path):
    net = Net("full")
    x, y = net.place("x", bytes), net.place("y", bytes)
    net.add("grow", x >> y, lambda data: data * 1000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with net.start(folder=folder, workers=1) as run:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            run.put(x, b"a" * 1000)
            with pytest.raises(PetriError, match=r"The disk under the journal in .* is full") as caught:
                run.wait(HANG)
            assert caught.value.remedy == "Free some room and resume it."
            assert run.marking() == {"x": [b"a" * 1000], "y": []}
            with pytest.raises(PetriError, match="is full"):
                run.put(x, b"b")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with Net.resume(folder, net=net, workers=1) as run:
        assert run.wait(HANG) == {"x": [], "y": [b"a" * 1_000_000]}


def test_a_run_that_nobody_is_to_resume_commits_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    commits: list[int] = []
    monkeypatch.setattr(os, "fdatasync", commits.append)
    net = Net("discarded")
    numbers, squares = net.place("numbers", int), net.place("squares", int)

    @net.transition(numbers >> squares)
    def square(number):
        return number * number

    for is_discarded in (True, False):
        with net.start(folder=folder / str(is_discarded)) as run:
            if is_discarded:
                run.discard()
            run.put(numbers, *range(20))
            assert len(run.wait(HANG)["squares"]) == 20
        assert bool(commits) != is_discarded


def test_what_tasks_print_is_stored_up_to_a_limit(folder: Path):
    net = Net("loud")
    x, y = net.place("x", int, tokens=[30]), net.place("y", int)

    @net.transition(x >> y)
    def shout(mebibytes):
        print("first words")
        for _ in range(mebibytes):
            print("a" * (1 << 20))
        return mebibytes

    lines: list[str] = []
    with net.start(folder=folder, workers=1) as run:
        assert run.follow(0.01, lines.append) == {"x": [], "y": [30]}
        run.close()
    output = (folder / "output.log").read_bytes()
    assert output.startswith(b"first words\naaa") and len(output) < (17 << 20)
    assert b"the rest is dropped" in output[-100:]
    assert any("Workers print a lot" in line for line in run.notices)
    assert any("shout 1" in line for line in lines)


def test_tokens_come_while_it_runs_and_large_ones_too(folder: Path):
    net = Net("stream")
    x, y = net.place("x", bytes), net.place("y", int)
    net.add("length", x >> y, len)
    with net.start(folder=folder) as run:
        threads = [
            threading.Thread(target=lambda: [run.put(x, b"a" * 300_000) for _ in range(10)]) for _ in "ab"
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert run.wait(HANG)["y"] == [300_000] * 20


def test_tasks_behind_a_long_one_move_to_an_idle_worker(folder: Path):
    net = Net("long")
    x, y = net.place("x", int), net.place("y", int)
    gate = folder.parent / "gate"
    os.mkfifo(gate)

    @net.transition(x >> y)
    def maybe_long(value):
        if value == 500:
            gate.open("rb").close()  # until the test has seen all others
        return value

    with net.start(folder=folder, workers=2) as run:
        run.put(x, *range(50))
        run.wait(HANG)
        run.put(x, *range(500, 900))
        with run._changed:
            run._watchers += 1
            assert run._changed.wait_for(lambda: run.fired["maybe_long"] == 449, HANG)
        gate.open("wb").close()
        assert len(run.wait(HANG)["y"]) == 450


def make_circle(record: Path) -> tuple[Net, list[str]]:
    """A token goes round, and says in a file which process moved it."""
    net = Net("circle")
    names = [f"p{number}" for number in range(4)]
    places = [net.place(name, int, entry=True) for name in names]
    end = net.place("end", int)

    def move(value: int) -> int:
        with record.open("a") as file:
            file.write(f"{value}\n")
        return value + 1

    for number in range(3):
        net.add(f"t{number}", places[number] >> places[number + 1], move)
    net.add("again", places[3] >> places[0], move, guard=lambda value: value < 400)
    net.add("leave", places[3] >> end, guard=lambda value: value >= 400)
    return net, names


def test_a_chain_makes_each_step_once(folder: Path, tmp_path: Path):
    """Workers make its steps by themselves, and the journal has each of them."""
    record = tmp_path / "record"
    net, _ = make_circle(record)
    with net.start(folder=folder, workers=2) as run:
        run.put("p0", 0)
        assert len(run.wait(HANG)["end"]) == 1
        assert run.fired["t0"] == run.fired["t2"] == run.fired["again"] + 1
    lines = [int(line) for line in record.read_text().split()]
    assert lines == list(range(len(lines)))
    with Net.resume(folder, net=net, workers=1) as run:
        assert sum(map(len, run.wait(HANG).values())) == 1


def test_a_step_of_a_chain_that_fails_is_reported_as_itself(folder: Path):
    net = Net("broken")
    places = [net.place(name, int) for name in "abcd"]
    net.add("first", places[0] >> places[1], lambda x: x)
    net.add("second", places[1] >> places[2], lambda x: 1 // (x - 30) * 0 + x)
    net.add("third", places[2] >> places[3], lambda x: os._exit(3) if x == 40 else x)
    with net.start(folder=folder, workers=1) as run:
        for value in range(30):
            run.put("a", value)
            run.wait(HANG)
        run.put("a", 30)
        with pytest.raises(PetriError, match="Transition second failed: ZeroDivisionError"):
            run.wait(HANG)
        assert run.marking()["b"] == [30]
    net.bind("second", lambda x: x)
    with Net.resume(folder, net=net, workers=1) as run:
        assert sorted(run.wait(HANG)["d"]) == list(range(31))
        for value in (41, 42, 43, 40):
            run.put("a", value)
            with contextlib.suppress(PetriError):
                run.wait(HANG)
        with pytest.raises(
            PetriError, match="Transition third ended its worker 4 times or more, at last by code 3"
        ):
            run.wait(HANG)
        assert run.marking()["c"] == [40]


def test_new_runs_get_folders_of_their_own(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = Net("folders")
    net.place("x", tokens=[1])
    for number in (1, 2):
        with net.start(workers=1) as run:
            assert run.folder == tmp_path / f"folders-{number}"


def test_the_journal_counts_starts(tmp_path: Path):
    journal = Journal(tmp_path, {"places": ["x"], "net": "n"}, [(0, b"a"), (0, b"b")])
    journal.write([(2, [1])])
    journal.write([(2, [1]), (3, [2], [(0, b"c")])])
    journal.close()
    journal = Journal(tmp_path, {"places": ["w", "x"], "net": "n"}, [])
    assert {n: (p, t.data, t.attempts) for n, (p, t) in journal.state.tokens.items()} == {
        1: (1, b"a", 2),
        3: (1, b"c", 0),
    }
    assert journal.state.next_number == 4
    journal.close()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(carme_runtime.__file__).parents[1])}


def test_a_run_that_does_not_end_in_time_names_its_tasks(folder: Path):
    net = Net("endless")
    a = net.place("a", int, tokens=[1])
    begun = folder.with_name("begun")
    os.mkfifo(begun)

    @net.transition(a >> None)
    def endless(value: int) -> None:
        begun.open("w").close()
        threading.Event().wait()

    with net.start(1, folder=folder) as run:
        begun.open().close()
        with pytest.raises(
            PetriError, match=r"still runs after 0 s: tasks of endless \(1\)\. .*close the run"
        ):
            run.wait(0)
    with net.start(1, folder=folder, resume=True, checked=False) as run:
        assert run.marking() == {"a": [1]}
        begun.open().close()
