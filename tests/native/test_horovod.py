"""Horovod's calls over the runtime's own core, against single processes."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import carme_runtime.horovod as hvd
from patience import HANG

PROGRAMS = Path(__file__).parent / "programs"

SCALED = ("prescale_factor", "postscale_factor")
SET = "process_set"
REDUCED = ("tensor", "average", "name", "op", *SCALED, SET)
GROUPED = ("tensors", *REDUCED[1:])
# As Horovod documents them.
CALLS = {
    "allreduce": ("tensor", "average", "name", "compression", "op", *SCALED, SET),
    "allreduce_": REDUCED,
    "allreduce_async": REDUCED,
    "allreduce_async_": REDUCED,
    "grouped_allreduce": ("tensors", "average", "name", "compression", "op", *SCALED, SET),
    "grouped_allreduce_": GROUPED,
    "grouped_allreduce_async": GROUPED,
    "grouped_allreduce_async_": GROUPED,
    "allgather": ("tensor", "name", SET),
    "allgather_async": ("tensor", "name", SET),
    "grouped_allgather": ("tensors", "name", SET),
    "grouped_allgather_async": ("tensors", "name", SET),
    "broadcast": ("tensor", "root_rank", "name", SET),
    "broadcast_": ("tensor", "root_rank", "name", SET),
    "broadcast_async": ("tensor", "root_rank", "name", SET),
    "broadcast_async_": ("tensor", "root_rank", "name", SET),
    "alltoall": ("tensor", "splits", "name", SET),
    "alltoall_async": ("tensor", "splits", "name", SET),
    "reducescatter": ("tensor", "name", "compression", "op", *SCALED, SET),
    "reducescatter_async": ("tensor", "name", "op", *SCALED, SET),
    "grouped_reducescatter": ("tensors", "name", "compression", "op", *SCALED, SET),
    "grouped_reducescatter_async": ("tensors", "name", "op", *SCALED, SET),
    "sparse_allreduce_async": ("tensor", "name", "op", SET),
    "synchronize": ("handle",),
    "poll": ("handle",),
    "join": ("device",),
    "barrier": (SET,),
    "broadcast_parameters": ("params", "root_rank"),
    "broadcast_optimizer_state": ("optimizer", "root_rank", "model"),
    "broadcast_object": ("obj", "root_rank", "name", SET),
    "allgather_object": ("obj", "name", SET),
    "DistributedOptimizer": (
        "optimizer", "named_parameters", "compression", "backward_passes_per_step", "op",
        "gradient_predivide_factor", "num_groups", "groups", "sparse_as_dense",
    ),
}  # fmt: skip
TOPOLOGY = {
    "init", "shutdown", "is_initialized", "rank", "size", "local_rank", "local_size", "cross_rank",
    "cross_size", "is_homogeneous",
}  # fmt: skip
BUILT = {
    "mpi_built", "mpi_enabled", "mpi_threads_supported", "gloo_built", "gloo_enabled", "nccl_built",
    "cuda_built", "rocm_built", "ccl_built", "ddl_built",
}  # fmt: skip

NODES = [[0], [0, 0], [0, 0, 0], [0, 1], [0, 0, 1]]
NAMES = ["1 rank", "2 ranks", "3 ranks", "2 ranks on 2 nodes", "3 ranks on 2 nodes"]


def test_the_public_names():
    for name, expected in CALLS.items():
        assert tuple(inspect.signature(getattr(hvd, name)).parameters) == expected, name
    rest = {
        "Average", "Sum", "Adasum", "Min", "Max", "Product", "Compression", "SyncBatchNorm", "elastic",
        "HorovodInternalError", "ProcessSet", "add_process_set", "remove_process_set", "global_process_set",
    }  # fmt: skip
    assert tuple(inspect.signature(hvd.init).parameters) == ("comm", "process_sets")
    assert set(hvd.__all__) == TOPOLOGY | BUILT | rest | set(CALLS)


@pytest.mark.parametrize("nodes", NODES, ids=NAMES)
def test_operations(launcher, nodes):
    per_node = ",".join(str(nodes.count(node)) for node in sorted(set(nodes)))
    launcher.run("horovod_operations", nodes, per_node)


@pytest.mark.parametrize("nodes", [[0, 0], [0, 0, 1]], ids=["one node", "two nodes"])
def test_no_name_is_given_to_two_operations_at_once(launcher, nodes):
    launcher.run("horovod_names", nodes, "two nodes" if any(nodes) else "one node")


@pytest.mark.parametrize("nodes", NODES, ids=NAMES)
@pytest.mark.parametrize("kind", ["plain", "join"])
def test_training_is_that_of_one_process(launcher, nodes, kind):
    launcher.run("horovod_training", nodes, kind)


@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 1]], ids=["one node", "two nodes"])
@pytest.mark.parametrize(
    "kind",
    [
        "adam",
        "clip",
        "passes",
        "set passes",
        "skip",
        "amp",
        "early",
        "fp16",
        "sum",
        "predivide",
        "unused",
        "lbfgs",
        "scheduler",
        "sparse",
        "mistakes",
    ],
)
def test_ways_to_train(launcher, nodes, kind):
    launcher.run("horovod_training", nodes, kind)


def test_training_goes_on_without_a_lost_rank(tmp_path):
    program = str(PROGRAMS / "elastic_training.py")
    command = [sys.executable, "-m", "carme_runtime.launcher.command", "-n", "3", "--max-restarts", "1"]
    saved = {name: text for name, text in os.environ.items() if not name.startswith(("SLURM", "CARME"))}
    environment = saved | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    run = subprocess.run(
        [*command, program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Restart 1 of 1: 2 ranks go on, 3 there were before." in run.stderr
    began = re.findall(r"BEGAN start (\d) epoch (\d) of (\d), loss ([\d.]+|inf)", run.stdout)
    assert began[:3] == [("0", "0", "3", "inf")] * 3
    again = began[3:]
    # Rank 1 was lost in epoch 5: the commit before that one may not have been complete.
    assert set(re.findall(r"READ by (\d)", run.stdout)) == {"0"}, run.stdout
    assert len(again) == 2 and again[0] == again[1] and again[0][:3] in (("1", "4", "2"), ("1", "5", "2"))
    ended = re.findall(r"ENDED with 2 ranks, callbacks \['reset'\], loss ([\d.]+)", run.stdout)
    assert len(ended) == 2 and float(ended[0]) < float(again[0][3])
    assert list(tmp_path.iterdir()) == []
