"""Horovod's calls over the runtime's own core, against single processes."""

import inspect

import pytest

import carme_runtime.horovod as hvd

SCALED = ("prescale_factor", "postscale_factor")
REDUCED = ("tensor", "average", "name", "op", *SCALED)
GROUPED = ("tensors", *REDUCED[1:])
# As Horovod documents them, but for process sets and MPI communicators.
CALLS = {
    "allreduce": ("tensor", "average", "name", "compression", "op", *SCALED),
    "allreduce_": REDUCED,
    "allreduce_async": REDUCED,
    "allreduce_async_": REDUCED,
    "grouped_allreduce": ("tensors", "average", "name", "compression", "op", *SCALED),
    "grouped_allreduce_": GROUPED,
    "grouped_allreduce_async": GROUPED,
    "grouped_allreduce_async_": GROUPED,
    "allgather": ("tensor", "name"),
    "allgather_async": ("tensor", "name"),
    "broadcast": ("tensor", "root_rank", "name"),
    "broadcast_": ("tensor", "root_rank", "name"),
    "broadcast_async": ("tensor", "root_rank", "name"),
    "broadcast_async_": ("tensor", "root_rank", "name"),
    "alltoall": ("tensor", "splits", "name"),
    "alltoall_async": ("tensor", "splits", "name"),
    "reducescatter": ("tensor", "name", "compression", "op", *SCALED),
    "reducescatter_async": ("tensor", "name", "op", *SCALED),
    "synchronize": ("handle",),
    "poll": ("handle",),
    "join": ("device",),
    "barrier": (),
    "broadcast_parameters": ("params", "root_rank"),
    "broadcast_optimizer_state": ("optimizer", "root_rank", "model"),
    "broadcast_object": ("obj", "root_rank", "name"),
    "allgather_object": ("obj", "name"),
    "DistributedOptimizer": (
        "optimizer", "named_parameters", "compression", "backward_passes_per_step", "op",
        "gradient_predivide_factor", "num_groups", "groups", "sparse_as_dense",
    ),
}  # fmt: skip
TOPOLOGY = {
    "init", "shutdown", "is_initialized", "rank", "size", "local_rank", "local_size", "cross_rank",
    "cross_size", "is_homogeneous",
}  # fmt: skip

NODES = [[0], [0, 0], [0, 0, 0], [0, 1], [0, 0, 1]]
NAMES = ["1 rank", "2 ranks", "3 ranks", "2 ranks on 2 nodes", "3 ranks on 2 nodes"]


def test_the_public_names():
    for name, expected in CALLS.items():
        assert tuple(inspect.signature(getattr(hvd, name)).parameters) == expected, name
    others = {"Average", "Sum", "Min", "Max", "Product", "Compression"}
    assert set(hvd.__all__) == TOPOLOGY | others | set(CALLS)


@pytest.mark.parametrize("nodes", NODES, ids=NAMES)
def test_operations(launcher, nodes):
    per_node = ",".join(str(nodes.count(node)) for node in sorted(set(nodes)))
    launcher.run("horovod_operations", nodes, per_node)


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
        "early",
        "fp16",
        "sum",
        "predivide",
        "unused",
        "lbfgs",
        "scheduler",
        "mistakes",
    ],
)
def test_ways_to_train(launcher, nodes, kind):
    launcher.run("horovod_training", nodes, kind)
