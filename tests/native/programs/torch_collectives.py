"""What `torch.distributed` offers, on the carme backend."""

# pyright: reportOptionalMemberAccess=false, reportMissingImports=false

import functools
import gc
import operator
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import carme_runtime.torch  # noqa: F401  (where it is installed, torch finds it by itself)
from carme_runtime.collectives.errors import GaspiError
from patience import HANG

torch.set_num_threads(1)
dist.init_process_group("carme", timeout=timedelta(seconds=HANG))
rank, size = dist.get_rank(), dist.get_world_size()
assert dist.get_backend() == "carme"
ranks = torch.arange(float(size))

for dtype in (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
):
    tensor = torch.ones(1000, dtype=dtype)
    dist.all_reduce(tensor)
    assert (tensor == torch.ones(1000, dtype=dtype) * (1 if dtype == torch.bool else size)).all(), dtype
tensor = torch.full((3, 5), float(rank)).t()  # not contiguous
dist.all_reduce(tensor, dist.ReduceOp.MAX)
assert (tensor == size - 1).all() and tensor.shape == (5, 3)
tensor = torch.full((4,), float(rank))
dist.all_reduce(tensor, dist.ReduceOp.AVG)
assert (tensor == (size - 1) / 2).all()
dist.reduce(tensor := torch.ones(4), 0)
assert (tensor == (size if rank == 0 else 1)).all()
dist.broadcast(tensor := torch.full((2, 2), rank, dtype=torch.int16), size - 1)
assert (tensor == size - 1).all()

uneven = [torch.empty(r + 1) for r in range(size)]
dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
assert all((part == r).all() and len(part) == r + 1 for r, part in enumerate(uneven))
dist.all_gather_into_tensor(out := torch.empty(size, 3), torch.full((1, 3), float(rank)))
assert (out == ranks[:, None]).all()
dist.reduce_scatter_tensor(out := torch.empty(3), ranks.repeat_interleave(3))
assert (out == rank * size).all()
dist.reduce_scatter(out := torch.empty(2), [torch.full((2,), float(r)) for r in range(size)])
assert (out == rank * size).all()
dist.all_to_all_single(out := torch.empty(size), torch.full((size,), float(rank)))
assert (out == ranks).all()
dist.all_to_all(parts := [torch.empty(2) for _ in range(size)], [torch.full((2,), float(rank))] * size)
assert all((part == r).all() for r, part in enumerate(parts))
gathered = [torch.empty(3) for _ in range(size)] if rank == 0 else None
dist.gather(torch.full((3,), float(rank)), gathered, 0)
assert gathered is None or all((part == r).all() for r, part in enumerate(gathered))
dist.scatter(
    out := torch.empty(3), [torch.full((3,), float(r)) for r in range(size)] if rank == 1 else None, 1
)
assert (out == rank).all()
objects: list = [None] * size
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": r} for r in range(size)]
dist.broadcast_object_list(received := [{"from": rank}], 1)
assert received == [{"from": 1}]

right, left = (rank + 1) % size, (rank - 1) % size
arrived = torch.empty(200_000)
swap = [
    dist.P2POp(dist.isend, torch.full((200_000,), float(rank)), right),
    dist.P2POp(dist.irecv, arrived, left),
]
for work in dist.batch_isend_irecv(swap):
    work.wait()
assert (arrived == left).all()

# Blocking ones, distinguished by their tags.
if rank == 0:
    for tag in (1, 2):
        dist.send(torch.full((3,), float(tag)), size - 1, tag=tag)
elif rank == size - 1:
    for tag in (2, 1):
        dist.recv(got := torch.empty(3), 0, tag=tag)
        assert (got == tag).all()

