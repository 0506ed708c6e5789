"""Rank 1 does not come in time to what the others wait for.

Arguments: what it does instead (`busy`, `stopped`, or `never` where it does come), through which API the
ranks work: `torch` (default), `parallelize`, `pipeline`, `horovod`, `keras`, `keras-graph` (late within a
step of a graph), or a call of `carme_runtime.gaspi`; and the file that ends
what it does, which takes 3 s without it.
"""

# pyright: reportMissingImports=false

import os
import signal
import sys
import time
from pathlib import Path

from patience import HANG

how, face = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "torch"


def busy_elsewhere():
    over = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    end = time.monotonic() + (HANG if over else 3)
    while time.monotonic() < end and not (over and over.exists()):
        pass


def come_late():
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        busy_elsewhere()


def with_torch():
    import torch
    import torch.distributed as dist

    import carme_runtime.torch  # noqa: F401

    def wait_for_the_others():
        dist.all_reduce(torch.ones(3))

    dist.init_process_group("carme")
    print("pid", os.getpid(), flush=True)
    if how == "never":
        end = time.monotonic() + 2.5 * float(os.environ["CARME_HANG_SECONDS"])
        while True:  # as below
            more = torch.tensor(float(time.monotonic() < end))
            dist.all_reduce(more, dist.ReduceOp.MIN)
            if not more:
                break
        dist.barrier()
        dist.destroy_process_group()
        sys.exit()
    if dist.get_rank() == 1:
        come_late()
    wait_for_the_others()
    dist.destroy_process_group()


def with_pipeline():
    import torch
    import torch.distributed as dist

    from carme_runtime.collectives.mailboxes import Mailboxes
    from carme_runtime.torch import pipeline

    def wait_for_the_others():
        tested.step(inputs, inputs, loss=torch.nn.functional.mse_loss)

    dist.init_process_group("carme")
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    inputs = torch.ones(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tested, _ = pipeline(model, optimizer, example=inputs, stages=2, micro_batches=3, cut_points=["2"])
    wait_for_the_others()
    if dist.get_rank() == 1:
        puts, put = iter(range(100)), Mailboxes.put

        def late(*arguments):
            if next(puts) == 1:  # of a gradient: the second micro-batch's
                come_late()
            put(*arguments)

        setattr(Mailboxes, "put", late)  # noqa: B010
    wait_for_the_others()
    tested.close()
    dist.destroy_process_group()


def with_parallelize():
    import torch
    import torch.distributed as dist

    from carme_runtime.torch import parallelize

    model = torch.nn.Linear(300, 300)
    model, optimizer = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def wait_for_the_others():
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()

    wait_for_the_others()
    if dist.get_rank() == 1:
        come_late()
    wait_for_the_others()
    dist.destroy_process_group()


def with_horovod():
    import torch

    import carme_runtime.horovod as hvd

    def wait_for_the_others():
        hvd.synchronize(hvd.allreduce_async(torch.ones(3), name="ones"))

    hvd.init()
    if hvd.rank() == 1:
        come_late()
    wait_for_the_others()
    hvd.shutdown()


def with_keras():
    import keras
    import numpy as np

    import carme_runtime.keras as ck

    late = []

    class Passing(keras.layers.Layer):
        def call(self, inputs):
            if keras.backend.backend() == "torch":
                return inputs
            import tensorflow

            def passed(values):
                if late:
                    late.pop()
                    busy_elsewhere()
                return values

            same = tensorflow.numpy_function(passed, [inputs], inputs.dtype)
            same.set_shape(inputs.shape)
            return inputs + tensorflow.stop_gradient(same - inputs)

    model = ck.Model(keras.Sequential([keras.Input((4,)), Passing(), keras.layers.Dense(2)]))
    model.compile(optimizer="sgd", loss="mse")
    data = np.ones((40, 4), "float32"), np.ones((40, 2), "float32")
    model.fit(*data, batch_size=4, epochs=1, verbose=0)  # everything is made; from here on no step takes long

    class Late(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 5 and ck.get_rank() == 1:
                late.append(batch) if face == "keras-graph" else come_late()

    callbacks = [ck.callbacks.Callback(Late(), run_on_all_ranks=True)]

    def wait_for_the_others():
        model.fit(*data, batch_size=4, epochs=1, verbose=0, callbacks=callbacks)

    wait_for_the_others()


def with_gaspi():
    import numpy as np

    from carme_runtime import gaspi

    process = gaspi.init(HANG)
    rank, rest = process.rank, [peer for peer in range(process.size) if peer != 1]
    process.segment_create(0, 64)
    print("pid", os.getpid(), flush=True)

    def wait_for_the_others():
        if face == "barrier":
            process.barrier()
        elif face == "allreduce":
            process.allreduce(np.ones(3))
        elif face == "wait" and rank != 1:
            end = time.monotonic() + 3
            while time.monotonic() < end:  # it answers until it is stopped
                process.write(0, 0, 1, 0, 0, 8)
                process.wait()
        elif face == "notify_waitsome" and rank != 1:
            process.notify_waitsome(0)
        elif face == "passive_receive" and rank != 1:
            process.passive_receive()

    if how == "never":
        end, more = time.monotonic() + 2.5 * float(os.environ["CARME_HANG_SECONDS"]), np.ones(1)
        while more[0]:  # together for longer than the limit, and no call for as long
            more[0] = time.monotonic() < end
            process.allreduce(more, "min")
        process.close()
        return
    if rank == 1:
        come_late()
    wait_for_the_others()
    if rank == 1:
        for peer in rest:
            if face == "notify_waitsome":
                process.notify(peer, 0, 0)
            elif face == "passive_receive":
                process.passive_send(peer, b"come")
    process.barrier(timeout=round(1000 * HANG))
    process.close()


faces = {
    "torch": with_torch,
    "parallelize": with_parallelize,
    "horovod": with_horovod,
    "keras": with_keras,
    "pipeline": with_pipeline,
    "keras-graph": with_keras,
}
faces.get(face, with_gaspi)()
