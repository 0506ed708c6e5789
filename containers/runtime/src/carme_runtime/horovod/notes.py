"""What ranks that have joined learn of each operation, so that they can take part in it."""

# As in torch/backend.py.
# pyright: reportMissingImports=false

import torch

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.horovod.process_sets import Members
from carme_runtime.horovod.world import world

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip

# What the journal calls them.
ALLREDUCE, BUCKET, BROADCAST, ALLGATHER, ALLTOALL, REDUCESCATTER, BARRIER = range(1, 8)
NAMES = {4: "allgather", 3: "broadcast", 5: "alltoall", 6: "reducescatter", 7: "barrier"}


def note(members: Members | None, *entry: int, form: str = "") -> None:
    """Send the ranks that have joined what this one begins; nothing where some ranks do it by themselves.

    Args:
        members: Of the operation; None: all ranks.
        entry: What it is, and at most three numbers.
        form: What ranks compare of its tensors.
    """
    journal = world().journal
    if journal and (members is None or members.group is None):
        journal.note(*entry, form=form)


def number_of_type(tensor: torch.Tensor) -> int:
    """The journal's number of a type. Raises InvalidCall for those that cannot be sent."""
    try:
        return DTYPES.index(tensor.dtype)
    except ValueError:
        raise InvalidCall(
            f"Elements of type {tensor.dtype} cannot be sent.", "Convert to a common type, such as float32."
        ) from None
