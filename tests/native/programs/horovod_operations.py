"""The collectives of `carme_runtime.horovod` against their definitions; argument 1: ranks per node."""

# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false, reportMissingImports=false

import os
import sys
import time

import torch
from torch import nn

import carme_runtime.horovod as hvd
from carme_runtime.collectives.errors import InvalidCall, Mismatch, Timeout

torch.set_num_threads(1)
assert not hvd.is_initialized()
# What scripts ask before they begin.
assert not any((hvd.mpi_built(), hvd.mpi_enabled(), hvd.gloo_built(), hvd.gloo_enabled()))
assert not any((hvd.ccl_built(), hvd.ddl_built(), hvd.mpi_threads_supported()))
assert hvd.cuda_built() == (torch.version.cuda is not None)
assert hvd.rocm_built() == (torch.version.hip is not None)
assert bool(hvd.nccl_built()) == (torch.cuda.is_available() and torch.distributed.is_nccl_available())
try:
    hvd.rank()
except InvalidCall as error:
    assert "hvd.init()" in str(error)
hvd.init()
hvd.init()
rank, size = hvd.rank(), hvd.size()
per_node = [int(text) for text in sys.argv[1].split(",")]
node = next(n for n in range(len(per_node)) if rank < sum(per_node[: n + 1]))
assert hvd.local_rank() == rank - sum(per_node[:node])
assert hvd.local_size() == per_node[node]
having = [n for n, count in enumerate(per_node) if count > hvd.local_rank()]
assert hvd.cross_size() == len(having) and hvd.cross_rank() == having.index(node)
assert hvd.is_homogeneous() == (len(set(per_node)) == 1)
total = size * (size - 1) / 2
ranks = torch.arange(float(size))


def own(shape=(3, 4), dtype=torch.float32):
    return torch.arange(12).reshape(shape).to(dtype) + rank


def base(dtype=torch.float32):
    return torch.arange(12).reshape(3, 4).to(dtype)


# allreduce
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64):
    given = own(dtype=dtype)
    result = hvd.allreduce(given, op=hvd.Sum)
    assert result.dtype == dtype and torch.equal(result, (base(dtype) * size + int(total))), dtype
    assert torch.equal(given, own(dtype=dtype)), "the input has changed"
torch.testing.assert_close(hvd.allreduce(own()), base() + total / size)
torch.testing.assert_close(hvd.allreduce(own(), average=False), base() * size + total)
assert torch.equal(hvd.allreduce(own(), op=hvd.Min), base())
assert torch.equal(hvd.allreduce(own(), op=hvd.Max), base() + size - 1)
torch.testing.assert_close(
    hvd.allreduce(torch.full((2,), rank + 1.0), op=hvd.Product), (ranks + 1).prod().expand(2)
)
torch.testing.assert_close(
    hvd.allreduce(own(), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0),
    (base() * size + total) * 1.5,
)
torch.testing.assert_close(hvd.allreduce(own(), compression=hvd.Compression.fp16), base() + total / size)
whole = -5 * base() - rank  # means and products of integers are cut off
for dtype in (torch.int16, torch.int32, torch.int64):
    sums = (-5 * base() * size - total).to(dtype)
    mean = (sums / size).to(dtype)
    assert torch.equal(hvd.allreduce(whole.to(dtype)), mean), dtype
    held = whole.to(dtype)
    assert hvd.allreduce_(held, postscale_factor=0.5) is held
    assert torch.equal(held, ((sums * 0.5).to(dtype) / size).to(dtype))
    results = hvd.grouped_allreduce([whole.to(dtype), own()], prescale_factor=1.5, op=hvd.Sum)
    halves = [(-5 * base() - r).mul(1.5).to(dtype) for r in range(size)]
    assert torch.equal(results[0], torch.stack(halves).sum(0, dtype=dtype))
    torch.testing.assert_close(results[1], (base() * size + total) * 1.5)
