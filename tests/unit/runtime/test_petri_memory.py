"""Ranges of memory that tasks of a net share: what they live through, and what is left of them."""

import errno
import fcntl
import gc
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest

import carme_runtime
from carme_runtime.petri import Memory, Net, PetriError, Range, store
from patience import HANG

pytestmark = pytest.mark.usefixtures("shared")


def test_an_array_is_handed_over_without_a_copy(folder: Path):
    net = Net("handover")
    sizes, arrays, sums = net.place("sizes", int), net.place("arrays", Range), net.place("sums", tuple)

    @net.transition(sizes >> arrays)
    def fill(size, memory):
        created = memory.allocate(f"array-{size}", (size, 2), "float64")
        created.array()[:, 1] = np.arange(size)
        return created

    @net.transition(arrays >> sums)
    def add(array, memory):
        found = array.array()
        mapped = Path("/proc/self/maps").read_text().count(array.name)
        memory.delete(array)
        return array.name, found.shape, float(found.sum()), mapped

    with net.start(1, folder=folder) as run:
        run.put(sizes, 1000, 5)
        marking = run.wait(HANG)
        assert list(run.memory) == []
    assert sorted(marking["sums"]) == [
        ("array-1000", (1000, 2), 499500.0, 1),
        ("array-5", (5, 2), 10.0, 1),
    ]


def test_ranges_of_tasks_end_with_them_and_those_that_are_to_last_outlive_the_net(folder: Path, shared: Path):
    net = Net("lifetimes")
    x, y = net.place("x", int, tokens=[7]), net.place("y", list)

    @net.transition(x >> y)
    def make(value, memory):
        for lifetime in ("task", "net", "kept"):
            memory.allocate(lifetime, 8, lifetime=lifetime).buffer[0] = value
        return list(memory)

    with net.start(folder=folder) as run:
        assert run.wait(HANG)["y"] == [["kept", "net", "task"]]
        assert list(run.memory) == ["kept", "net"]
        assert run.memory.cost("kept")[1] == 0
    assert list(shared.iterdir()) == []
    lasting = Memory.at(folder)
    assert list(lasting) == ["kept"] and lasting["kept"].buffer[0] == 7
    assert lasting.cost("kept")[1] == 8
    with pytest.raises(PetriError, match="allocated and deleted by its tasks"):
        lasting.allocate("more", 1)
    with Net.resume(folder, net=net) as run:
        assert run.memory["kept"].array().tolist() == [7] + [0] * 7
        run.memory.delete("kept")
    assert not (folder / "memory").exists()


def test_what_a_failed_or_killed_task_has_changed_is_undone(folder: Path):
    net = Net("killed")
    x, y = net.place("x", int), net.place("y", list)

    @net.transition(x >> y, retries=2)
    def swap(value, memory, attempt):
        old = memory["old"].array().tolist()
        memory.delete("old")
        memory.allocate("new", 1).buffer[0] = attempt
        if attempt == 1:
            raise ValueError("in the middle")
        if attempt == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return old

    with net.start(1, folder=folder) as run:
        given = run.memory.allocate("old", 3)
        given.buffer[:] = b"abc"
        given.close()
        run.put(x, 1)
        assert run.wait(HANG)["y"] == [list(b"abc")]
        assert list(run.memory) == ["new"] and run.memory["new"].buffer[0] == 3


def test_any_program_maps_a_range_by_its_path(folder: Path):
    net = Net("programs")
    meshes, solved, sums = net.place("meshes", Range), net.place("solved", Range), net.place("sums", int)
    program = (
        "import mmap, sys; file = open(sys.argv[1], 'r+b'); memory = mmap.mmap(file.fileno(), 0); "
        "memory[:] = bytes(2 * each for each in memory[:])"
    )
    net.transition(
        [sys.executable, "-c", program, "{meshes}"], meshes >> solved, gives="{meshes}", name="solve"
    )
    net.add("add", solved >> sums, lambda mesh: int(mesh.array().sum()))
    with net.start(1, folder=folder) as run:
        mesh = run.memory.allocate("mesh", 4)
        mesh.array()[:] = [1, 2, 3, 4]
        run.put(meshes, mesh)
        assert run.wait(HANG)["sums"] == [20]
    with pytest.raises(PetriError, match=r"Command true gives '\{stdout\}' to a place of ranges"):
        net.transition("true", meshes >> solved)


