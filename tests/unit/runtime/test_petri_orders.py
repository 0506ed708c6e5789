"""Ranges whichever of several processes comes first: each order is forced here."""

import contextlib
import fcntl
import mmap
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from carme_runtime.petri import Memory, Net, PetriError, Range, serving, store
from carme_runtime.petri.ranges import lasting
from carme_runtime.petri.serving import RangeServer
from carme_runtime.petri.store import Description, Store
from patience import HANG

pytestmark = pytest.mark.usefixtures("shared")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def run_store(folder: Path, tmp_path: Path) -> Iterator[Store]:
    """The ranges of a run without the run."""
    found = Store("0123", folder, 1 << 26, [tmp_path / "scratch"])
    found.begin()
    yield found
    found.end()
    found.let_go()


def _create(where: Store, description: Description) -> Path:
    """A new range that nobody has open."""
    store.unlock(where.create(description))
    found = where.find(description.name)
    assert found
    return found[0]


def fill(description: Description, data: bytes, where: Store) -> Path:
    path = _create(where, description)
    path.write_bytes(data)
    return path


def deleting(kind: type = Range) -> Net:
    """A net whose task deletes the range that it is given, alone or in a tuple."""
    net = Net("deleting")
    x, y = net.place("x", kind), net.place("y", str)

    @net.transition(x >> y)
    def delete(given, memory):
        try:
            memory.delete(given if isinstance(given, Range) else given[1][0])
        except PetriError as error:
            return error.message
        return "deleted"

    return net


def test_a_task_may_delete_what_lies_deep_in_its_token(folder: Path):
    with deleting(tuple).start(1, folder=folder) as run:
        given = run.memory.allocate("given", 8)
        array = given.array()
        run.put("x", (1, [given]))
        assert run.wait(HANG)["y"] == ["deleted"]
        array[0] = 1  # what the program has of it stays


def test_a_task_may_delete_what_another_program_has_put(folder: Path):
    with deleting().start(1, folder=folder) as run, Net.attach(folder) as attached:
        run.memory.allocate("given", 8).close()
        given = Memory.at(folder)["given"]
        given.hold()
        attached.put("x", given)
        assert run.wait(HANG)["y"] == ["deleted"]


def test_a_token_that_is_refused_stays_the_programs(folder: Path):
    with deleting(tuple).start(1, folder=folder) as run:
        given = run.memory.allocate("given", 8)
        with pytest.raises(PetriError, match="cannot be pickled"):
            run.put("x", (given, threading.Lock()))
        assert store.is_mapped(given.path)


def test_a_task_may_delete_what_its_guard_has_read(folder: Path):
    net = deleting()
    net.transitions["delete"].guard = lambda given: given.buffer[0] == 1
    with net.start(1, folder=folder) as run:
        given = run.memory.allocate("given", 1)
        given.buffer[0] = 1
        run.put("x", given)
        assert run.wait(HANG)["y"] == ["deleted"]


def test_what_one_object_closes_another_of_the_same_range_does_not_keep(folder: Path):
    net = Net("twice")
    x, y, z = net.place("x", int), net.place("y", int), net.place("z", str)
    pair: list[Range] = []

    @net.transition(x >> y)
    def use(value, memory):
        pair.extend([memory["there"], memory["there"]])
        for each in pair:
            each.hold()
        pair[1].close()
        return value

    @net.transition(y >> z)
    def delete(value, memory):
        memory.delete("there")
        return "deleted"

    with net.start(1, folder=folder, checked=False) as run:
        run.memory.allocate("there", 8).close()
        run.put(x, 1)  # after the program has closed it: a task would find it mapped
        assert run.wait(HANG)["z"] == ["deleted"]


