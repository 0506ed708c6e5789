"""Saves (argument 1: save) or loads the checkpoint of a model that FSDP divides, and says what the state is.

Argument 2: fully_shard, wrapped (by the older FSDP), wrapped_parameters (the same with use_orig_params), or
plain; 3: the folder.
"""

# pyright: reportMissingImports=false, reportOptionalSubscript=false, reportPrivateImportUsage=false

import hashlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard

import carme_runtime.torch  # noqa: F401
from carme_runtime.checkpoint import Checkpoints
from carme_runtime.collectives.errors import InvalidCall

how, kind, folder = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("carme")
torch.manual_seed(0 if how == "save" else 1)
# No dimension can be divided evenly, and the bias of one element not at all.
model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(33, 77), torch.nn.Tanh(), torch.nn.Linear(77, 1))
model.unused = torch.nn.Parameter(torch.randn(7))
model.register_buffer("small", torch.randn(5).to(torch.bfloat16))
if kind == "fully_shard":
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
elif kind != "plain":
    model = FSDP(model, device_id=torch.device("cpu"), use_orig_params=kind == "wrapped_parameters")
optimizer = torch.optim.Adam(model.parameters(), lr=0.01 if how == "save" else 0.5, amsgrad=True)
data = torch.randn(4, 8, 33, generator=torch.Generator().manual_seed(3))


def train(number):
    optimizer.zero_grad()
    (model(data[number]) ** 2).sum().backward()
    optimizer.step()


def whole():
    """Names and values of all that the model and the optimizer have."""
    options = StateDictOptions(full_state_dict=True)
    found: dict[str, Any] = dict(get_model_state_dict(model, options=options))
    entries: Any = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    found |= {f"{name} {key}": value for name, entry in entries.items() for key, value in entry.items()}
    return {name: found[name].detach().double() for name in sorted(found)}


checkpoints, later = Checkpoints(folder), Checkpoints(f"{folder}-later")
if how == "save":
    assert checkpoints.resume(model=model, optimizer=optimizer) is None
    for number in range(3):
        train(number)
        checkpoints.save(number, model=model, optimizer=optimizer, seen=[number])
    checkpoints.wait()
    if kind.startswith("wrapped"):
        try:
            checkpoints.save(9, optimizer=optimizer)
        except InvalidCall as error:
            assert "The parameters of the optimizer 'optimizer' belong to a Fully" in str(error), error
        else:
            raise AssertionError("an optimizer alone was saved")
else:
    assert checkpoints.steps() == [2, 1, 0]
    values = checkpoints.resume(model=model, optimizer=optimizer)
    assert values == {"step": 2, "seen": [2]}, values
    assert optimizer.param_groups[0]["lr"] == 0.01
digest = hashlib.sha256(b"".join(name.encode() + value.numpy().tobytes() for name, value in whole().items()))
print("STATE", digest.hexdigest())
train(3)  # on the same data on all ranks, so that their number makes no difference
if how == "save":
    later.save(0, **whole()).wait()
else:
    # What has no part in the loss has no gradient, or one of zeros where the older FSDP holds it with others.
    found, wanted = (
        {name: value for name, value in state.items() if not name.startswith("unused")}
        for state in (whole(), later.load()[1])
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-7)
dist.destroy_process_group()
