"""Trains with Keras, saves, and goes on from the file; knows nothing of a limit. Prints a JSON object.

keras_in_less_memory.py WIDTH LAYERS FILE
"""

import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

keras.utils.set_random_seed(0)
width, layers = int(sys.argv[1]), int(sys.argv[2])
hidden = [keras.layers.Dense(width, activation="relu") for _ in range(layers)]
model: Any = keras.Sequential([keras.Input((width,)), *hidden, keras.layers.Dense(10)])
model.compile(
    optimizer=keras.optimizers.AdamW(1e-3), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
)
x = np.random.default_rng(0).normal(size=(64, width)).astype("float32")
y = np.arange(64) % 10
losses = model.fit(x, y, batch_size=32, epochs=1, verbose=0, shuffle=False).history["loss"]
model.save(sys.argv[3])
del model
model = keras.saving.load_model(sys.argv[3])
losses += model.fit(x, y, batch_size=32, epochs=1, verbose=0, shuffle=False).history["loss"]
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
result = {"losses": [float(loss).hex() for loss in losses], "peak": int(peak.split()[1]) << 10}
print(json.dumps(result), flush=True)
