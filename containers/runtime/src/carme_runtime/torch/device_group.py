"""The group of all ranks for tensors on GPUs, called as the core's groups are for those on the host."""

# As in backend.py.
# pyright: reportMissingImports=false, reportArgumentType=false

from typing import Any

import torch
import torch.distributed as dist

from carme_runtime.collectives import Group

__all__ = ["DeviceGroup"]

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.AVG}


class DeviceGroup:
    """All ranks of the run. Requests for host tensors are the core's group's.

    Args:
        host: The core's, of all ranks.
    """

    def __init__(self, host: Group) -> None:
        self._host = host
        self.size, self.index = host.size, host.index

    def reduce_scatter(
        self, own: torch.Tensor, blocks: torch.Tensor, op: str, *, timeout: int, asynchronous: bool = False
    ) -> Any:
        """Reduce `blocks`; this rank gets its own one."""
        return dist.reduce_scatter_tensor(own, blocks, _OPERATIONS[op], async_op=asynchronous)

    def allgather(
        self,
        whole: torch.Tensor,
        own: torch.Tensor,
        *,
        timeout: int = -1,
        asynchronous: bool = False,
        **options: Any,
    ) -> Any:
        """Bring the blocks of all ranks to all."""
        if not whole.is_cuda:
            return self._host.allgather(whole, own, timeout=timeout, asynchronous=asynchronous, **options)
        return dist.all_gather_into_tensor(whole, own, async_op=asynchronous)

    def broadcast(self, tensor: torch.Tensor, root: int, *, timeout: int, asynchronous: bool = False) -> Any:
        """Give all ranks the root's tensor."""
        return dist.broadcast(tensor, root, async_op=asynchronous)

    def plan_allreduce(self, memory: torch.Tensor, op: str, limit: int) -> "_Repeated":
        """A reduction of this memory that can be repeated."""
        return _Repeated(memory, op)


class _Repeated:
    def __init__(self, memory: torch.Tensor, op: str) -> None:
        self._memory, self._op = memory, _OPERATIONS[op]

    def run(self) -> None:
        """Run it now."""
        dist.all_reduce(self._memory, self._op)

    def start(self) -> Any:
        """Begin in the background."""
        return dist.all_reduce(self._memory, self._op, async_op=True)
