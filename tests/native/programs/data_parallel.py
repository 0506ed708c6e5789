"""An ordinary script for PyTorch's ways of data-parallel training; says what the model became.

Arguments: the backend; ddp, no_sync (DDP that adds up two passes), static_graph, sparse (DDP over an
embedding whose gradient has few rows), join (DDP with uneven inputs), fp16_hook or powersgd_hook (DDP with
one of PyTorch's ways to compress), zero (DDP and ZeroRedundancyOptimizer), fsdp, or fully_shard (FSDP of
today). The last two with +bf16 compute in bfloat16 and add gradients in float32, with +bf16_sums they add
them in bfloat16, too.
"""

# pyright: reportOptionalMemberAccess=false, reportMissingImports=false, reportPrivateImportUsage=false

import contextlib
import hashlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

backend, kind = sys.argv[1:]
how, _, mixed = kind.partition("+")
computing = torch.bfloat16 if mixed else None
adding = {"bf16": torch.float32, "bf16_sums": torch.bfloat16}.get(mixed)
torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group(backend)
rank = dist.get_rank()
norm = torch.nn.LayerNorm if mixed else torch.nn.BatchNorm1d
model = torch.nn.Sequential(
    torch.nn.Linear(64, 256), norm(256), torch.nn.ReLU(), torch.nn.Linear(256, 256),
    torch.nn.ReLU(), torch.nn.Linear(256, 10),
)  # fmt: skip
if how == "sparse":

    class Words(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(300, 64, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.words((x[:, :8].abs() * 20).long() % 300).mean(1)

    model.insert(0, Words())
if how == "fsdp":
    precision = MixedPrecision(param_dtype=computing, reduce_dtype=adding)
    wrapped: torch.nn.Module = FSDP(model, device_id=torch.device("cpu"), mixed_precision=precision)
elif how == "fully_shard":
    wrapped = model
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=computing, reduce_dtype=adding)
    if mixed:  # in parts, as large models are
        fully_shard(model[3], mesh=mesh, mp_policy=policy)
    fully_shard(wrapped, mesh=mesh, mp_policy=policy)
else:
    wrapped = ddp = DDP(model, bucket_cap_mb=1, static_graph=how == "static_graph")
    if how == "fp16_hook":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif how == "powersgd_hook":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
if how == "zero":
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
else:
    momentum = 0.0 if how == "sparse" else 0.9  # which is not for sparse gradients
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=momentum)
data = torch.Generator().manual_seed(rank)
steps = 5 if how != "join" else 5 + 3 * rank


def add_gradients():
    x = torch.randn(32, 64, generator=data)
    y = torch.randint(0, 10, (32,), generator=data)
    outputs = wrapped(x)
    assert outputs.dtype == (computing or torch.float32)
    loss = torch.nn.functional.cross_entropy(outputs, y)
    loss.backward()


def step():
    optimizer.zero_grad()
    if isinstance(wrapped, DDP) and how == "no_sync":
        with wrapped.no_sync():
            add_gradients()
    add_gradients()
    optimizer.step()


with contextlib.ExitStack() as stack:
    if isinstance(wrapped, DDP) and how == "join":
        stack.enter_context(wrapped.join())
    for _ in range(steps):
        step()
if how == "fsdp":
    with FSDP.summon_full_params(wrapped):
        state = torch.cat([p.detach().flatten() for p in wrapped.parameters()])
else:
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in wrapped.parameters()]
    state = torch.cat([p.detach().flatten() for p in whole])
assert state.dtype == torch.float32 and state.isfinite().all()
dist.barrier()
if rank == 0:
    print("RESULT", hashlib.sha256(state.numpy().tobytes()).hexdigest())
dist.destroy_process_group()
