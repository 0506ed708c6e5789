"""New ranges: what they begin with, and the room that they take."""

import pickle
import struct
import types
from pathlib import Path

import numpy as np
import pytest

from carme_runtime.petri import Net, PetriError, Range, placing, store
from patience import HANG

pytestmark = pytest.mark.usefixtures("shared")


def test_a_range_begins_with_the_content_that_it_is_given(folder: Path):
    net = Net("content")
    arrays, sums = net.place("arrays", Range), net.place("sums", list)

    @net.transition(arrays >> sums)
    def add(array):
        return [str(array.array().dtype), array.array().tolist()]

    given = np.arange(6, dtype="int32").reshape(2, 3)
    with net.start(1, folder=folder) as run:
        created = run.memory.allocate("given", given.shape, given.dtype, content=given)
        given[:] = 0  # it is a copy
        with pytest.raises(PetriError, match="The content of range less has 24 bytes, and it is to hold 48"):
            run.memory.allocate("less", 12, "int32", content=given)
        for content in (given.T, types.SimpleNamespace(dtype="int32", nbytes=24)):
            with pytest.raises(PetriError, match="does not lie in one piece"):
                run.memory.allocate("columns", (3, 2), "int32", content=content)
        assert list(run.memory) == ["given"]
        run.put(arrays, created)
        marking = run.wait(HANG)
    assert marking["sums"] == [["int32", [[0, 1, 2], [3, 4, 5]]]]


def test_room_of_deleted_ranges_is_there_again_and_is_counted_no_matter_who_was_killed(folder: Path):
    net = Net("room")
    net.place("x", int)
    with net.start(1, folder=folder, memory=1 << 20) as run:
        memory = run.memory
        for number in range(20):
            created = memory.allocate(f"large-{number}", 700_000)
            assert memory.cost(created.name)[1] == 0, "it lies on the disk"
            created.close()
            memory.delete(created)
        first = memory.allocate("first", 700_000)
        (first.path.parent / ".lock").write_bytes(struct.pack("<q", -1))  # as when a process is killed there
        second = memory.allocate("second", 700_000)
        assert (memory.cost("first")[1], memory.cost("second")[1]) in ((0, 700_000), (700_000, 0))
        second.close()


def test_types_that_buffers_do_not_know_are_content_too(folder: Path):
    given = np.array(["2026-11-27", "2026-11-28"], "datetime64[D]")
    net = Net("times")
    net.place("x", int)
    with net.start(1, folder=folder) as run:
        created = run.memory.allocate("times", given.shape, given.dtype, content=given)
        assert (created.array() == given).all()
        created.close()


def test_a_range_that_was_given_up_while_it_was_filled_is_not_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    net = Net("interrupted")
    net.place("x", int)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with net.start(1, folder=folder) as run:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(store, "write_all", interrupt)
            run.memory.allocate("given", 4, content=b"abcd")
        created = run.memory.allocate("given", 4, content=b"abcd")
        assert bytes(created.buffer) == b"abcd"
        run.memory.delete(created)
        assert list(run.memory) == []


def test_a_range_of_another_run_is_not_deleted(folder: Path):
    net, second_net = Net("own"), Net("other")
    net.place("x", int)
    second_net.place("x", int)
    with net.start(1, folder=folder) as run, second_net.start(1, folder=folder.parent / "other") as second:
        created = run.memory.allocate("shared", 4)
        with pytest.raises(PetriError, match="Range shared is one of another run"):
            second.memory.delete(created)
        created.buffer[:] = b"abcd"
        created.close()


def test_the_ranges_of_a_token_of_an_earlier_version_are_found(folder: Path):
    net = Net("earlier")
    net.place("x", Range)
    with net.start(1, folder=folder) as run:
        token = pickle.dumps([run.memory.allocate("a", 4)], 3)
    named = b"carme_runtime.petri.range_files\n", b"carme_runtime.petri.store\n"
    assert named[0] in token
    assert placing._names_in(token) == placing._names_in(token.replace(*named)) == ["a"]
