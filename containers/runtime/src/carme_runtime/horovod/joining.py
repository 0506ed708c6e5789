"""The end of a rank's data: it goes along with the others until they have none, either."""

# As in torch/backend.py.
# pyright: reportMissingImports=false

import torch
import torch.distributed as dist

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.horovod.notes import ALLREDUCE, BUCKET, DTYPES, NAMES
from carme_runtime.horovod.reductions import TORCH_OPS, ReduceOp
from carme_runtime.horovod.world import world
from carme_runtime.torch.flat import stating


def join(device: int = -1) -> int:
    """This rank has no more data: until all ranks say so, it takes part in their allreduces with zeros.

    Args:
        device: Number of the GPU that the others' tensors are on; -1: the host.

    Returns:
        The rank that joined last.
    """
    run = world()
    if run.journal is None:
        return 0
    place = "cpu" if device < 0 else f"cuda:{device}"
    follower = run.journal.follow()
    while (entry := follower.next()) is not None:
        kind, first, second, third = entry.numbers
        if kind == ALLREDUCE:
            zeros = torch.zeros(second, dtype=DTYPES[first], device=place)
            with stating(entry.form):
                dist.all_reduce(zeros, TORCH_OPS[ReduceOp(third)])
        elif kind == BUCKET:
            optimizer = run.optimizers.get(first)
            if optimizer is None:
                raise InvalidCall(
                    "Another rank steps with a DistributedOptimizer that this rank has let go of.",
                    "Keep the optimizer until hvd.join() returns.",
                )
            optimizer.contribute_zeros(second)
        else:
            raise InvalidCall(
                f"Another rank called {NAMES[kind]}, in which a rank that has joined cannot take part.",
                "Call it before the first rank joins.",
            )
    return follower.last()