def test_beyond_the_limit_ranges_go_to_the_disk(folder: Path, tmp_path: Path):
    net = Net("spill")
    x, y = net.place("x", int), net.place("y", Range)
    net.add("make", x >> y, make_range)
    with net.start(1, folder=folder, memory=3 << 20, spill=tmp_path / "scratch") as run:
        run.put(x, *range(5))
        ranges = run.wait(HANG)["y"]
        where = [run.memory.cost(each.name)[0].rpartition(", ")[2] for each in ranges]
        assert where == ["disk", "disk", "memory", "memory", "memory"]
        assert [int(each.array()[-1]) for each in ranges] == list(range(5))
        assert {run.memory[each.name].path.parent.parent for each in ranges[:2]} == {tmp_path / "scratch"}
    assert list((tmp_path / "scratch").iterdir()) == []


def make_range(value: int, memory: Memory) -> Range:
    created = memory.allocate("", "1MiB")
    created.buffer[-1] = value
    return created


@pytest.mark.parametrize(
    ("action", "sentence"),
    [
        (lambda m: m["none"], "There is no range none: it was never allocated, or deleted."),
        (lambda m: m.delete("none"), "There is no range none"),
        (lambda m: m.allocate("there", 4), "There is a range there already."),
        (lambda m: m.allocate("a/b", 4), "'a/b' is not a valid name of a range."),
        (lambda m: m.allocate("", 0), "0 is not a valid size of range"),
        (lambda m: m.allocate("", "much"), "'much' is not a valid size of range"),
        (lambda m: m.allocate("", 4, "thing"), "'thing' is not a valid type of the elements"),
        (lambda m: m.allocate("", 4, lifetime="task"), "'task' is no lifetime of a range here."),
        (lambda m: m.allocate("large", "900TiB"), "Range large of 921600.00 GiB is too large"),
        (lambda m: m.open("there", "float64"), "holds |u1 of shape (8,), not <f8 of shape (8,)."),
        (lambda m: m.open("there", shape=(2, 4)), "not |u1 of shape (2, 4)."),
    ],
)
def test_an_error_is_one_sentence(folder: Path, action, sentence: str):
    net = Net("wrong")
    net.add("t", net.place("x") >> None, print)
    with net.start(1, folder=folder) as run:
        run.memory.allocate("there", 8)
        with pytest.raises(PetriError) as caught:
            action(run.memory)
        assert sentence in caught.value.message and caught.value.remedy
        assert list(run.memory) == ["there"]


def test_a_range_that_another_maps_is_not_deleted(folder: Path):
    net = Net("mapped")
    x, y = net.place("x", Range), net.place("y", str)

    @net.transition(x >> y)
    def drop(given, memory):
        try:
            memory.delete(given)
        except PetriError as error:
            return error.message
        try:
            return str(given.buffer[0])
        except PetriError as error:
            return error.message

    with net.start(1, folder=folder) as run:
        given = run.memory.allocate("shared", 8)
        held = run.memory["shared"]
        held.hold()
        run.put(x, given)
        assert run.wait(HANG)["y"] == [
            "Range shared cannot be deleted: another task or the program has it mapped."
        ]
        held.close()
        run.put(x, given)
        assert run.wait(HANG)["y"][1:] == ["Range shared was deleted by this task."]
        with pytest.raises(PetriError, match="There is no range shared"):
            given.hold()


def test_a_range_of_a_task_is_no_token(folder: Path):
    net = Net("short")
    x, y = net.place("x", int, tokens=[1]), net.place("y", Range)
    net.add("give", x >> y, lambda x, memory: memory.allocate("short", 8, lifetime="task"))
    with (
        net.start(1, folder=folder) as run,
        pytest.raises(PetriError, match="Range short ends with its task"),
    ):
        run.wait(HANG)
    net.bind("give", lambda x, memory: memory.allocate("long", 8))
    with Net.resume(folder, net=net, workers=1) as run:
        assert [each.name for each in run.wait(HANG)["y"]] == ["long"]


