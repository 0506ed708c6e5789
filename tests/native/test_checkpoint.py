"""Checkpoints: the state comes back, on any number of ranks, and what is damaged or half written does not."""

# pyright: reportOptionalSubscript=false, reportGeneralTypeIssues=false, reportOptionalIterable=false

import os
import re
import sys
import time

import numpy as np
import pytest
import torch

from carme_runtime.checkpoint import Checkpoints, Damaged, files
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.errors import CarmeRuntimeError
from patience import HANG


def states(ranks):
    found = [re.search(r"STATE (\w+)", text) for text in ranks.outputs.values()]
    assert all(found), ranks.output()
    return {match[1] for match in found if match}


@pytest.mark.parametrize("writing", [[0], [0, 0, 1]], ids=["1 rank", "3 ranks on 2 nodes"])
def test_any_number_of_ranks_loads_what_others_saved(launcher, tmp_path, writing):
    folder = str(tmp_path / "a" / "checkpoints")
    saved = states(launcher.run("checkpoint_state", writing, "save", folder))
    assert len(saved) == 1
    for reading in ([0], [0, 1]):
        assert states(launcher.run("checkpoint_state", reading, "load", folder)) == saved


@pytest.mark.timeout(5 * HANG)  # ranks are started four times
@pytest.mark.parametrize("kind", ["fully_shard", "wrapped", "wrapped_parameters"])
def test_any_number_of_ranks_loads_what_fsdp_had_divided(launcher, tmp_path, kind):
    folder = str(tmp_path / "checkpoints")
    saved = states(launcher.run("checkpoint_divided", [0, 0], "save", kind, folder))
    assert len(saved) == 1
    for reading, reader in (([0, 0, 1], kind), ([0], kind), ([0], "plain")):
        assert states(launcher.run("checkpoint_divided", reading, "load", reader, folder)) == saved


def of_keras(launcher, nodes, *arguments):
    """Ranks of a program that imports Keras' backends, which takes minutes on a busy machine."""
    ranks = launcher.start("checkpoint_keras", nodes, *arguments)
    assert ranks.finish(3 * HANG) == [0] * len(nodes), ranks.output()
    return ranks


@pytest.mark.timeout(10 * HANG)
@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_any_number_of_ranks_loads_keras_models(launcher, tmp_path, monkeypatch, backend):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    folder = str(tmp_path / "checkpoints")
    saved = states(of_keras(launcher, [0, 0], "save", folder))
    assert len(saved) == 1
    for reading in ([0], [0, 0, 1]):
        assert states(of_keras(launcher, reading, "load", folder)) == saved


@pytest.mark.timeout(7 * HANG)
@pytest.mark.parametrize("saving", ["save", "save in limited memory"])
def test_keras_models_of_pytorch_are_loaded_without_it(launcher, tmp_path, monkeypatch, saving):
    folder = str(tmp_path / "checkpoints")
    for backend, what in (("torch", saving), ("tensorflow", "load")):
        monkeypatch.setenv("KERAS_BACKEND", backend)
        of_keras(launcher, [0], what, folder)


@pytest.mark.timeout(13 * HANG)
@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_keras_goes_on_where_it_was_cut_off(launcher, tmp_path, monkeypatch, backend):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    for name, writing, reading in (("more", [0, 0], [0]), ("fewer", [0], [0, 0])):
        of_keras(launcher, writing, "cut off", str(tmp_path / name))
        of_keras(launcher, reading, "go on", str(tmp_path / name))


def test_a_kill_at_any_moment_leaves_the_last_checkpoint_whole(launcher, tmp_path):
    ranks = launcher.run("checkpoint_killed", [0], str(tmp_path / "checkpoints"), "5", "15")
    assert "KILLED 15" in ranks.outputs[0]


def test_ranks_with_different_states_get_a_message(launcher, tmp_path):
    ranks = launcher.start("checkpoint_state", [0, 0], "different", str(tmp_path))
    assert ranks.finish() == [1, 1], ranks.output()
    assert "Rank 1 saved tensors of other shapes or types than rank 0 at step 1" in ranks.outputs[0]
    assert "given up by another rank" in ranks.outputs[1]
    assert Checkpoints(tmp_path).load() is None


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_write_is_heard_of_at_once(launcher, tmp_path, failing):
    """Ranks would wait for an hour for one that says nothing, and the test does not."""
    ranks = launcher.run("checkpoint_state", [0, 0], f"full disk {failing}", str(tmp_path))
    assert "OSError: [Errno 27] File too large" in ranks.outputs[failing]
    assert "Timeout: The checkpoint was given up by another rank." in ranks.outputs[1 - failing]
    assert [entry.name for entry in tmp_path.glob(".*")] == []
    assert Checkpoints(tmp_path).steps() == [2]


