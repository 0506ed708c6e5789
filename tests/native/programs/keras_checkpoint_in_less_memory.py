"""Checkpoints of a Keras model of 96 MiB, where a limit leaves 40 for what can move.

keras_checkpoint_in_less_memory.py FOLDER
"""

# pyright: reportMissingImports=false

import sys
from pathlib import Path

import keras
import numpy as np

import carme_runtime
import carme_runtime.keras as ck
from carme_runtime.checkpoint import Checkpoints
from carme_runtime.out_of_core import pages

sys.path.insert(0, str(Path(__file__).parents[1]))
from memory_limits import limit

folder = Path(sys.argv[1])
(spill := folder / "spill").mkdir()
x = np.random.default_rng(0).normal(size=(8, 1024)).astype("float32")


def compiled(seed: int) -> ck.Model:
    """Weights and momentum of 48 MiB each."""
    keras.utils.set_random_seed(seed)
    hidden = [keras.layers.Dense(1024, "relu") for _ in range(12)]
    model = ck.Model(keras.Sequential([keras.Input((1024,)), *hidden]))
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    return model


def losses(model: ck.Model, epochs: int) -> list[float]:
    return model.fit(x, x, 8, epochs=epochs, verbose=0, shuffle=False).history["loss"]


model = compiled(0)
losses(model, 1)
Checkpoints(folder / "free").save(1, model=model, epoch=1).wait()
expected = losses(model, 2)
del model
for where in ("free", "limited"):
    with carme_runtime.memory(most := limit(), spill):
        model = compiled(1)
        pages.forget_peak()
        assert Checkpoints(folder / where).resume(model=model) == {"step": 1, "epoch": 1}
        if where == "free":
            Checkpoints(folder / "limited").save(1, model=model, epoch=1).wait()
        assert pages.peak() <= most, (pages.peak(), most)
        found = losses(model, 2)
        assert found == expected, (found, expected)
    del model
    print(f"{where} went on within the limit", flush=True)
