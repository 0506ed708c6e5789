"""What the works of the carme backend say about their ends: good ones, bad ones, late ones and none."""

# pyright: reportMissingImports=false, reportOptionalMemberAccess=false

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import carme_runtime.torch  # noqa: F401
from carme_runtime.collectives.errors import GaspiError, Mismatch, Timeout
from patience import HANG

torch.set_num_threads(1)
dist.init_process_group("carme", timeout=timedelta(seconds=HANG))
rank, size = dist.get_rank(), dist.get_world_size()
tensor = torch.full((1000,), rank + 1.0)
expected = torch.full((1000,), size * (size + 1) / 2)


def over(work):
    end = time.monotonic() + HANG
    while not work.is_completed():
        assert time.monotonic() < end
        time.sleep(0.01)


work = dist.all_reduce(tensor, async_op=True)
assert work.wait()
assert work.is_completed() and work.is_success() and work.exception() is None
assert torch.equal(work.result()[0], expected) and work.result()[0].data_ptr() == tensor.data_ptr()
work.synchronize()

# One that nobody waits for says so, too; also where its result goes another way than the core's.
for given in (torch.full((3, 4), 1.0), torch.full((4, 3), 1.0).t()):
    work = dist.all_reduce(given, async_op=True)
    over(work)
    assert work.is_success() and work.exception() is None
    assert (given == size).all()

# Rank 1 comes late: waiting can be given up, and begun again.
store = dist.distributed_c10d._get_default_store()
if rank == 1:
    store.wait(["rank 0 has given up"], timedelta(seconds=HANG))
work = dist.all_reduce(tensor := torch.ones(1000), async_op=True)
if rank == 0:
    try:
        work.wait(timedelta(milliseconds=50))
    except Timeout:
        assert not work.is_completed() and not work.is_success()
    else:
        raise AssertionError("it was over before rank 1 began")
    store.set("rank 0 has given up", "")
assert work.wait() and work.is_success() and (tensor == size).all()

# Sizes differ: every call that returns the state reports the error.
subgroup = dist.new_group(list(range(size)))
work = dist.all_reduce(torch.ones(70_000 + rank), group=subgroup, async_op=True)
over(work)
assert not work.is_success()
error = work.exception()
assert isinstance(error, GaspiError), error
for ask in (work.wait, work.synchronize, work.get_future().wait):
    try:
        ask()
    except Exception as raised:
        assert str(error).split(".")[0] in str(raised), raised
    else:
        raise AssertionError("it ended well")
rest = [None] * size
dist.all_gather_object(rest, type(error).__name__)
assert Mismatch.__name__ in rest, rest

# A message that nobody sends is waited for as long as the group allows, and may still come.
limited: Any = dist.new_group(list(range(size)))
limited.set_timeout(timedelta(milliseconds=300))
if rank == 0:
    got = torch.empty(3)
    awaited = dist.irecv(got, 1, group=limited, tag=7)
    for receive, sender in (
        (lambda: dist.recv(torch.empty(3), 1, group=limited, tag=5), "rank 1"),
        (lambda: dist.recv(torch.empty(3), group=limited, tag=6), "any rank"),
        (awaited.wait, "rank 1"),
    ):
        try:
            receive()
        except Timeout as error:
            assert f"No message came from {sender} in time." in str(error), error
        else:
            raise AssertionError("nobody had sent anything")
    dist.barrier()
    assert awaited.wait(timedelta(seconds=HANG)) and (got == 7).all()
else:
    dist.barrier()
    dist.send(torch.full((3,), 7.0), 0, group=limited, tag=7)

# An end that waits for nothing, with a future that a thread of the group has completed; and a new beginning.
future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
assert (future.wait()[0] == size).all()
world = dist.group.WORLD
world.set_timeout(timedelta(seconds=HANG))
world.abort()
world.abort()
world.shutdown()
dist.destroy_process_group()
print("ENDED")