def test_a_rank_that_cannot_load_is_heard_of(launcher, tmp_path):
    saved(tmp_path, [1])
    ranks = launcher.start("checkpoint_state", [0, 0], "no memory", str(tmp_path))
    assert ranks.finish() == [1, 1], ranks.output()
    assert "Another rank could not load the checkpoint of step 1: MemoryError" in ranks.outputs[0]
    assert "MemoryError" in ranks.outputs[1] and "Another rank" not in ranks.outputs[1]


@pytest.mark.parametrize("names", [("RANK", "WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")])
def test_ranks_that_have_not_joined_get_a_message(tmp_path, monkeypatch, names):
    monkeypatch.delitem(sys.modules, "carme_runtime.keras.world", raising=False)
    for name in names:
        monkeypatch.setenv(name, "2")
    with pytest.raises(InvalidCall, match=r"joined the 2 ranks of its run\. Make them after parallelize"):
        Checkpoints(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def saved(folder, steps, keep=3):
    checkpoints = Checkpoints(folder, keep=keep)
    for step in steps:
        checkpoints.save(step, weights=torch.full((1000,), float(step)), name=f"step {step}")
    checkpoints.wait()
    return checkpoints


def test_the_newest_stay(tmp_path):
    checkpoints = saved(tmp_path, [1, 2, 30, 4], keep=2)
    assert checkpoints.steps() == [30, 4]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-0000000004.0", "step-0000000030.0"]
    assert checkpoints.load(4)[1]["name"] == "step 4"
    assert checkpoints.load(1) is None


def test_a_step_that_is_saved_again_replaces_the_first(tmp_path):
    saved(tmp_path, [1])
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, name="again").wait()
    assert checkpoints.steps() == [1]
    assert checkpoints.load() == (1, {"name": "again"})


def test_the_last_one_stays_whatever_its_step(tmp_path):
    saved(tmp_path, [10, 11, 12])
    assert saved(tmp_path, [4]).steps() == [12, 11, 4]


def test_training_that_went_back_does_not_go_on_from_what_it_left(tmp_path):
    saved(tmp_path, [5, 8, 9, 10], keep=4)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.resume(5)["step"] == 5
    assert checkpoints.steps() == [10, 9, 8, 5]
    checkpoints.save(6, name="again").wait()
    assert checkpoints.steps() == [6, 5]
    assert Checkpoints(tmp_path).load() == (6, {"name": "again"})


def test_a_look_at_an_earlier_one_removes_nothing(tmp_path):
    checkpoints = saved(tmp_path, [8, 9, 10])
    assert checkpoints.load(8)[0] == 8
    checkpoints.save(11).wait()
    assert checkpoints.steps() == [11, 10, 9]


def test_what_another_process_writes_is_left_alone_until_this_one_saves(tmp_path):
    saved(tmp_path, [1])
    partial = tmp_path / ".partial-0123abcd-0"
    partial.mkdir()
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load()[0] == 1
    assert partial.exists()
    checkpoints.save(2).wait()
    assert not partial.exists()


def test_what_is_being_written_is_loaded(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path, [1])
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (time.sleep(0.2), fsync(file)))
    checkpoints.save(2, name="slow")
    assert checkpoints.load() == (2, {"name": "slow"})


def test_what_is_removed_while_it_is_read_gives_way_to_what_is_newer(tmp_path, monkeypatch):
    saved(tmp_path, [1], keep=1)
    reader, writer, read = Checkpoints(tmp_path, keep=1), Checkpoints(tmp_path, keep=1), files.read

    def read_slowly(checkpoint, receiver):
        if checkpoint.name == "step-0000000001.0":
            writer.save(2, name="newer").wait()
        return read(checkpoint, receiver)

    monkeypatch.setattr(files, "read", read_slowly)
    assert reader.load() == (2, {"name": "newer"})