for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8):
    own = torch.full((size, 5), rank + 1, dtype=dtype)
    for op, want in (
        (dist.ReduceOp.SUM, size * (size + 1) // 2),
        (dist.ReduceOp.MIN, 1),
        (dist.ReduceOp.MAX, size),
        (dist.ReduceOp.PRODUCT, int((ranks + 1).prod())),
    ):
        dist.all_reduce(whole := own.clone(), op)
        dist.reduce_scatter_tensor(part := torch.empty(5, dtype=dtype), own, op)
        assert (whole == want).all() and (part == want).all(), (dtype, op)
    dist.all_gather_into_tensor(whole := torch.empty(size * 5, dtype=dtype), own[0])
    assert (whole.view(size, 5) == torch.arange(1, size + 1)[:, None].to(dtype)).all(), dtype
    dist.all_to_all_single(whole := torch.empty(size, 5, dtype=dtype), own)
    assert (whole == torch.arange(1, size + 1)[:, None].to(dtype)).all(), dtype

works = [dist.all_reduce(torch.ones(5000), async_op=True) for _ in range(10)]
assert all(work.wait() and work.is_completed() for work in works)
future = dist.all_reduce(tensor := torch.ones(3), async_op=True).get_future()
assert (future.wait()[0] == size).all()

# What FSDP divides gradients by, before they are added up.
halved: Any = dist.ReduceOp.PREMUL_SUM(0.5)
quartered: Any = dist.ReduceOp.PREMUL_SUM(torch.tensor(0.25))
for dtype in (torch.float32, torch.bfloat16):
    own = torch.full((size, 4), 2.0, dtype=dtype)
    dist.reduce_scatter_tensor(part := torch.empty(4, dtype=dtype), own, halved)
    assert (part == size).all() and (own == 2).all(), dtype
    dist.all_reduce(own, quartered)
    assert (own == size / 2).all(), dtype
dist.reduce(own := torch.full((5,), 2.0), 0, halved)
assert (own == (size if rank == 0 else 2)).all()
try:
    dist.all_reduce(torch.ones(3, dtype=torch.int32), halved)
except Exception as error:
    assert "PREMUL_SUM" in str(error), error
else:
    raise AssertionError("integers have no halves")

# Into parameters, which have gradients.
weight = torch.nn.Parameter(torch.empty(3))
dist.scatter(weight, [torch.full((3,), float(r)) for r in range(size)] if rank == 0 else None, 0)
assert (weight == rank).all()
dist.all_gather(weights := [torch.nn.Parameter(torch.empty(3)) for _ in range(size)], weight.detach())
assert all((w == r).all() for r, w in enumerate(weights))
weights = torch.nn.Parameter(torch.empty(3, size).t())  # not contiguous
dist.all_gather_into_tensor(weights, weight.detach())
assert (weights == ranks[:, None]).all()

# Messages arrive although nobody keeps what stands for them; the first one holds the others up.
LONG = 4_000_000
if rank == 0:
    for tag in (3, 4, 5):
        dist.isend(torch.full((LONG,), float(tag)), size - 1, tag=tag)
    gc.collect()
elif rank == size - 1:
    time.sleep(0.5)
    for tag in (3, 4, 5):
        work = dist.irecv(got := torch.empty(LONG), 0, tag=tag)
        assert work and work.wait(timedelta(seconds=HANG)) and (got == tag).all()
dist.barrier()

# Each of two threads waits as long as its argument says.
store = dist.distributed_c10d._get_default_store()
if rank == 0:
    work = dist.barrier(async_op=True)
    patient = threading.Thread(target=work.wait)
    patient.start()
    time.sleep(0.2)
    try:
        work.wait(timedelta(milliseconds=100))
    except Exception as error:
        assert "not over in time" in str(error), error
    else:
        raise AssertionError("the others had not come")
    store.set("rank 0 has given up", "")
    patient.join()
else:
    store.wait(["rank 0 has given up"], timedelta(seconds=HANG))
    dist.barrier()

backwards = dist.new_group(list(reversed(range(size))))
dist.all_gather_into_tensor(out := torch.empty(size), torch.tensor([float(rank)]), group=backwards)
ends = dist.new_group([0, size - 1])
if rank in (0, size - 1):
    dist.all_reduce(tensor := torch.tensor([float(rank)]), group=ends)
    assert tensor.item() == size - 1
# Bits, and means of integers, which are cut off as NCCL's are.
for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
    bits = [(37 + 21 * r) % 128 for r in range(size)]
    for op, want in (
        (dist.ReduceOp.BAND, functools.reduce(operator.and_, bits)),
        (dist.ReduceOp.BOR, functools.reduce(operator.or_, bits)),
        (dist.ReduceOp.BXOR, functools.reduce(operator.xor, bits)),
    ):
        own = torch.full((size, 3), bits[rank], dtype=dtype)
        dist.all_reduce(whole := own.clone(), op)
        dist.reduce_scatter_tensor(part := torch.empty(3, dtype=dtype), own, op)
        assert (whole == want).all() and (part == want).all(), (dtype, op)
    signs = (1, -1) if dtype != torch.uint8 else (1,)
    for sign in signs:
        want = int(sign * sum(bits) / size)
        own = torch.full((3, size), sign * bits[rank], dtype=dtype).t()  # not contiguous
        dist.all_reduce(whole := own.clone(), dist.ReduceOp.AVG)
        dist.reduce_scatter_tensor(part := torch.empty(3, dtype=dtype), own, dist.ReduceOp.AVG)
        dist.reduce(mean := own.clone(), 0, dist.ReduceOp.AVG)
        assert (whole == want).all() and (part == want).all(), (dtype, whole, part, want)
        assert (mean == (want if rank == 0 else sign * bits[rank])).all()
dist.all_reduce(flags := torch.tensor([True, rank == 0]), dist.ReduceOp.BAND)
assert flags.tolist() == [True, False]
for op, given, word in (
    (dist.ReduceOp.BXOR, torch.ones(3), "BXOR was requested for floating-point numbers"),
    (dist.ReduceOp.AVG, torch.ones(3, dtype=torch.bool), "mean of bool"),
):
    try:
        dist.all_reduce(given, op)
    except Exception as error:
        assert word in str(error), error
    else:
        raise AssertionError(f"{op} is not for {given.dtype}")

# From whichever rank sends first: each once, and in time.
if rank == 0:
    come = []
    for _ in range(size - 1):
        sender = dist.recv(got := torch.empty(3), tag=11)
        assert (got == sender).all()
        come.append(sender)
    assert sorted(come) == list(range(1, size))
    work = dist.irecv(got := torch.empty(2, 2).t(), tag=12)
    assert work and not work.is_completed()
    dist.barrier()
    assert work.wait() and got.tolist() == [[1, 3], [2, 4]] and work.is_completed()
    try:
        dist.recv(torch.empty(3, dtype=torch.int32), tag=13)
    except GaspiError as error:
        assert "another size or type" in str(error), error
    else:
        raise AssertionError("floats were received as integers")
else:
    dist.send(torch.full((3,), float(rank)), 0, tag=11)
    dist.barrier()
    if rank == size - 1:
        dist.send(torch.tensor([[1.0, 3.0], [2.0, 4.0]]), 0, tag=12)
        dist.send(torch.ones(3), 0, tag=13)
dist.barrier()

# Sparse tensors, with as many elements as each rank has.
rows, columns = torch.tensor([0] * rank + [4, 4]), torch.tensor([1] * rank + [0, rank + 1])
reductions: list[tuple[Any, int]] = [
    (dist.ReduceOp.SUM, 1),
    (dist.ReduceOp.AVG, size),
    (dist.ReduceOp.PREMUL_SUM(0.5), 2),
]
for op, divisor in reductions:
    values = torch.full((rank + 2, 2), rank + 1.0)
    own = torch.sparse_coo_tensor(torch.stack([rows, columns]), values, (5, size + 1, 2))
    want = own.to_dense()
    dist.all_reduce(want)
    work = dist.all_reduce(own, op, async_op=True)
    assert work and work.wait() and own.is_sparse
    torch.testing.assert_close(own.to_dense(), want / divisor)
    dist.all_reduce_coalesced([own])
    torch.testing.assert_close(own.to_dense(), want * size / divisor)
dist.all_reduce(nothing := torch.zeros(3, 2).to_sparse())
assert not nothing.to_dense().any()
dist.all_reduce(large := torch.tensor([[0, 2**60 + 1]]).to_sparse())
assert large.to_dense().tolist() == [[0, size * (2**60 + 1)]]
for given, op, word in (
    (torch.eye(2).to_sparse(), dist.ReduceOp.MAX, "reduced with max"),
    (torch.eye(2).to_sparse_csr(), dist.ReduceOp.SUM, "to_dense"),
):
    try:
        dist.all_reduce(given, op)
    except Exception as error:
        assert word in str(error), error
    else:
        raise AssertionError(f"{op} is not for {given.layout}")

# A number and a vector of one element are alike; types of one call are not mixed.
dist.broadcast(scalar := torch.tensor(5.0 + rank) if rank == 0 else torch.empty(1, 1), 0)
assert scalar.item() == 5.0
try:
    dist.all_gather_into_tensor(torch.empty(size, dtype=torch.int32), torch.ones(1))
except Exception as error:
    assert "one type" in str(error), error
else:
    raise AssertionError("float32 was gathered into int32")
dist.barrier()
dist.destroy_process_group()
