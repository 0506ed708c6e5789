"""The `torch.distributed` backend."""

import re
import signal

import pytest


def result(ranks):
    found = re.search(r"RESULT (\w+)", ranks.outputs[0])
    assert found, ranks.said()
    return found[1]


@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 1]], ids=["one node", "two nodes"])
def test_all_collectives(launcher, nodes):
    launcher.run("torch_collectives", nodes)


@pytest.mark.timeout(480)  # ranks are started three times, and may take 150 seconds each time
@pytest.mark.parametrize("how", ["ddp", "join", "zero", "fsdp", "fully_shard"])
def test_unmodified_scripts_train_as_on_gloo(launcher, how):
    launcher.preload = "carme_runtime.torch"
    ours = [result(launcher.run("data_parallel", nodes, "carme", how)) for nodes in ([0, 0], [0, 1])]
    gloo = result(launcher.run("data_parallel", [0, 0], "gloo", how))
    # Of two summands the order does not matter, so not a bit may differ.
    assert ours == [gloo, gloo]


@pytest.mark.parametrize("nodes", [[0, 0], [0, 0, 1]], ids=["one node", "two nodes"])
@pytest.mark.parametrize(
    "kind", ["plain", "accumulate", "clip", "overlap", "bf16", "uneven", "unused", "copies"]
)
def test_parallelize_trains_as_one_process_does(launcher, nodes, kind):
    launcher.run("parallel", nodes, kind)


def test_optimizers_step_as_without_parallelize(launcher):
    launcher.run("late_parameters", [0])


@pytest.mark.parametrize("kind", ["wire bf16", "wire int8"])
def test_few_bits_on_the_wire_train_nearly_alike(launcher, kind):
    launcher.run("parallel", [0, 1], kind)


@pytest.mark.parametrize(
    ("nodes", "missing"), [([0, 0, 0], 0), ([0, 0, 1], 1)], ids=["the first of one node", "one of two nodes"]
)
def test_monitored_barrier_names_who_comes_too_late(launcher, tmp_path, nodes, missing):
    (tmp_path / "left").mkdir()
    ranks = launcher.run("monitored_barrier", nodes, str(missing), "late", str(tmp_path / "left"))
    for rank in {0, 1, 2} - {missing}:
        assert f"ERROR Rank {missing} did not come to monitored_barrier within 1 s." in ranks.outputs[rank]


@pytest.mark.parametrize(
    ("nodes", "missing"), [([0, 0, 0], 1), ([0, 1, 1], 0)], ids=["one node", "the first of two nodes"]
)
def test_monitored_barrier_names_who_was_lost(launcher, tmp_path, nodes, missing):
    (tmp_path / "left").mkdir()
    ranks = launcher.start("monitored_barrier", nodes, str(missing), "lost", str(tmp_path / "left"))
    codes = ranks.finish()
    assert codes == [-signal.SIGKILL if rank == missing else 17 for rank in range(3)], ranks.said()
    for rank in {0, 1, 2} - {missing}:
        assert f"ERROR Rank {missing} was lost during monitored_barrier." in ranks.outputs[rank]


def test_parallelize_says_which_ranks_have_another_model(launcher):
    ranks = launcher.start("parallel", [0, 0], "different")
    assert all(code != 0 for code in ranks.finish())
    assert "The models of rank 0 and rank 1 differ from parameter number 0 on" in ranks.said()


def test_gradients_reuse_the_memory_of_those_before(launcher):
    found = re.search(r"FAULTS (\d+)", launcher.run("freed_memory", [0, 0]).outputs[0])
    # Each of the six gradients alone has 2200 pages.
    assert found and int(found[1]) < 500
