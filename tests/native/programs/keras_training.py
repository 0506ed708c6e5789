"""Trains small models on all kinds of data; argument 1: where the results go, 2: `plain` for Keras itself.

KERAS_BACKEND is torch or tensorflow.
"""

# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false, reportArgumentType=false

import json
import os
import sys
from pathlib import Path

import keras
import numpy as np

plain = sys.argv[2:] == ["plain"]
on_torch = keras.backend.backend() == "torch"
if on_torch:
    import torch

    torch.set_num_threads(1)
else:
    import tensorflow
if plain:

    def wrap(model):
        return model
else:
    import carme_runtime.keras as ck

    wrap = ck.Model

SAMPLES, BATCH = 46, 9  # the last batch has one sample: less than there are ranks
random_numbers = np.random.default_rng(5)
x = random_numbers.normal(size=(SAMPLES, 12)).astype("float32")
y = (x @ random_numbers.normal(size=(12, 3)) + 0.1).astype("float32")
classes = y.argmax(1)
weights = random_numbers.uniform(0.1, 2, SAMPLES).astype("float32")
tokens = random_numbers.integers(1, 20, size=(SAMPLES, 7)) * (
    np.arange(7) < random_numbers.integers(1, 8, (SAMPLES, 1))
)


def mlp(outputs=3, activation=None):
    return keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(20, activation="tanh", kernel_regularizer=keras.regularizers.L2(1e-3)),
            keras.layers.Dense(outputs, activation=activation),
        ]
    )


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return -(-SAMPLES // BATCH)

    def __getitem__(self, index):
        part = slice(index * BATCH, (index + 1) * BATCH)
        return x[part], y[part]


class Own(keras.Model):
    """A training step of its own, and a log that is not a metric."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        inputs, targets = data
        if not on_torch:
            with tensorflow.GradientTape() as tape:
                loss = tensorflow.reduce_mean((self(inputs, training=True) - targets) ** 2)
            gradients = tape.gradient(loss, self.trainable_weights)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
            return {"own_loss": loss}
        self.zero_grad()
        loss = torch.mean((self(inputs, training=True) - targets) ** 2)
        loss.backward()
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in self.trainable_weights], self.trainable_weights)
        return {"own_loss": loss.detach()}


def generator():
    while True:
        for index in range(len(Batches())):
            yield Batches()[index]


def loader(shuffle=False):
    data = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    return torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=shuffle)


def sgd():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.9)
    return keras.optimizers.SGD(schedule, momentum=0.9)


def numpy():
    model = wrap(mlp())
    model.compile(sgd(), "mse", metrics=["mae", keras.metrics.RootMeanSquaredError()])
    history = model.fit(x, y, BATCH, epochs=3, validation_split=0.2, shuffle=False, verbose=0)
    return model, history, model.evaluate(x, y, BATCH, verbose=0), model.predict(x, BATCH, verbose=0)


def shuffled():
    # Each rank has its own state of the random generators until fit makes them equal.
    seed = 1 + int(os.environ["RANK"])
    torch.manual_seed(seed) if on_torch else np.random.seed(seed)
    model = wrap(mlp())
    model.compile("adam", "mse")
    return model, model.fit(x, y, BATCH, epochs=2, verbose=0)


def tensors():
    model = wrap(mlp())
    model.compile("adam", "mse")
    return model, model.fit(torch.from_numpy(x), torch.from_numpy(y), BATCH, 2, 0, shuffle=False)


def torch_loader():
    model = wrap(mlp())
    model.compile("adam", "mse")
    return model, model.fit(loader(), epochs=2, verbose=0), model.evaluate(loader(), verbose=0)


def py_dataset():
    model = wrap(mlp())
    model.compile("adam", "mse")
    return model, model.fit(Batches(), epochs=2, validation_data=Batches(), shuffle=False, verbose=0)


def python_generator():
    model = wrap(mlp())
    model.compile("adam", "mse")
    return model, model.fit(generator(), epochs=2, steps_per_epoch=4, verbose=0)


def tensorflow_data():
    model = wrap(mlp())
    model.compile("adam", "mse")
    data = tensorflow.data.Dataset.from_tensor_slices((x, y)).shuffle(SAMPLES, seed=4).batch(BATCH)
    without_seed = tensorflow.data.Dataset.from_tensor_slices((x, y)).shuffle(SAMPLES).batch(BATCH)
    unknown = data.filter(lambda x, y: True)  # how long it is
    first = model.fit(data, epochs=2, validation_data=unknown, verbose=0)
    second = model.fit(without_seed, epochs=2, verbose=0)
    return model, model.fit(unknown, epochs=2, verbose=0), first.history["val_loss"], second.history["loss"]


def classes_and_weights():
    model = wrap(mlp(3, "softmax"))
    model.compile(
        keras.optimizers.AdamW(0.01, clipnorm=0.5),
        keras.losses.SparseCategoricalCrossentropy(),
        metrics=["accuracy"],
        weighted_metrics=["accuracy"],
    )
    history = model.fit(x, classes, BATCH, 2, 0, shuffle=False, class_weight={0: 1.0, 1: 0.3, 2: 2.0})
    return model, history, model.evaluate(x, classes, BATCH, 0, sample_weight=weights)


def binary_auc():
    model = wrap(mlp(1, "sigmoid"))
    model.compile("adam", "binary_crossentropy", metrics=[keras.metrics.AUC(), keras.metrics.Precision()])
    return model, model.fit(x, (classes > 0).astype("float32")[:, None], BATCH, 2, 0, shuffle=False)


def summed_loss():
    model = wrap(mlp())
    model.compile(keras.optimizers.SGD(0.002), keras.losses.MeanSquaredError(reduction="sum"))
    return model, model.fit(x, y, BATCH, 2, 0, shuffle=False), model.evaluate(x, y, BATCH, 0)


def weighted_mean():
    model = wrap(mlp())
    model.compile("adam", keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    return model, model.fit(x, y, BATCH, 2, 0, shuffle=False, sample_weight=weights)


def masked():
    inputs = keras.Input((7,), dtype="int32")
    embedded = keras.layers.Embedding(20, 6, mask_zero=True)(inputs)
    model = wrap(keras.Model(inputs, keras.layers.Dense(4, activation="softmax")(embedded)))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model, model.fit(tokens, tokens % 4, BATCH, 2, 0, shuffle=False)


def with_several_outputs(**options):
    inputs = keras.Input((12,), name="one")
    hidden = keras.layers.Dense(8, activation="relu")(inputs)
    outputs = {"a": keras.layers.Dense(3, name="a")(hidden), "b": keras.layers.Dense(1, name="b")(hidden)}
    model = wrap(keras.Model({"one": inputs}, outputs))
    losses, weighting = {"a": "mse", "b": "mae"}, {"a": 0.5, "b": 1.0}
    model.compile("sgd", losses, loss_weights=weighting, metrics={"a": ["mae"]}, **options)
    return model


def several():
    model = with_several_outputs()
    history = model.fit({"one": x}, {"a": y, "b": weights[:, None]}, BATCH, 2, 0, shuffle=False)
    predictions = model.predict({"one": x}, BATCH, verbose=0)
    return model, history, [predictions["a"].tolist(), predictions["b"].tolist()]


class Uneven(keras.utils.PyDataset):
    """Two targets in batches of several sizes, so that shares of ranks have several sizes."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        part = slice(*((0, 9), (9, 16), (16, 21), (21, SAMPLES))[index])
        return {"one": x[part]}, {"a": y[part], "b": weights[part, None]}


def several_sizes():
    model = with_several_outputs()
    history = model.fit(Uneven(), epochs=2, validation_data=Uneven(), shuffle=False, verbose=0)
    return model, history, model.evaluate(Uneven(), verbose=0)


def several_eagerly():
    model = with_several_outputs(run_eagerly=True)
    return model, model.fit(Uneven(), epochs=2, shuffle=False, verbose=0)


def own_step():
    model = wrap(Own())
    model.compile("sgd")
    return model, model.fit(x, y, BATCH, 2, 0, shuffle=False)


def frozen_then_not():
    inner = mlp()
    inner.layers[0].trainable = False
    model = wrap(inner)
    model.compile("adam", "mse")
    first = model.fit(x, y, BATCH, 1, 0, shuffle=False)
    inner.layers[0].trainable = True
    model.compile(keras.optimizers.Adam(gradient_accumulation_steps=2), "mse")
    return model, model.fit(x, y, BATCH, 2, 0, shuffle=False), first.history["loss"]


def on_batch():
    model = wrap(mlp())
    model.compile("adam", "mse", metrics=["mae"])
    losses = [model.train_on_batch(x[i : i + 5], y[i : i + 5]) for i in range(0, SAMPLES, 5)]
    return model, None, np.array(losses).tolist(), np.array(model.test_on_batch(x, y)).tolist()


results = {}
for kind in (
    numpy,
    shuffled,
    *((tensors, torch_loader) if on_torch else (tensorflow_data,)),
    py_dataset,
    python_generator,
    classes_and_weights,
    binary_auc,
    summed_loss,
    weighted_mean,
    masked,
    several,
    several_sizes,
    several_eagerly,
    own_step,
    frozen_then_not,
    on_batch,
):
    keras.utils.set_random_seed(11)
    model, history, *more = kind()
    results[kind.__name__] = {
        "history": history.history if history else {},
        "weights": np.concatenate([w.ravel() for w in model.get_weights()]).astype("float64").tolist(),
        "more": json.loads(json.dumps(more, default=lambda array: np.asarray(array).tolist())),
    }
Path(sys.argv[1].replace("RANK", os.environ["RANK"])).write_text(json.dumps(results))