def test_checkpoints_of_an_earlier_run_in_the_folder_are_named_once(tmp_path, caplog):
    saved(tmp_path, [100, 200, 300])
    caplog.clear()
    saved(tmp_path, [1, 2])
    (text,) = [record.getMessage() for record in caplog.records]
    assert "has a checkpoint of step 300" in text and "use a folder of its own" in text
    caplog.clear()
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.resume()["step"] == 300
    checkpoints.save(301).wait()
    checkpoints.save(5).wait()
    assert not caplog.records


@pytest.mark.parametrize("file", ["share-0", "index"])
@pytest.mark.parametrize("how", ["changed", "cut", "gone", "empty"])
def test_what_is_damaged_is_not_loaded(tmp_path, file, how, caplog):
    checkpoints = saved(tmp_path, [1, 2])
    victim = tmp_path / "step-0000000002.0" / file
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    if how == "gone":
        victim.unlink()
    else:
        victim.write_bytes({"changed": bytes(content), "cut": bytes(content[:-1]), "empty": b""}[how])
    step, state = checkpoints.load()
    assert (step, state["name"]) == (1, "step 1")
    assert torch.equal(state["weights"], torch.ones(1000))
    assert "step-0000000002.0" in caplog.text
    with pytest.raises(Damaged, match=r"step-0000000002\.0"):
        checkpoints.load(2)


def test_all_kinds_of_tensors_come_back(tmp_path):
    tensors = {
        str(dtype): torch.arange(7).to(dtype)
        for dtype in (torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.int64)
    } | {
        "nothing": torch.empty(0, 3),
        "number": torch.tensor(3.5),
        "turned": torch.arange(6).view(2, 3).t(),
        7: (torch.ones(2), [torch.zeros(1), None, True]),
    }
    arrays = {
        "big end first": np.arange(3, dtype=">f8"),
        "turned": np.arange(6).reshape(2, 3).T,
        "no dimensions": np.array(2.5, np.float16),
        "nothing": np.empty((0, 3), bool),
    }
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, tensors=tensors, arrays=arrays, rest=tensors["turned"]).wait()
    _, state = checkpoints.load()
    torch.testing.assert_close(state["tensors"], tensors, rtol=0, atol=0)
    assert torch.equal(state["rest"], tensors["turned"])
    for name, array in arrays.items():
        assert state["arrays"][name].dtype == array.dtype
        np.testing.assert_array_equal(state["arrays"][name], array)


def test_no_tensors_at_all(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, epoch=3).wait()
    assert checkpoints.resume() == {"step": 5, "epoch": 3}


def test_what_cannot_be_saved_or_loaded_is_reported(tmp_path):
    with pytest.raises(InvalidCall, match="keep=0"):
        Checkpoints(tmp_path, keep=0)
    checkpoints = saved(tmp_path, [1])
    with pytest.raises(InvalidCall, match="takes tensors, numbers"):
        checkpoints.save(2, function=test_no_tensors_at_all)
    with pytest.raises(InvalidCall, match=r"layout torch\.sparse_coo"):
        checkpoints.save(2, tensor=torch.eye(2).to_sparse())
    with pytest.raises(InvalidCall, match="array of object"):
        checkpoints.save(2, array=np.array([{}]))
    assert checkpoints.steps() == [1]
    with pytest.raises(InvalidCall, match=r"no 'model'\. It has: weights, name"):
        checkpoints.resume(model=torch.nn.Linear(1, 1))
    (tmp_path / "file").touch()
    with pytest.raises(CarmeRuntimeError, match="cannot be used"):
        Checkpoints(tmp_path / "file")


def test_a_disk_that_fails_is_reported_at_the_next_save(tmp_path):
    checkpoints = saved(tmp_path / "folder", [1])
    (tmp_path / "folder").rename(tmp_path / "elsewhere")
    saving = checkpoints.save(2, name="lost")
    with pytest.raises(FileNotFoundError):
        saving.wait()
    (tmp_path / "elsewhere").rename(tmp_path / "folder")
    with pytest.raises(FileNotFoundError):
        checkpoints.save(3, name="x")
    checkpoints.save(3, name="x").wait()
    assert checkpoints.steps() == [3, 1]