large = 2**60 + 1  # more digits than a double has
assert hvd.allreduce(torch.tensor([large])).tolist() == [large]
turned = own().t()
torch.testing.assert_close(hvd.allreduce(turned), (base() + total / size).t())
held = own()
assert hvd.allreduce_(held, op=hvd.Sum, name="held") is held
torch.testing.assert_close(held, base() * size + total)
held = torch.nn.Parameter(own())
hvd.allreduce_(held)
torch.testing.assert_close(held.detach(), base() + total / size)
handles = [hvd.allreduce_async(own() * n, op=hvd.Sum) for n in range(20)]
for n, handle in enumerate(handles):
    torch.testing.assert_close(hvd.synchronize(handle), (base() * size + total) * n)
handle = hvd.allreduce_async_(held := own(), op=hvd.Sum)
while not hvd.poll(handle):
    pass
assert hvd.synchronize(handle) is held
try:
    hvd.synchronize(handle)
except InvalidCall as error:
    assert "handle" in str(error)
else:
    raise AssertionError("a handle can be used twice")
for wrong in ({"op": 77}, {"op": hvd.Sum, "average": True}, {"op": hvd.Adasum}):
    try:
        hvd.allreduce(own(), **wrong)
    except ValueError:  # Horovod's own
        continue
    raise AssertionError(wrong)
group = [own(), own(dtype=torch.float64) * 2, own((12,)) * 3]
results = hvd.grouped_allreduce(group, op=hvd.Sum)
for n, (result, given) in enumerate(zip(results, group, strict=True), 1):
    assert result.dtype == given.dtype and result.shape == given.shape
    torch.testing.assert_close(result.double().view(3, 4), (base(torch.float64) * size + total) * n)
hvd.grouped_allreduce_(group)
torch.testing.assert_close(group[2], ((base() + total / size) * 3).view(12))
assert hvd.grouped_allreduce([]) == []

try:
    hvd.allreduce(torch.eye(2).to_sparse())
except InvalidCall as error:
    assert "to_dense" in str(error)
else:
    raise AssertionError("a sparse tensor was reduced")
places = torch.tensor([[0, 2, 2][: rank + 1], [1, 0, 3][: rank + 1]])
sparse = torch.sparse_coo_tensor(places, torch.ones(places.shape[1]), (3, 4))
for op, divisor in ((hvd.Sum, 1), (hvd.Average, size)):
    result = hvd.synchronize(hvd.sparse_allreduce_async(sparse, name="rows", op=op))
    assert result.is_sparse
    torch.testing.assert_close(result.to_dense(), hvd.allreduce(sparse.to_dense(), op=hvd.Sum) / divisor)
for given, op in ((sparse, hvd.Max), (own(), hvd.Sum)):
    try:
        hvd.sparse_allreduce_async(given, op=op)
    except ValueError:
        continue
    raise AssertionError((given, op))

# allgather, broadcast, alltoall, reducescatter
parts = hvd.allgather(torch.full((rank, 2), rank, dtype=torch.int16))
assert torch.equal(parts, torch.cat([torch.full((r, 2), r, dtype=torch.int16) for r in range(size)]))
assert torch.equal(hvd.allgather(torch.tensor([float(rank)])), ranks)
root = size - 1
assert torch.equal(hvd.broadcast(own(), root), base() + root)
held = torch.nn.Parameter(own())
hvd.broadcast_(held, root)
assert torch.equal(held.detach(), base() + root)
assert torch.equal(hvd.alltoall(torch.full((size, 2), float(rank))), ranks[:, None].expand(size, 2))
splits = torch.arange(size, dtype=torch.int32)
received, counts = hvd.alltoall(torch.full((int(splits.sum()),), float(rank)), splits=splits)
assert torch.equal(received, ranks.repeat_interleave(rank)) and counts.tolist() == [rank] * size
for wrong in (
    [1] * (size + 1),
    [-1] * size,
    [size + 1] * size,
    [1.0] * size,
    torch.ones(size),
    [True] * size,
):
    try:
        hvd.alltoall(torch.ones(size), splits=wrong)
    except ValueError as error:
        assert "splits" in str(error), error
        continue
    raise AssertionError(f"splits {wrong} were taken")
