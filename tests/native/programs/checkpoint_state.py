"""Saves (argument 1: save) or loads a checkpoint in the folder of argument 2, and says what the state is."""

# pyright: reportMissingImports=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false

import hashlib
import os
import resource
import sys

import torch
import torch.distributed as dist

import carme_runtime.torch  # noqa: F401
from carme_runtime.checkpoint import Checkpoints, files
from carme_runtime.checkpoint import checkpoints as limits

how, folder = sys.argv[1:]
if int(os.environ["WORLD_SIZE"]) > 1:
    dist.init_process_group("carme")
torch.manual_seed(0 if how == "save" else 1)
model = torch.nn.Sequential(torch.nn.Linear(33, 77), torch.nn.BatchNorm1d(77), torch.nn.Linear(77, 1))
model.register_buffer("small", torch.randn(5).to(torch.bfloat16))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
checkpoints = Checkpoints(folder)
if how == "different":
    checkpoints.save(1, tensor=torch.ones(3 + dist.get_rank())).wait()
elif how.startswith("full disk"):
    # Nobody gets tired of waiting for the others: who does not hear of the failure hangs.
    limits._AT_LEAST = 3600.0
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == int(how[-1]):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most[1]))
    try:
        checkpoints.save(1, tensor=torch.ones(10000))
        checkpoints.wait()
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
    resource.setrlimit(resource.RLIMIT_FSIZE, most)
    dist.barrier()
    checkpoints.save(2, tensor=torch.ones(10000)).wait()
    dist.destroy_process_group()
    sys.exit()
elif how == "no memory":
    if dist.get_rank() == 1:

        def read(*_):
            raise MemoryError

        files.read = read
    checkpoints.load()
elif how == "save":
    assert checkpoints.resume(model=model) is None
    for step in range(3):
        model(torch.randn(8, 33)).sum().backward()
        optimizer.step()
        scheduler.step()
        saving = checkpoints.save(
            step, model=model, optimizer=optimizer, scheduler=scheduler, seen=[step, "a"]
        )
        with torch.no_grad():  # the next step must not show in the file
            saved = [p.clone() for p in model.parameters()]
            for p in model.parameters():
                p.add_(1)
        saving.wait()
        assert saving.done()
        for p, k in zip(model.parameters(), saved, strict=True):
            p.data.copy_(k)
else:
    values = checkpoints.resume(model=model, optimizer=optimizer, scheduler=scheduler)
    assert values == {"step": 2, "seen": [2, "a"]}, values
assert scheduler.last_epoch == 3
state = [*model.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values())]
digest = hashlib.sha256(b"".join(t.detach().double().numpy().tobytes() for t in state))
print("STATE", digest.hexdigest())
if dist.is_initialized():
    dist.destroy_process_group()
