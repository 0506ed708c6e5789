"""Trains with Keras, is cut off, and goes on from a checkpoint; knows nothing of a limit. Prints JSON.

keras_checkpoints_in_less_memory.py WIDTH LAYERS FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import carme_runtime.keras as ck

width, layers, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
x = np.random.default_rng(0).normal(size=(64, width)).astype("float32")
y = np.arange(64) % 10


def made(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    hidden = [keras.layers.Dense(width, activation="relu") for _ in range(layers)]
    model = keras.Sequential([keras.Input((width,)), *hidden, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.AdamW(1e-3), loss=loss)
    return model


def trained(seed: int, epochs: int) -> tuple[list[int], list[float]]:
    """The epochs, and their losses."""
    callback = ck.callbacks.Checkpoints(folder)
    options: dict[str, Any] = {"batch_size": 32, "verbose": 0, "shuffle": False}
    history = made(seed).fit(x, y, epochs=epochs, callbacks=[callback], **options)
    return history.epoch, history.history["loss"]


losses = [trained(0, 1), trained(1, 2)]
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
result = {
    "epochs": [epoch for epochs, _ in losses for epoch in epochs],
    "losses": [float(loss).hex() for _, found in losses for loss in found],
    "peak": int(peak.split()[1]) << 10,
}
print(json.dumps(result), flush=True)