def test_the_example_of_the_documents_runs(tmp_path: Path, shared: Path):
    text = (Path(__file__).parents[3] / "docs/users/petri-nets.md").read_text()
    found = re.search(r"```python\n# average\.py\n(.*?)```", text, re.DOTALL)
    assert found
    code = found[1].replace("/scratch/me", str(tmp_path / "scratch")).replace("8GiB", "64MiB")
    code = f"from carme_runtime.petri import store; store.SHARED = store.Path({str(shared)!r})\n{code}"
    (tmp_path / "average.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(Path(carme_runtime.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "average.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    means = json.loads(done.stdout.splitlines()[-1])
    assert [round(mean, 2) for mean in means] == [0.5, 0.5, 0.5]


def test_what_is_lost_with_a_machine_is_named_and_what_is_elsewhere_is_not_lost(
    folder: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
):
    net = Net("machines")
    net.add("t", net.place("x") >> None, print)
    with pytest.raises(KeyError), net.start(1, folder=folder) as run:
        run.memory.allocate("there", 8)
        raise KeyError
    (there,) = shared.iterdir()
    there.rename(shared.with_name(f"{shared.name}-away"))
    here = socket.gethostname()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "elsewhere")
        with pytest.raises(PetriError, match=f"Range there of this run is in the memory of {here}"):
            Net.resume(folder, net=net, workers=1)
    for path in shared.iterdir():  # as at the start of a machine
        shutil.rmtree(path)
    shared.with_name(f"{shared.name}-away").rename(there)
    run = Net.resume(folder, net=net, workers=1)
    assert not run.notices and list(run.memory) == ["there"]
    assert run.memory.cost("there") == (f"{here}, memory", 0)
    run._broken_off = True
    run.close()
    shutil.rmtree(there)
    with Net.resume(folder, net=net, workers=1) as run:
        assert run.notices == ["Range there was lost with the memory of this node."]
        assert list(run.memory) == []


def test_a_full_disk_leaves_ranges_that_are_to_last_where_they_are(folder: Path):
    net = Net("full")
    net.add("t", net.place("x") >> None, print)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with net.start(1, folder=folder) as run:
            run.memory.allocate("lasting", 200_000, lifetime="kept").buffer[-8:] = b"12345678"
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert run.notices == [
        "Range lasting of 195 KiB stays in the memory of this node until the run is resumed: File too large."
    ]
    Net.resume(folder, net=net, workers=1).close()
    assert bytes(Memory.at(folder)["lasting"].buffer[-8:]) == b"12345678"


def test_a_net_that_lives_is_left_alone(folder: Path, tmp_path: Path):
    nets = [Net("one"), Net("two")]
    for net in nets:
        net.add("t", net.place("x", int) >> None, lambda x, memory: memory["there"].hold())
    with nets[0].start(1, folder=folder) as first:
        first.memory.allocate("there", 8).close()
        with nets[1].start(1, folder=tmp_path / "two") as second:
            second.memory.allocate("there", 8).close()
            second.put("x", 1)
            second.wait(HANG)
        first.put("x", 1)
        first.wait(HANG)


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_files_of_the_user_beside_ranges_stay(folder: Path, mode: int):
    folder.mkdir()
    (folder / "memory").mkdir(mode=mode)
    for name in ("notes.txt", "taken", "old"):
        (folder / "memory" / name).write_text("mine")
    net = Net("beside")
    x, y = net.place("x", int), net.place("y", list)
    net.add("make", x >> y, lambda value, memory: [memory.allocate("old", 8, lifetime="net").name, *memory])
    with net.start(1, folder=folder) as run:
        run.memory.allocate("taken", 8, lifetime="kept").buffer[0] = 1
        run.memory.allocate("free", 8, lifetime="kept").buffer[0] = 2
        run.put(x, 1)
        assert run.wait(HANG)["y"] == [["old", "free", "old", "taken"]]
    held = (
        "it must be this user's alone (chmod 700)"
        if mode == 0o755
        else f"{folder}/memory/taken is in its way"
    )
    assert (
        f"Range taken of 8 B stays in the memory of this node until the run is resumed: {held}."
        in run.notices
    )
    for name in ("notes.txt", "taken", "old"):
        assert (folder / "memory" / name).read_text() == "mine"
    (folder / "memory" / "taken").unlink()
    (folder / "memory").chmod(0o700)
    with Net.resume(folder, net=net, workers=1) as run:
        run.memory.delete("free")
    assert {path.name for path in (folder / "memory").iterdir()} == {
        "notes.txt",
        "old",
        "taken",
        ".range-taken",
    }
    assert bytes(Memory.at(folder)["taken"].buffer)[0] == 1


def foreign(folder: Path, kind: str) -> None:
    """Make a folder that another user could write."""
    if kind == "a link":
        folder.with_name("elsewhere").mkdir(mode=0o700)
        folder.symlink_to(folder.with_name("elsewhere"))
        return
    folder.mkdir(mode=0o700)
    if kind == "open":
        folder.chmod(0o777)
    else:
        os.chown(folder, 12345, 12345)