rows = torch.arange(2.0 * size + 1)[:, None] + rank
lengths = [2 + (r < 1) for r in range(size)]
expected = (torch.arange(2.0 * size + 1)[:, None]).split(lengths)[rank]
torch.testing.assert_close(hvd.reducescatter(rows), expected + total / size)
torch.testing.assert_close(hvd.reducescatter(rows, op=hvd.Sum), expected * size + total)
sums = expected.long() * size + int(total)
assert torch.equal(hvd.reducescatter(rows.long()), sums.div(size, rounding_mode="trunc"))
halves = [(torch.arange(2.0 * size + 1)[:, None] + r).mul(0.5).long() for r in range(size)]
result = hvd.reducescatter(rows.long(), op=hvd.Sum, prescale_factor=0.5)
assert torch.equal(result, sum(halves).split(lengths)[rank])
group = [torch.full((rank, 2), rank), torch.tensor([float(rank)])]
for results in (hvd.grouped_allgather(group), hvd.synchronize(hvd.grouped_allgather_async(group))):
    assert torch.equal(results[0], torch.cat([torch.full((r, 2), r) for r in range(size)]))
    assert torch.equal(results[1], ranks)
group = [rows, rows * 2]
handle = hvd.grouped_reducescatter_async(group, op=hvd.Sum)
while not hvd.poll(handle):
    pass
for factor, results in (
    (1 / size, hvd.grouped_reducescatter(group)),
    (1, hvd.synchronize(handle)),
    (3, hvd.grouped_reducescatter(group, op=hvd.Sum, prescale_factor=3.0)),
    (1 / size, hvd.grouped_reducescatter(group, compression=hvd.Compression.fp16)),
):
    for n, result in enumerate(results, 1):
        torch.testing.assert_close(result, (expected * size + total) * n * factor)
assert hvd.grouped_allgather([]) == hvd.grouped_reducescatter([]) == []
if size > 1:
    try:
        hvd.allgather(torch.ones(2, 3 + rank))
    except Mismatch as error:
        assert "Rank 1" in str(error)
    else:
        raise AssertionError("different rows were gathered")
try:
    hvd.broadcast(own(), size)
except InvalidCall:
    pass
else:
    raise AssertionError("there is no such root")

# gradients
x = own().requires_grad_()
hvd.allreduce(x, op=hvd.Sum).sum().backward()
assert (x.grad == size).all()
x = [own().requires_grad_(), torch.ones(2, dtype=torch.int64), own((12,), torch.float64).requires_grad_()]
for options, factor in (
    ({"op": hvd.Sum}, size),
    ({}, 1),
    ({"prescale_factor": 4.0, "compression": hvd.Compression.fp16}, 4),
):
    results = hvd.grouped_allreduce(x, **options)
    ((results[0] * 3).sum() + results[2].sum() * 2).backward()
    assert (x[0].grad == 3 * factor).all() and (x[2].grad == 2 * factor).all()
    assert x[0].grad.dtype == torch.float32 and x[2].grad.dtype == torch.float64
    x[0].grad = x[2].grad = None
with torch.no_grad():
    assert not hvd.grouped_allreduce(x)[0].requires_grad
x = torch.ones(rank + 1, 2, requires_grad=True)
(hvd.allgather(x) * (rank + 1)).sum().backward()
torch.testing.assert_close(x.grad, torch.full((rank + 1, 2), (total + size) / size))
x = own().requires_grad_()
(hvd.broadcast(x, 0) * 2).sum().backward()
assert (x.grad == (2 if rank == 0 else 0)).all()
x = torch.ones(size, 2, requires_grad=True)
(hvd.alltoall(x) * (rank + 1)).sum().backward()
assert torch.equal(x.grad, (ranks[:, None] + 1).expand(size, 2))
# Without splits, ranks may have different numbers of rows; with them, some may be kept.
x = torch.ones(size * (rank + 1), 2, requires_grad=True)
(hvd.alltoall(x) * (rank + 1)).sum().backward()
assert torch.equal(x.grad, (ranks + 1).repeat_interleave(rank + 1)[:, None].expand_as(x))
x = torch.ones(size + 3, 2, requires_grad=True)
result, counts = hvd.alltoall(x, splits=[1] * size)
(result * (rank + 1)).sum().backward()
assert torch.equal(x.grad, torch.cat([ranks + 1, torch.zeros(3)])[:, None].expand_as(x))
x = rows.clone().requires_grad_()
(hvd.reducescatter(x, op=hvd.Average) * (rank + 1)).sum().backward()
torch.testing.assert_close(x.grad, torch.cat([torch.full((n, 1), r + 1.0) for r, n in enumerate(lengths)]))

