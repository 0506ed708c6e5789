"""The start of training while the model still travels."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from carme_runtime.torch.arrivals import Arrivals
from patience import HANG

from .two_agents import Job


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=["one node", "two nodes"])
@pytest.mark.parametrize("what", ["overlap", "uses", "divided"])
def test_a_model_is_used_while_it_travels(launcher, nodes, what):
    launcher.run("streamed", nodes, what)


def test_three_ranks_on_unlike_nodes_stream(launcher):
    launcher.run("streamed", [0, 0, 1], "uses")


def test_a_start_that_does_not_exist_is_refused(launcher):
    launcher.run("streamed", [0, 0], "mistakes")


@pytest.mark.timeout(4 * HANG)
@pytest.mark.parametrize("what", ["overlap", "orders", "mistakes"])
def test_rank_0_reads_a_checkpoint_that_travels_while_it_is_used(launcher, what, tmp_path):
    launcher.run("streamed_checkpoint", [0, 0], "save", str(tmp_path / "run"))
    launcher.run("streamed_checkpoint", [0, 1], what, str(tmp_path / "run"))


@pytest.mark.timeout(4 * HANG)
def test_a_checkpoint_that_rank_0_reads_holds_to_a_limit_of_memory(launcher, tmp_path):
    launcher.run("streamed_checkpoint", [0, 1], "limited", str(tmp_path / "run"))


@pytest.mark.timeout(4 * HANG)
def test_ranks_that_join_get_the_checkpoint_of_those_that_saved_it(launcher, tmp_path):
    launcher.run("streamed_checkpoint", [0, 0], "save", str(tmp_path / "run"))
    launcher.run("streamed_checkpoint", [0, 0, 1], "orders", str(tmp_path / "run"))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.close()


@pytest.mark.timeout(5 * HANG)
def test_ranks_of_a_node_that_comes_back_get_what_rank_0_reads(job: Job, tmp_path: Path) -> None:
    """A run loses a node and goes on without it, and with it when it is there again."""
    program = Path(__file__).parent / "programs" / "streamed_restarts.py"
    run = job.launch("-n", "4", "--max-restarts", "1", str(program), str(tmp_path / "run"))
    assert run.stdout
    watchdog = threading.Timer(4 * HANG, run.kill)
    watchdog.start()
    try:
        seen = ""
        for waiting, action in ((4, job.second.kill), (2, job.join)):
            end = seen.count("WAITS") + waiting
            while seen.count("WAITS") < end:
                line = run.stdout.readline()
                assert line, seen
                seen += line
            action()
        seen += run.stdout.read()
        assert run.wait() == 0, seen
    finally:
        watchdog.cancel()
    assert "Restart 1 of 1: 2 ranks go on, 4 there were before." in seen, seen
    assert "A node has come: 4 ranks go on, 2 there were before." in seen, seen
    found = re.findall(r"GOES ON start 2, (\d) of 4, has read (\d)", seen)
    assert sorted(found) == [("0", "1"), ("1", "0"), ("2", "0"), ("3", "0")], seen


@pytest.mark.timeout(4 * HANG)
@pytest.mark.parametrize("nodes", [[0, 1], [0, 1, 0, 1]], ids=["2 stages", "2 replicas of 2 stages"])
def test_the_first_step_of_a_pipeline_runs_while_parameters_travel(launcher, nodes):
    ranks = launcher.start("pipeline_streamed", nodes, "2")
    assert ranks.finish(3 * HANG) == [0] * len(nodes), ranks.output()


def test_pytorch_before_2_5_loads_a_state_after_what_travels(monkeypatch):
    """It has the private name alone, in all versions."""
    monkeypatch.delattr(nn.Module, "register_load_state_dict_pre_hook", raising=False)
    model = nn.Sequential(nn.Linear(1, 1))
    arrivals = Arrivals(model)
    arrivals.travel(model.parameters(), lambda: [p.data.fill_(7) for p in model.parameters()])
    state = {"0.weight": torch.full((1, 1), 3.0), "0.bias": torch.full((1,), 3.0)}
    model.load_state_dict(state)
    assert not arrivals.travelling
    assert [float(p.detach()) for p in model.parameters()] == [3, 3]
    arrivals.remove()


@pytest.mark.timeout(4 * HANG)
@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
@pytest.mark.parametrize("what", ["equal", "overlap", "once", "mistakes"])
def test_a_keras_model_trains_while_its_weights_travel(launcher, monkeypatch, backend, what):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    ranks = launcher.start("keras_streamed", [0, 1], what)
    assert ranks.finish(3 * HANG) == [0, 0], ranks.output()


@pytest.mark.timeout(7 * HANG)
@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_keras_goes_on_from_a_checkpoint_that_rank_0_reads(launcher, monkeypatch, tmp_path, backend):
    """Also on a rank that had no part in it."""
    monkeypatch.setenv("KERAS_BACKEND", backend)
    for what, nodes in (("save", [0, 1]), ("resume", [0, 1, 1])):
        ranks = launcher.start("keras_streamed", nodes, what, str(tmp_path / "run"))
        assert ranks.finish(3 * HANG) == [0] * len(nodes), ranks.output()


@pytest.mark.timeout(4 * HANG)
def test_a_compiled_model_has_all_that_travels(launcher):
    launcher.run("streamed", [0, 1], "compiled")
