"""Checkpoints of Keras models; argument 1: what is done, 2: a folder that all ranks see.

KERAS_BACKEND is torch or tensorflow.
"""

# pyright: reportMissingImports=false, reportOptionalSubscript=false, reportOptionalMemberAccess=false
# pyright: reportPossiblyUnboundVariable=false, reportArgumentType=false

import hashlib
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import carme_runtime
import carme_runtime.keras as ck
from carme_runtime.checkpoint import Checkpoints
from carme_runtime.collectives.errors import InvalidCall

what, folder = sys.argv[1:]
on_torch = keras.backend.backend() == "torch"
if on_torch:
    import torch

    torch.set_num_threads(1)
numbers = np.random.default_rng(5)
x = numbers.normal(size=(64, 6)).astype("float32")
y = x[:, :2].copy()


def mlp(*more, outputs=2):
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, "relu"), *more, keras.layers.Dense(outputs)]
    )


def compiled(model, rate=0.01):
    model.compile(keras.optimizers.Adam(rate), "mse")
    return model


def state():
    """A model with all kinds of variables is saved, or loaded into one with other values."""
    saving = what == "save"
    keras.utils.set_random_seed(3 if saving else 4)
    layers = keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)
    model = compiled(ck.Model(mlp(*layers)), 0.01 if saving else 0.5)
    checkpoints = Checkpoints(folder)
    if saving:
        assert checkpoints.resume(model=model) is None
        model.fit(x, y, 16, epochs=2, verbose=0)
        checkpoints.save(2, model=model, epoch=2).wait()
    else:
        assert checkpoints.resume(model=model) == {"step": 2, "epoch": 2}
        assert np.isclose(float(model.optimizer.learning_rate), 0.01)
        assert int(model.optimizer.iterations) == 8
    taken = model.take_state()
    assert [len(part) for part in taken.values()] == [8, 14, 1]
    values = [value for part in taken.values() for value in part]
    print("STATE", hashlib.sha256(b"".join(np.asarray(value).tobytes() for value in values)).hexdigest())
    if not saving:
        model.fit(x, y, 16, verbose=0)
        everyone = ck.TensorAllgatherer(x).allgather(model.get_weights()[0][None])
        assert (everyone == everyone[0]).all()
        with pytest.raises(InvalidCall, match=r"number 6 of the weights with shape \(8, 2\)"):
            checkpoints.resume(model=compiled(ck.Model(mlp(*layers, outputs=3))))
        with pytest.raises(InvalidCall, match="has 8 weights, and the model has 4"):
            checkpoints.resume(model=compiled(ck.Model(mlp())))
        unbuilt = compiled(ck.Sequential([keras.layers.Dense(2)]))
        with pytest.raises(InvalidCall, match="has no weights yet"):
            checkpoints.resume(model=unbuilt)


def limited():
    """As `save`, with a limit of memory that leaves room for everything."""
    global what
    what = "save"
    with carme_runtime.memory("4G", Path(folder).parent):
        state()


class CutOff(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise RuntimeError


def cut_off():
    keras.utils.set_random_seed(3)
    model = compiled(ck.Model(mlp()))
    with pytest.raises(RuntimeError):
        model.fit(x, y, 16, 4, 0, [ck.callbacks.Checkpoints(folder, keep=2), CutOff()], shuffle=False)


def go_on():
    keras.utils.set_random_seed(3)
    alone = compiled(mlp())
    expected = alone.fit(x, y, 16, 4, 0, shuffle=False)
    keras.utils.set_random_seed(4)
    model = compiled(ck.Model(mlp()), 0.5)
    history = model.fit(x, y, 16, 4, 0, [ck.callbacks.Checkpoints(folder, every=3)], shuffle=False)
    assert history.epoch == [2, 3]
    np.testing.assert_allclose(history.history["loss"], expected.history["loss"][2:], rtol=1e-4)
    for tested, reference in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(tested, reference, rtol=1e-4, atol=1e-6)
    assert Checkpoints(folder).steps() == [4, 3, 2]
    # All is done already; and nothing of that stays with the model.
    assert model.fit(x, y, 16, 4, 0, [ck.callbacks.Checkpoints(folder)]).epoch == []
    assert model.fit(x, y, 16, 2, 0).epoch == [0, 1]
    with pytest.raises(InvalidCall, match="every=0"):
        ck.callbacks.Checkpoints(folder, every=0)


{"save": state, "save in limited memory": limited, "load": state, "cut off": cut_off, "go on": go_on}[what]()
if on_torch and torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
assert on_torch or "torch" not in sys.modules  # it need not be installed