x = [torch.ones(rank + 1, 2, requires_grad=True) for _ in range(2)]
(hvd.grouped_allgather(x)[1] * (rank + 1)).sum().backward()
assert x[0].grad is None or not x[0].grad.any()
torch.testing.assert_close(x[1].grad, torch.full((rank + 1, 2), (total + size) / size))
x = [rows.clone().requires_grad_() for _ in range(2)]
(hvd.grouped_reducescatter(x)[0] * (rank + 1)).sum().backward()
torch.testing.assert_close(x[0].grad, torch.cat([torch.full((n, 1), r + 1.0) for r, n in enumerate(lengths)]))

# batch normalization over all samples; the ranks have different numbers of them
kinds = ((nn.BatchNorm1d, ()), (nn.BatchNorm1d, (5,)), (nn.BatchNorm2d, (3, 2)))
for momentum in (0.1, None):
    for kind, more in kinds:
        torch.manual_seed(5)
        alone, layer = kind(4, momentum=momentum), hvd.SyncBatchNorm(4, momentum=momentum)
        with torch.no_grad():
            for parameter, second in zip(alone.parameters(), layer.parameters(), strict=True):
                second.copy_(parameter.normal_())
        shares: list[torch.Tensor] = []
        for _ in range(3):
            shares = [torch.randn(2 + r, 4, *more) * 3 + 100 for r in range(size)]
            whole = torch.cat(shares).requires_grad_()
            share = shares[rank].clone().requires_grad_()
            weights = torch.randn(whole.shape).split([len(part) for part in shares])
            normal = alone(whole)
            result = layer(share)
            torch.testing.assert_close(result, normal.split([len(part) for part in shares])[rank])
            alone.zero_grad()
            layer.zero_grad()
            (normal * torch.cat(weights)).sum().backward()
            (result * weights[rank]).sum().backward()
            reference = whole.grad.split([len(part) for part in shares])[rank]
            torch.testing.assert_close(share.grad, reference, rtol=1e-3, atol=1e-4)
            for tested, second in zip(layer.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(
                    hvd.allreduce(tested.grad, op=hvd.Sum), second.grad, rtol=1e-3, atol=1e-4
                )
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(layer.state_dict()[name], value, rtol=1e-4, atol=1e-5)
        alone.eval()
        layer.eval()
        torch.testing.assert_close(layer(shares[rank]), alone(shares[rank]), rtol=1e-3, atol=1e-4)
half = hvd.SyncBatchNorm(4).to(torch.bfloat16)
assert half(torch.randn(3, 4).to(torch.bfloat16)).dtype == torch.bfloat16

# objects and state
assert hvd.broadcast_object({"from": rank}, root) == {"from": root}
assert hvd.allgather_object(("rank", rank)) == [("rank", r) for r in range(size)]
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
if rank == root:  # the others have no state yet
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
hvd.broadcast_parameters(model.state_dict(), root_rank=root)
hvd.broadcast_parameters(model.named_parameters(), root_rank=root)
rest = torch.nn.ParameterList([torch.full((2, 3), float(rank)), torch.full((3,), float(rank))])
hvd.broadcast_parameters(list(rest.parameters()), root_rank=root)
assert all((parameter == root).all() for parameter in rest)
hvd.broadcast_optimizer_state(optimizer, root_rank=root)
for tensor in (*model.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values())):
    everyone = hvd.allgather(tensor.reshape(1, -1).double())
    assert (everyone == everyone[0]).all()
assert len(optimizer.state) == 4 and optimizer.param_groups[0]["lr"] == 0.1 * (root + 1)
hvd.barrier()

# some of the ranks, which the others do not wait for
assert issubclass(Mismatch, hvd.HorovodInternalError) and issubclass(Timeout, hvd.HorovodInternalError)
assert not issubclass(InvalidCall, hvd.HorovodInternalError)
everybody = hvd.global_process_set
assert everybody.included() and everybody.size() == size and everybody.rank() == rank
for wrong in ([], [0, 0], [size], [-1]):
    try:
        hvd.add_process_set(wrong)
    except ValueError:
        continue
    raise AssertionError(f"a set of {wrong} was made")
