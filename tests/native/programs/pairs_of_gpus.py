"""Two of three ranks send each other a GPU's tensor, which the third one has no part in; there is no GPU."""

# pyright: reportMissingImports=false, reportPrivateImportUsage=false

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import carme_runtime.torch  # noqa: F401
from carme_runtime.torch.gpus import GpuProcessGroup

dist.init_process_group("carme", timeout=timedelta(seconds=10))
rank = dist.get_rank()
world: Any = dist.group.WORLD
context, group = world.another_group()
store = dist.PrefixStore("gpus", dist.distributed_c10d._get_default_store())
created: Any = GpuProcessGroup(
    context, group, world.another_group()[1], [0, 1, 2], timedelta(seconds=10), store
)
staged = []
created._staged = lambda name, *_: staged.append(name)
torch.cuda.get_device_properties = lambda _: SimpleNamespace(uuid="the only one")


class OnGpu(torch.Tensor):
    is_cuda: Any = True
    device: Any = torch.device("cuda", 0)


tensor = torch.ones(3).as_subclass(OnGpu)
if rank < 2:
    getattr(created, ("send", "recv")[rank])([tensor], 1 - rank, 0)
    assert staged == [("send", "recv")[rank]]
dist.barrier()
created.allreduce([tensor])
assert staged[-1] == "allreduce"
dist.barrier()
dist.destroy_process_group()
