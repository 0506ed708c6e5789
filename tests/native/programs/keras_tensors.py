"""Tensors that ranks of a Keras script send each other; arguments: see keras_ranks.py."""

# pyright: reportMissingImports=false, reportArgumentType=false

import keras
import numpy as np
import pytest
from keras_ranks import end, everywhere, kind, rank, size

import carme_runtime.keras as tnt
from carme_runtime.collectives.errors import InvalidCall, Mismatch


def tensors():
    tensor = keras.ops.ones(4) * rank
    values = {"number": rank + 1, "array": np.full((2, 3), rank, "float32"), "tensor": tensor}
    total = tnt.TensorAllreducer(values).allreduce(values)
    assert total["number"] == size * (size + 1) // 2
    assert (total["array"] == sum(range(size))).all()
    assert keras.ops.is_tensor(total["tensor"])
    assert np.asarray(keras.ops.convert_to_numpy(total["tensor"])).tolist() == [sum(range(size))] * 4
    assert (values["array"] == rank).all()
    last = tnt.TensorBroadcaster([rank, 0.5 * rank], root_rank=size - 1).broadcast([rank, 0.5 * rank])
    assert last == [size - 1, 0.5 * (size - 1)]
    # As Tarantella's scripts call it where there is nothing to give.
    example = {"rows": np.full((2, 3), rank), "good": rank == 0, "small": np.full(3, rank, "int8")}
    broadcaster = tnt.TensorBroadcaster(example)
    first = broadcaster.broadcast(example) if rank == 0 else broadcaster.broadcast()
    assert first["rows"].tolist() == [[0] * 3] * 2
    assert first["good"] is True
    assert first["small"].dtype == "int8" and first["small"].tolist() == [0] * 3
    if rank == 0:
        with pytest.raises(InvalidCall, match="without inputs on rank 0, which is the root"):
            broadcaster.broadcast()
    rows = np.full((rank, 2), rank, "int64")
    gathered = tnt.TensorAllgatherer(rows).allgather(rows)
    assert gathered.tolist() == [[r, r] for r in range(size) for _ in range(r)]
    assert everywhere(rank).tolist() == list(range(size))
    for dtype in ("bool", "int16", "uint32"):  # which the core does not know
        gathered = everywhere(rows.astype(dtype))
        assert gathered.dtype == dtype
        assert gathered.tolist() == [[dtype == "bool" or r] * 2 for r in range(size) for _ in range(r) if r]
    for dtype in ("bool", "int8", "int16", "uint16", "uint32", "float16"):
        values = np.full((2, 2), rank + 1).astype(dtype)
        total = tnt.TensorAllreducer(values).allreduce(values)
        assert total.dtype == dtype
        assert (total == np.array(size * (size + 1) // 2).astype(dtype)).all()
    for collective in (tnt.TensorAllreducer, tnt.TensorBroadcaster, tnt.TensorAllgatherer):
        with pytest.raises(InvalidCall, match="An object of type str cannot be sent"):
            collective({"text": "text"})


def groups():
    barrier, everyone = tnt.Barrier(), tnt.Group()
    barrier.execute()
    barrier.synchronize()
    assert (everyone.rank, everyone.size) == (rank, size)
    assert everyone.contains(size - 1) and not everyone.contains(size)
    reduction = tnt.Allreduce(everyone, nelems=2, op=tnt.ReductionOp.AND, dtype=bool)
    for given, expected in (([True, rank > 0], [True, False]), ([True, True], [True, True])):
        reduction.start(given)
        result = reduction.wait_for_completion()
        assert result.dtype == bool
        assert result.tolist() == expected
    for op, expected in (("SUM", size * (size + 1) // 2), ("MAX", size), ("MIN", 1), ("OR", 1)):
        reduction = tnt.Allreduce(nelems=1, op=tnt.ReductionOp[op], algorithm="ring", dtype="int16")
        reduction.start(rank + 1)
        assert reduction.wait_for_completion().tolist() == [expected]
    with pytest.raises(InvalidCall, match="made for 1 elements, and got 2"):
        reduction.start([1, 2])
    with pytest.raises(InvalidCall, match="Call start first"):
        reduction.wait_for_completion()
    alone = tnt.Group([rank])
    assert tnt.TensorAllreducer(rank, alone).allreduce(rank) == rank
    tnt.Barrier(alone).execute()
    for wrong in ([size], [0, 0], []):
        with pytest.raises(InvalidCall, match="A group cannot be"):
            tnt.Group(wrong)
    assert tnt.is_master_rank() == (rank == tnt.get_master_rank())


def differing():
    odd = rank == 1
    wide, deep = np.ones((3, 2) if odd else (2, 3)), np.ones((1, 3, 2) if odd else (1, 2, 3))
    kinds, narrow = np.ones(6, "int32" if odd else "float32"), np.ones(6, "bool" if odd else "int8")
    for array in (wide, kinds, narrow, deep):
        with pytest.raises(Mismatch, match=r"Rank . called broadcast"):
            tnt.TensorBroadcaster(array).broadcast(array)
        tnt.Barrier().execute()
    for array in (wide, kinds, deep):
        with pytest.raises(Mismatch, match=r"Rank . called allreduce"):
            tnt.TensorAllreducer(array).allreduce(array)
        tnt.Barrier().execute()
    for array in (kinds, narrow, deep):
        with pytest.raises(Mismatch, match=r"Rank . called allgather"):
            tnt.TensorAllgatherer(array).allgather(array)
        tnt.Barrier().execute()


{function.__name__: function for function in (tensors, groups, differing)}[kind]()
end()