def test_what_another_task_maps_is_not_deleted_wherever_it_was_moved_just_before(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    net = Net("moved")
    net.add("t", net.place("x") >> None, print)
    with net.start(1, folder=folder, spill=tmp_path / "scratch") as run, contextlib.ExitStack() as last:
        memory = run.memory
        memory.allocate("there", 8).close()
        spill, begin = run._ranges.store.spills[0], memory._begin

        def move_and_map() -> None:
            begin()
            spill.mkdir(mode=0o700, parents=True)
            store.move(run._ranges.store.shared, spill, "there")
            file = last.enter_context((spill / "there").open("rb"))
            fcntl.flock(file, fcntl.LOCK_SH)

        monkeypatch.setattr(memory, "_begin", move_and_map)
        with pytest.raises(PetriError, match="another task or the program has it mapped"):
            memory.delete("there")


def test_what_another_net_saves_of_a_lost_range_goes_when_the_net_ends(folder: Path, shared: Path):
    with Net("lost").start(1, folder=folder) as run:
        run.memory.allocate("single", 8).close()
        ranges, elsewhere = run._ranges, Store(run.memory.identity, folder, 1 << 20, [], "n2")
        elsewhere.begin()
        store.move(ranges.store.shared, elsewhere.shared, "single")
        ranges.holders.homes["single"], ranges.holders.copies["single"] = ["n2"], {"n2": 0}
        assert ranges.take_message("lost", "n2") == ["single"]
        # The next net on that node, which has found all processes of this run dead.
        elsewhere.let_go()
        store.sweep("", lambda *_: {"single"} if elsewhere.shared.exists() else set())
        assert list(Memory.at(folder)) == ["single"]
    assert list(Memory.at(folder)) == []
    assert lasting(folder, elsewhere.identity, ranges.store.node) == set(), "nor is it saved after the end"


def test_what_moves_to_the_disk_meanwhile_is_among_all_ranges(
    run_store: Store, monkeypatch: pytest.MonkeyPatch
):
    _create(run_store, Description("moved", 8, "net"))
    run_store.spills[0].mkdir(mode=0o700, parents=True)
    read = store.descriptions_in

    def look_and_move(folder: Path) -> list[Description]:
        found = read(folder)
        if (run_store.shared / "moved").exists():
            store.move(run_store.shared, run_store.spills[0], "moved")
        return found

    monkeypatch.setattr(store, "descriptions_in", look_and_move)
    assert list(run_store.descriptions()) == ["moved"]


def test_ranges_that_are_made_within_milliseconds_have_different_ages(
    run_store: Store, monkeypatch: pytest.MonkeyPatch
):
    """The oldest go to the disk first; times of files are alike for milliseconds on many systems."""
    names, write = [f"range-{number}" for number in range(10)], Path.write_text

    def write_in_the_same_moment(path: Path, text: str) -> int:
        written = write(path, text)
        os.utime(path, ns=(1, 1))
        return written

    monkeypatch.setattr(Path, "write_text", write_in_the_same_moment)
    for name in names:
        _create(run_store, Description(name, 1, "net"))
    ages = [(run_store.shared / f".range-{name}").stat().st_mtime_ns for name in names]
    assert ages == sorted(set(ages))


def test_a_process_that_is_forked_meanwhile_does_not_keep_the_lock_of_a_reader(
    run_store: Store, monkeypatch: pytest.MonkeyPatch
):
    path = _create(run_store, Description("there", 8, "net"))
    reading, writing = os.pipe()
    children: list[int] = []
    take = store._take

    def take_and_fork(file: int) -> bool:
        taken = take(file)
        if not (child := os.fork()):
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
        children.append(child)
        return taken

    with monkeypatch.context() as patched:
        patched.setattr(store, "_take", take_and_fork)
        assert not store.is_mapped(path)
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(children[0], 0)


def test_nothing_comes_into_shared_memory_that_is_removed(
    run_store: Store, shared: Path, monkeypatch: pytest.MonkeyPatch
):
    _create(run_store, Description("there", 8, "net"))
    remove = shutil.rmtree

    def remove_while_others_make(folder: Path, **options: Any) -> None:
        with pytest.raises(FileNotFoundError):
            (run_store.shared / ".new-late").touch()
        with run_store.locked():
            pass
        remove(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", remove_while_others_make)
    run_store.end()
    assert list(shared.iterdir()) == []


def test_what_a_killed_removal_has_left_is_freed_by_the_next_net(
    run_store: Store, shared: Path, monkeypatch: pytest.MonkeyPatch
):
    _create(run_store, Description("there", 8, "net"))
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda folder, **_: (folder / ".alive").unlink())
        run_store.end()
    assert len(list(shared.iterdir())) == 1
    store.sweep("", lambda *_: set())
    assert list(shared.iterdir()) == []


@pytest.mark.parametrize("error", [EOFError, ConnectionResetError, KeyboardInterrupt])
def test_a_copy_that_does_not_come_whole_leaves_nothing(run_store: Store, error: type[BaseException]):
    def break_off(mapped: mmap.mmap) -> None:
        raise error

    with pytest.raises(error):
        run_store.receive(Description("half", 8, "net"), break_off)
    assert not (run_store.shared / ".new-half").exists() and run_store.find("half") is None


def test_a_copy_from_a_node_that_stands_still_is_given_up(run_store: Store, monkeypatch: pytest.MonkeyPatch):
    """Its system accepts the connection, and says that the other end lives."""
    monkeypatch.setattr(serving, "_STILL", 1)
    server = RangeServer(run_store, "127.0.0.1", bytes(32), lambda *_: None)
    found: list[bool] = []
    try:
        with socket.create_server(("127.0.0.1", 0)) as still:
            pull = threading.Thread(
                target=lambda: found.append(server.pull("there", 1, still.getsockname())), daemon=True
            )
            pull.start()
            pull.join(HANG)
            assert found == [False]
    finally:
        server.close()


def test_a_range_that_another_node_copies_can_be_deleted(
    run_store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its bytes come nevertheless; whether they still count the coordinator says."""
    data = bytes(range(256)) * (1 << 17)  # more than a connection takes at once
    path = fill(Description("there", len(data), "net"), data, run_store)
    second_store = Store("0123", folder, 1 << 26, [], "n2")
    second_store.begin()
    servers = [
        RangeServer(each, "127.0.0.1", bytes(32), lambda *_: None) for each in (run_store, second_store)
    ]
    receive = second_store.receive

    def delete_and_receive(*given: Any) -> None:
        assert not store.is_mapped(path)
        run_store.remove("there")
        receive(*given)

    monkeypatch.setattr(second_store, "receive", delete_and_receive)
    try:
        assert servers[1].pull("there", 1, servers[0].where)
        found = second_store.find("there")
        assert found and found[0].read_bytes() == data and run_store.find("there") is None
    finally:
        for each in servers:
            each.close()
        second_store.end()
        second_store.let_go()
