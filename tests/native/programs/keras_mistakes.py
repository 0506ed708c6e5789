"""Ranks that do not agree, or ask for what cannot be, get an error that says so, and can go on.

KERAS_BACKEND is torch or tensorflow.
"""

# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false

import keras
import numpy as np

import carme_runtime.keras as ck

odd = ck.get_rank() == 1
on_torch = keras.backend.backend() == "torch"
if on_torch:
    import torch

    torch.set_num_threads(1)
x, y = np.zeros((40, 4), "float32"), np.zeros((40, 2), "float32")


def generator(size=8, count=4, fail_at=None, first=0.0):
    for index in range(count):
        if index == fail_at:
            raise OSError("the disk is gone")
        yield x[:size] + first, y[:size]


def build(outputs=2, optimizer="sgd", more=()):
    model = ck.Sequential([keras.Input((4,)), keras.layers.Dense(outputs), *more])
    model.compile(optimizer, "mse")
    return model


def fit(*arguments, **keywords):
    return build().fit(*arguments, verbose=0, **keywords)


mistakes = {
    "batch size": lambda: fit(x, y, batch_size=8 if odd else 10),
    "epochs": lambda: fit(x, y, epochs=2 if odd else 3),
    "small": lambda: fit(x, y, batch_size=1),
    "small batches": lambda: fit(generator(1)),
    "model": lambda: build(3 if odd else 2).fit(x, x[:, : 3 if odd else 2], verbose=0),
    "layers": lambda: build(more=[keras.layers.Dense(2)] if odd else []).fit(x, y, verbose=0),
    "optimizer": lambda: build(optimizer="adam" if odd else "sgd").fit(x, y, verbose=0),
    "kind": lambda: fit({1, 2, 3} if odd else x, y),
    "call": lambda: build().evaluate(x, y, verbose=0) if odd else fit(x, y),
    "generator's size": lambda: fit(generator(6 if odd else 8)),
    "generator's length": lambda: fit(generator(count=3 if odd else 5)),
    "generator": lambda: fit(generator(count=9, fail_at=5 if odd else None)),
    "order": lambda: fit(generator(first=float(odd))),
    "arrays": lambda: fit(x + float(odd), y),
    "micro-batch": lambda: fit(x, y, batch_size=10, tnt_micro_batch_size=3),
    "micro-batches": lambda: fit(generator(8), tnt_micro_batch_size=3),
    "split": lambda: fit(generator(8), validation_split=0.5),
    "file": lambda: build().save("/proc/none.keras"),
    "jit": lambda: build().compile("sgd", "mse", jit_compile=True),
    "subclass": lambda: type("Mine", (ck.Model,), {}),
    "root": lambda: ck.TensorBroadcaster(1.0, root_rank=7),
    "text": lambda: ck.TensorAllreducer("text").allreduce("text"),
    "shapes": lambda: ck.TensorAllreducer(x).allreduce(y),
}
for name, mistake in mistakes.items():
    try:
        mistake()
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}")
    else:
        print(f"{name}: no error")
fit(x, y)
print("end: all is well")
if on_torch:
    torch.distributed.destroy_process_group()
