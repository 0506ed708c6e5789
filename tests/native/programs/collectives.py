"""Every collective, type and size class against NumPy, on private memory and in a segment."""

# pyright: reportOptionalMemberAccess=false

import hashlib
import weakref

import ml_dtypes
import numpy as np

from carme_runtime import gaspi

TYPES = ("float32", "float64", "float16", "int32", "int64", "uint8")
SIZES = (0, 1, 7, 1000, 8192, 400_003)

with gaspi.init(30) as process:
    rank, size, everyone = process.rank, process.size, process.group_all
    segment = process.segment_create(0, 8 << 20)

    def data(of, count, dtype):
        return (np.random.default_rng([of, count]).integers(1, 9, count)).astype(dtype)

    for count in SIZES:
        for dtype in TYPES if count < 10_000 else TYPES[:2]:
            inputs = [data(r, count, dtype) for r in range(size)]
            total = np.sum(inputs, axis=0, dtype="float64")
            expected = {
                "sum": total.astype(dtype),
                "min": np.min(inputs, axis=0),
                "max": np.max(inputs, axis=0),
            }
            if dtype.startswith("float"):
                expected["mean"] = (total / size).astype(dtype)
            for op, want in expected.items():
                for where in ("private", "segment"):
                    array = inputs[rank].copy()
                    if where == "segment":
                        array = segment.array(dtype, 8, count)
                        array[:] = inputs[rank]
                        process.barrier()
                    everyone.allreduce(array, op)
                    close = np.allclose(array, want, rtol=2e-3 if dtype == "float16" else 1e-6)
                    assert close if op == "mean" else (array == want).all(), (count, dtype, op, where)
        block = data(rank, count, "float64")
        gathered = np.zeros(count * size)
        everyone.allgather(gathered, block)
        assert (gathered.reshape(size, count) == [data(r, count, "float64") for r in range(size)]).all()
        counts = [count + 3 * r for r in range(size)]
        uneven = np.zeros(sum(counts), np.int32)
        everyone.allgather(uneven, np.full(counts[rank], rank, np.int32), counts)
        assert (uneven == np.repeat(np.arange(size), counts)).all()
        root = (rank * 0 + count) % size
        array = data(rank, count, "int64")
        everyone.broadcast(array, root)
        assert (array == data(root, count, "int64")).all()
        out = np.zeros(count, np.int32)
        everyone.reduce_scatter(out, data(rank, count * size, "int32"))
        whole = np.sum([data(r, count * size, "int32") for r in range(size)], axis=0).reshape(size, count)
        assert (out == whole[rank]).all()
        sends = [count + r + 2 * rank for r in range(size)]
        receives = [count + rank + 2 * r for r in range(size)]
        out = np.zeros(sum(receives), np.float32)
        everyone.alltoall(
            out, np.repeat(np.arange(size, dtype=np.float32) * 10 + rank, sends), receives, sends
        )
        assert (out == np.repeat(np.arange(size) + rank * 10, receives)).all()

    # The others with every type and reduction, also in the background; numbers are exact in all types, as
    # products are where no more than four ranks have more than ones.
    for dtype in (*TYPES, ml_dtypes.bfloat16):
        for count in (3, 20_000):
            blocks = [
                (data(r, count * size, dtype) % (3 if r < 4 else 1) + 1).astype(dtype) for r in range(size)
            ]
            stacked = np.array(blocks, "float64")
            expected = {
                "sum": stacked.sum(0),
                "min": stacked.min(0),
                "max": stacked.max(0),
                "product": stacked.prod(0),
            }
            if np.dtype(dtype).kind not in "iu":
                expected["mean"] = stacked.mean(0)
            for op, want in expected.items():
                whole, part = blocks[rank].copy(), np.zeros(count, dtype)
                everyone.allreduce(whole, op)
                everyone.reduce_scatter(part, blocks[rank], op)
                tolerance = 1e-2 if op == "mean" else 0
                np.testing.assert_allclose(whole.astype("float64"), want, rtol=tolerance)
                np.testing.assert_allclose(
                    part.astype("float64"), want.reshape(size, count)[rank], rtol=tolerance
                )
            counts = [count + r for r in range(size)]
            uneven, turned = np.zeros(sum(counts), dtype), np.zeros(count * size, dtype)
            given, scattered = (
                blocks[0].copy() if rank == 0 else np.zeros_like(blocks[0]),
                np.zeros(count, dtype),
            )
            own = np.full(counts[rank], rank + 1).astype(dtype)
            for pending in (
                everyone.broadcast(given, asynchronous=True),
                everyone.allgather(uneven, own, counts, asynchronous=True),
                everyone.alltoall(turned, blocks[rank], asynchronous=True),
                everyone.reduce_scatter(scattered, blocks[rank], asynchronous=True),
            ):
                assert pending.wait(20_000) and pending.done()
            assert (given == blocks[0]).all()
            assert (uneven == np.repeat(np.arange(size) + 1, counts).astype(dtype)).all()
            assert (turned.reshape(size, count) == stacked.reshape(size, size, count)[:, rank]).all()
            assert (scattered == expected["sum"].reshape(size, count)[rank]).all()

    # The mean of integers is refused, on all ranks and before anything happens.
    for dtype in ("int32", "int64", "uint8"):
        whole, part = np.full(4 * size, rank + 1, dtype), np.zeros(4, dtype)
        for call in (
            lambda: everyone.allreduce(whole, "mean"),  # noqa: B023
            lambda: everyone.allreduce(whole, "mean", asynchronous=True).wait(20_000),  # noqa: B023
            lambda: everyone.plan_allreduce(whole, "mean").run(),  # noqa: B023
            lambda: everyone.reduce_scatter(part, whole, "mean"),  # noqa: B023
        ):
            try:
                call()
            except gaspi.InvalidCall as error:
                assert f"The mean of {dtype} is not an integer." in str(error), error
            else:
                raise AssertionError("a mean that is not an integer was not refused")
        assert (whole == rank + 1).all() and not part.any()
        everyone.allreduce(whole)
        assert (whole == size * (size + 1) // 2).all()

    # The same bits on all ranks and in every run, also where rounding depends on the order.
    for dtype, wire in (
        ("float32", ""), ("float64", ""), ("float16", ""), (ml_dtypes.bfloat16, ""),
        ("float32", "bf16"), ("float32", "int8"),
    ):  # fmt: skip
        noise = np.random.default_rng(rank).standard_normal(300_000).astype(dtype)
        everyone.allreduce(noise, wire=wire)
        first = noise.copy()
        everyone.broadcast(first.view("uint8"), 0)
        assert first.tobytes() == noise.tobytes()
        if rank == 0:
            print("bits", np.dtype(dtype).name, wire, hashlib.sha256(noise.tobytes()).hexdigest())

    # In the background, many at once, in the order in which they were called.
    arrays = [np.full(5000 * (i % 3 + 1), rank + i, np.float32) for i in range(20)]
    pending = [everyone.allreduce(a, asynchronous=True) for a in arrays]
    direct = np.ones(10, np.float32)
    everyone.allreduce(direct)
    for i, (array, handle) in enumerate(zip(arrays, pending, strict=True)):
        assert handle.wait() and handle.done()
        assert (array == sum(r + i for r in range(size))).all()
    plan = everyone.plan_allreduce(direct)
    plan.run()
    plan.start().wait()
    assert (direct == size**3).all()

    # Groups that overlap, and one that is made anew many times.
    for members in ([0, size - 1], list(range(size)), [rank]):
        if rank in members and len(set(members)) == len(members):
            group = process.group(members)
            array = np.array([rank], np.int64)
            group.allreduce(array)
            assert array[0] == sum(members) and group.ranks == sorted(members)
    for _ in range(30):
        process.group(range(size)).barrier()

    # What nobody waits for keeps its buffer, and lets go of it in the end.
    if size > 1:
        apart = process.group(range(size))
        buffer = np.full(300_000, rank, np.float32)
        reference = weakref.ref(buffer)
        if rank > 0:
            apart.barrier()  # rank 0 has begun, and nobody has helped it to end
        everyone.allreduce(buffer, asynchronous=True)
        del buffer
        if rank == 0:
            assert reference() is not None
            apart.barrier()
        everyone.barrier()
        assert everyone.barrier(asynchronous=True).wait()
        if rank == 0:
            assert reference() is None

    # Messages between two, unordered among tags.
    right, left = (rank + 1) % size, (rank - 1) % size
    if size > 1:
        small, large = np.zeros(3, np.int32), np.zeros(500_000, np.float32)
        waiting = [
            everyone.receive(large, left, tag=2),
            everyone.receive(small, left, tag=1),
            everyone.send(np.full(3, rank, np.int32), right, tag=1),
            everyone.send(np.full(500_000, rank, np.float32), right, tag=2),
        ]
        assert all(letter.wait(20_000) for letter in waiting)
        assert (small == left).all() and (large == left).all()
        # From any sender, the first first: each once, beside one who is named.
        if rank == 0:
            named = everyone.receive(np.zeros(3, np.int32), 1, tag=3)
            come = [everyone.receive_any(np.zeros(3, np.int32), tag=3) for _ in range(size - 1)]
            assert all(letter.wait(60_000) for letter in [named, *come]) and all(
                arrived.done() for arrived in come
            )
            assert {arrived.member for arrived in come} == set(range(1, size))
            assert not everyone.receive_any(small, tag=3).wait(0)
        else:
            for _ in range(1 + (rank == 1)):
                assert everyone.send(small, 0, tag=3).wait(60_000)
    process.barrier()
    assert process.state_vector() == [gaspi.State.HEALTHY] * size