ends = hvd.add_process_set(hvd.ProcessSet(sorted({0, size - 1})))
assert ends.included() == (rank in (0, size - 1)) and ends.size() == len(ends.ranks)
try:
    hvd.add_process_set(ends.ranks)
except ValueError:
    pass
else:
    raise AssertionError("one set was made twice")
if ends.included():
    here, count = ends.rank(), ends.size()
    assert ends.ranks and ends.ranks[here] == rank
    parts = torch.tensor([float(r) for r in ends.ranks])
    torch.testing.assert_close(hvd.allreduce(own(), process_set=ends), base() + parts.mean())
    assert torch.equal(hvd.allgather(torch.tensor([float(rank)]), process_set=ends), parts)
    assert torch.equal(hvd.broadcast(own(), size - 1, process_set=ends), base() + size - 1)
    assert torch.equal(hvd.alltoall(torch.full((count,), float(rank)), process_set=ends), parts)
    whole = torch.full((count, 2), rank)
    assert (hvd.reducescatter(whole, op=hvd.Sum, process_set=ends) == int(parts.sum())).all()
    assert hvd.allgather_object(rank, process_set=ends) == ends.ranks
    assert hvd.broadcast_object(rank, size - 1, process_set=ends) == size - 1
    (result,) = hvd.grouped_allreduce([torch.tensor([rank])], process_set=ends)
    assert result.tolist() == [int(parts.sum()) // count]
    hvd.barrier(ends)
    try:
        hvd.broadcast(own(), 1, process_set=ends)
    except ValueError:
        assert 1 not in ends.ranks
    else:
        assert 1 in ends.ranks
else:
    try:
        hvd.allreduce(own(), process_set=ends)
    except ValueError as error:
        assert "included()" in str(error)
    else:
        raise AssertionError("a rank outside of a set takes part")
hvd.barrier()
assert hvd.remove_process_set(ends) and not hvd.remove_process_set(ends)
assert not hvd.remove_process_set(everybody)
try:
    hvd.allreduce(own(), process_set=ends)
except ValueError as error:
    assert "add_process_set" in str(error)
else:
    raise AssertionError("a set that was removed is used")

# ranks that differ get an error, and go on; over GPI-2 and between nodes their group has ended
if size > 1 and len(per_node) == 1 and os.environ.get("CARME_TRANSPORT") != "gpi2":
    odd = rank == 1
    wide, kind = (
        torch.ones((3, 2) if odd else (2, 3)),
        torch.ones(6, dtype=torch.int32 if odd else torch.float32),
    )
    for call in (
        lambda: hvd.allreduce(wide),
        lambda: hvd.allreduce(kind),
        lambda: hvd.grouped_allreduce([wide, wide]),
        lambda: hvd.allreduce(own(), prescale_factor=2.0 if odd else 1.0),
        lambda: hvd.broadcast(wide, 0),
        lambda: hvd.broadcast(kind, 0),
        lambda: hvd.reducescatter(wide),
        lambda: hvd.reducescatter(kind),
        lambda: hvd.allgather(torch.ones((1, 3, 2) if odd else (1, 2, 3))),
        lambda: hvd.alltoall(torch.ones((size, 3, 2) if odd else (size, 2, 3))),
    ):
        try:
            call()
        except hvd.HorovodInternalError as error:
            assert "Rank" in str(error), error
        else:
            raise AssertionError("ranks differ, and nobody says so")
        hvd.barrier()
clock = time.monotonic
if rank == root:  # who joins last
    time.sleep(1)
    assert hvd.allreduce(torch.tensor([-7])).tolist() == [int(-7 / size)]
    assert (hvd.allreduce(torch.ones(2, 3), op=hvd.Sum, prescale_factor=2.0) == 2).all()
    assert [t.shape for t in hvd.grouped_allreduce([torch.ones(2, 3), torch.ones(3, 2)])] == [(2, 3), (3, 2)]
else:  # waits for hours
    time.monotonic = lambda: clock() * 10000
assert hvd.join() in range(size)
time.monotonic = clock
assert torch.equal(hvd.allgather(torch.tensor([float(rank)])), ranks), "the run does not go on after join"
hvd.shutdown()
assert not hvd.is_initialized()