@pytest.mark.parametrize("kind", ["open", "a link", "another's"])
def test_a_folder_that_others_may_write_is_not_used(folder: Path, tmp_path: Path, kind: str):
    if kind == "another's" and os.getuid() != 0:
        pytest.skip("Only root gives folders away.")
    net = Net("foreign")
    net.add("t", net.place("x") >> None, print)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with net.start(1, folder=folder, memory=1 << 20, spill=scratch) as run:
        run.memory.allocate("first", "1MiB").buffer[0] = 5
        foreign_folder = scratch / f"carme-net-{run.memory.identity}"
        foreign(foreign_folder, kind)
        mark = (run.memory["first"].path.parent / ".range-first").read_text()
        (foreign_folder / ".range-second").write_text(mark.replace("first", "second", 1))
        (foreign_folder / "second").write_bytes(bytes(1 << 20))
        assert list(run.memory) == ["first"] and "second" not in run.memory
        with pytest.raises(PetriError, match=r"must be this user's alone") as caught:
            run.memory.allocate("third", "1MiB")
        assert str(foreign_folder) in caught.value.message
        assert run.memory["first"].buffer[0] == 5
    assert {path.name for path in foreign_folder.iterdir()} == {".range-second", "second"}


def test_a_link_in_the_place_of_a_range_is_not_followed(folder: Path, tmp_path: Path):
    net = Net("link")
    net.add("t", net.place("x") >> None, print)
    target = tmp_path / "target"
    target.write_bytes(b"mine of 8")
    with net.start(1, folder=folder) as run:
        first = run.memory.allocate("first", 9)
        where = first.path.parent
        (where / "second").symlink_to(target)
        with pytest.raises(PetriError, match="File exists"):
            run.memory.allocate("second", 9)
        first.close()
        (where / "first").unlink()
        (where / "first").symlink_to(target)
        with pytest.raises(PetriError, match="There is no range first"):
            first.hold()
        (where / "second").unlink()
    assert target.read_bytes() == b"mine of 8"


def test_an_array_whose_range_is_forgotten_stays_where_it_is(folder: Path, tmp_path: Path):
    net = Net("forgotten")
    net.add("t", net.place("x") >> None, print)
    with net.start(1, folder=folder, memory=3 << 20, spill=tmp_path / "scratch") as run:
        array = run.memory.allocate("first", "1MiB").array()
        gc.collect()
        for number in range(4):
            run.memory.allocate(f"more-{number}", "1MiB").close()
        array[0] = 7
        first = run.memory["first"]
        assert first.array()[0] == 7
        assert run.memory.cost("first")[0].endswith("memory")
        assert run.memory.cost("more-0")[0].endswith("disk")
        first.close()
        with pytest.raises(PetriError, match="another task or the program has it mapped"):
            run.memory.delete("first")
        del array
        gc.collect()
        run.memory.delete("first")


def test_a_range_whose_deletion_was_refused_is_used_on(folder: Path):
    net = Net("refused")
    x, y = net.place("x", Range), net.place("y", tuple)

    @net.transition(x >> y)
    def use(given, memory):
        array = given.array()
        try:
            memory.delete(given)
        except PetriError:
            array[1] = 4
            return given.array().tolist(), store.is_mapped(given.path)
        return ()

    with net.start(1, folder=folder) as run:
        given = run.memory.allocate("shared", 2)
        given.buffer[0] = 3
        held = run.memory["shared"]
        held.hold()
        run.put(x, given)
        assert run.wait(HANG)["y"] == [([3, 4], True)]
        assert held.array().tolist() == [3, 4]


def test_a_process_that_was_forked_meanwhile_does_not_keep_the_lock(folder: Path, shared: Path):
    created = store.Store("0123", folder, 1 << 20, [])
    created.begin()
    reading, writing = os.pipe()
    try:
        with created.locked():
            child = os.fork()
            if not child:
                os.close(writing)
                os.read(reading, 1)
                os._exit(0)
        with (created.shared / ".lock").open("rb") as again:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(writing)
        os.waitpid(child, 0)
    finally:
        created.end()
        created.let_go()


@pytest.mark.skipif(os.getuid() != 0, reason="Only root gives files away.")
def test_a_journal_of_another_user_is_not_read(folder: Path):
    net = Net("theirs")
    net.add("t", net.place("x") >> None, print)
    with net.start(1, folder=folder) as run:
        run.memory.allocate("kept", 8, lifetime="kept")
    os.chown(folder / "journal", 12345, 12345)
    for action in (
        lambda: Memory.at(folder),
        lambda: Net.resume(folder, net=net),
        lambda: Net.resume(folder),
    ):
        with pytest.raises(PetriError, match="belongs to another user") as caught:
            action()
        assert caught.value.remedy == "Ask its owner for what it says."


def test_a_run_that_nobody_has_any_more_is_closed_though_its_memory_was_used(folder: Path):
    net = Net("left")
    x, y = net.place("x", int), net.place("y", int)
    net.add("t", x >> y, lambda x, memory: int(memory["shared"].array()[0]) + x)
    run = net.start(1, folder=folder)
    run.memory.allocate("shared", 1).array()[0] = 7
    run.put(x, 1)
    assert run.wait(HANG)["y"] == [8]
    coordinator = next(thread for thread in threading.enumerate() if thread.name == "carme-petri-left")
    memory = run.memory  # which does not keep it either
    del run
    gc.collect()
    coordinator.join(HANG)
    assert not coordinator.is_alive()
    with pytest.raises(PetriError, match="Nobody has the run any more"):
        memory.allocate("more", 1)
    with net.start(1, folder=folder, resume=True) as run:
        assert run.wait(HANG)["y"] == [8]


def test_the_end_of_a_run_waits_for_its_nodes_whatever_else_comes(folder: Path):
    with Net("ends").start(1, folder=folder) as run:
        ranges = run._ranges
        ranges.holders.addresses |= dict.fromkeys(["n2", "n3", "n4"], ("127.0.0.1", 1))
        lost, refused = ("lost", 1, "n3"), ("refused", "gone", "")
        messages = iter([("flood",), ("finished", "n2", ["full"]), lost, refused])
        assert ranges.finish_elsewhere(lambda: [next(messages)]) == ["full", "gone"]


def bind_when_free(server: socket.socket, address: bytes) -> None:
    """Take an address; a process that ends may hold it for a moment more."""
    deadline = time.monotonic() + HANG
    while True:
        try:
            return server.bind(address)
        except OSError as error:
            assert error.errno == errno.EADDRINUSE and time.monotonic() < deadline
            time.sleep(0.01)


def test_a_node_that_cannot_serve_its_ranges_is_named_and_nothing_stays(folder: Path):
    net = Net("served")
    x = net.place("x", int, tokens=[1])
    net.add("t", x >> net.place("y", int), lambda x, memory: x)
    net.start("job", folder=folder).close()
    before = set(threading.enumerate())
    created = store.Store(Memory.at(folder).identity, folder, 0, [])
    with socket.socket(socket.AF_UNIX) as taken:
        bind_when_free(taken, b"\0" + created.shared.name.encode()[:107])
        with pytest.raises(PetriError, match="cannot be served to other nodes at"):
            net.start("job", folder=folder, resume=True)
    assert not set(threading.enumerate()) - before
    with net.start(1, folder=folder, resume=True) as run:
        assert run.wait(HANG)["y"] == [1]


def test_the_copy_of_a_deleted_range_on_the_disk_goes_with_it(folder: Path):
    net = Net("copied")
    x, y, z = net.place("x", int), net.place("y", Range), net.place("z", list)

    @net.transition(x >> y)
    def make(value, memory):
        created = memory.allocate("twice", 1, copies=2)
        created.array()[0] = value
        return created

    @net.transition(y >> z)
    def delete(created, memory):
        memory.delete(created)
        return [path.name for path in (folder / store.COPIES).iterdir()]

    with net.start(1, folder=folder) as run:
        run.put(x, 1)
        assert sorted(run.wait(HANG)["z"][0]) == [".range-twice", "twice"]
        assert not list((folder / store.COPIES).iterdir())


def test_a_picture_outside_of_a_notebook_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    display = types.ModuleType("IPython.display")
    display.display = lambda *_, **__: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    before = set(threading.enumerate())
    with Net("pictured").start(1, folder=folder) as run, pytest.raises(PetriError, match="not a notebook"):
        run.show()
    for thread in set(threading.enumerate()) - before:
        thread.join(HANG)  # the run's own, which see only now that it is over
    assert not set(threading.enumerate()) - before


def test_a_range_of_another_node_that_was_moved_to_the_disk_is_not_lost(folder: Path):
    with Net("moved").start(1, folder=folder) as run:
        run.memory.allocate("moved", 1, lifetime="kept").close()
        ranges = run._ranges
        # As another node of a run had it, and a program there moved it when the run had no program.
        ranges.store.move_to_disk("moved")
        ranges.holders.homes["moved"] = ["n2"]
        ranges.holders.copies.clear()
        assert ranges.take_message("held", "n2", ("127.0.0.1", 1), {}) == []
        assert ranges.holders.homes["moved"] == [ranges.store.node]
        assert "moved" in run.memory
