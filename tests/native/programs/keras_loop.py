"""Trains in a loop of its own; argument 1: where the results go, 2: `plain` for Keras itself.

KERAS_BACKEND is torch or tensorflow.
"""

# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false, reportArgumentType=false

import json
import os
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

plain = sys.argv[2:] == ["plain"]
on_torch = keras.backend.backend() == "torch"
if on_torch:
    import torch

    torch.set_num_threads(1)
else:
    import tensorflow as tf
if not plain:
    import carme_runtime.keras as tnt
    from carme_runtime.collectives.errors import InvalidCall

SAMPLES, BATCH = 46, 9  # the last batch has one sample: less than there are ranks
rank, size = (0, 1) if plain else (tnt.get_rank(), tnt.get_size())
random_numbers = np.random.default_rng(5)
x = random_numbers.normal(size=(SAMPLES, 12)).astype("float32")
y = (x @ random_numbers.normal(size=(12, 3)) + 0.1).astype("float32")
tokens = random_numbers.integers(0, 20, size=(SAMPLES, 7)).astype("float32")


def wrapped(model):
    return model if plain else tnt.Model(model)


def mlp(*first):
    return wrapped(keras.Sequential([*first, keras.layers.Dense(20, "tanh"), keras.layers.Dense(3)]))


def optimizer(plain_optimizer):
    if plain:
        return plain_optimizer
    before = plain_optimizer.get_config()
    tested = tnt.Optimizer(plain_optimizer)
    assert isinstance(tested, type(plain_optimizer))
    assert tested.get_config() == before
    return tested


def batches(inputs=x, is_training=True):
    if on_torch:
        data = torch.utils.data.TensorDataset(torch.from_numpy(inputs), torch.from_numpy(y))
        data = torch.utils.data.DataLoader(data, batch_size=BATCH)
    else:
        data = tf.data.Dataset.from_tensor_slices((inputs, y)).batch(BATCH).prefetch(2)
    return (
        data
        if plain
        else tnt.data.Dataset(dataset=data).distribute_dataset_across_ranks(is_training=is_training)
    )


loss_of = keras.losses.MeanSquaredError()


def step(model, optimizer, inputs, targets, automatic=False):
    """One step; the loss before it."""
    if not on_torch:
        with tf.GradientTape() as tape:
            loss: Any = loss_of(targets, model(inputs, training=True))
        gradients = tape.gradient(loss, model.trainable_weights)
        optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
        return loss
    loss: Any = loss_of(targets, model(inputs) if automatic else model(inputs, training=True))
    parameters = [v.value for v in model.trainable_weights]
    if automatic:
        gradients = torch.autograd.grad(loss, parameters)
    else:
        model.zero_grad()
        loss.backward()
        gradients = [parameter.grad for parameter in parameters]
    with torch.no_grad():
        optimizer.apply(gradients, model.trainable_weights)
    return loss.detach()


def train(model, optimizer, data, epochs=2, step=step):
    """The losses of the whole batches, from those of the shares."""
    losses = []
    for _ in range(epochs):
        for number, (inputs, targets) in enumerate(data):
            assert len(data) == -(-SAMPLES // BATCH)
            total = min(BATCH, SAMPLES - number * BATCH)
            samples = total // size + (rank < total % size)
            assert len(inputs) == max(samples, 1)
            loss = float(step(model, optimizer, inputs, targets)) * samples / total
            losses.append(loss if plain else tnt.TensorAllreducer(loss).allreduce(loss))
    return losses


def evaluate(model):
    """Over all samples, without the other ranks."""
    metric = keras.metrics.MeanSquaredError()
    seen = 0
    for inputs, targets in batches(is_training=False):
        seen += len(inputs)
        metric.update_state(targets, model(inputs, training=False))
    assert seen == SAMPLES
    return float(metric.result())


def sgd():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.9)
    return keras.optimizers.SGD(schedule, momentum=0.9)


def usual():
    model = mlp(keras.Input((12,)))
    losses = train(model, optimizer(sgd()), batches())
    return model, [evaluate(model), losses]


def unbuilt():
    model = mlp()
    losses = train(model, optimizer(keras.optimizers.Adam(0.01)), batches())
    return model, [evaluate(model), losses]


def as_a_function():
    """Its graph is made with the first batch, and again for another number of samples."""
    model = mlp(keras.Input((12,)))
    losses = train(model, optimizer(sgd()), batches(), step=tf.function(step))
    return model, [evaluate(model), losses]


def unbuilt_in_a_function():
    model = mlp()
    compiled = tf.function(step, reduce_retracing=True)
    losses = train(model, optimizer(keras.optimizers.Adam(0.01)), batches(), step=compiled)
    return model, [evaluate(model), losses]


def embedding():
    layers = [keras.Input((7,)), keras.layers.Embedding(20, 6), keras.layers.Flatten(), keras.layers.Dense(3)]
    model = wrapped(keras.Sequential(layers))
    losses = train(model, optimizer(keras.optimizers.SGD(0.1)), batches(tokens))
    return model, losses


def automatic():
    """Gradients that no hook sees."""
    model = mlp(keras.Input((12,)))

    def automatic_step(*arguments):
        return step(*arguments, automatic=True)

    losses = train(model, optimizer(sgd()), batches(), step=automatic_step)
    return model, [evaluate(model), losses]


def without_gradients():
    """Some variables have no gradient on one rank, and some on none: these are not decayed either."""
    layers = [keras.layers.Dense(12) for _ in range(3)]
    model = wrapped(keras.Sequential([keras.Input((12,)), *layers]))
    decaying = optimizer(keras.optimizers.AdamW(0.01, weight_decay=0.5))
    model(keras.ops.convert_to_tensor(x[:1]), training=True)  # from here on all have rank 0's weights
    for begin in range(0, 32, 8):
        inputs = keras.ops.convert_to_tensor(x[begin + rank : begin + 8 : size])
        loss: Any = keras.ops.mean(layers[0](inputs) ** 2)
        if rank == 0:
            extra: Any = keras.ops.mean(layers[1](x[:4]) ** 2)
            loss = loss + size * extra
        found = torch.autograd.grad(loss, [v.value for v in model.trainable_weights], allow_unused=True)
        with torch.no_grad():
            decaying.apply(list(found), model.trainable_weights)
    return model, 0.0


def after_fit():
    """The optimizer of a model that was compiled and trained before, and the model trained again after it."""
    model = mlp(keras.Input((12,)))
    own = optimizer(keras.optimizers.SGD(0.05, momentum=0.9))
    model.compile(own, "mse")
    first = model.fit(x, y, BATCH, epochs=1, shuffle=False, verbose=0)
    losses = train(model, own, batches())
    second = model.fit(x, y, BATCH, epochs=1, shuffle=False, verbose=0)
    return model, [evaluate(model), losses, first.history["loss"], second.history["loss"]]


def unwrapped_in_a_function():
    """A Keras model, which ranks build alike; one without variables must get them before."""
    keras.utils.set_random_seed(11)
    model = keras.Sequential([keras.layers.Dense(3)])
    if size > 1:
        with pytest.raises(Exception, match="call it once before the loop"):
            tf.function(step)(model, optimizer(sgd()), tf.constant(x[:4]), tf.constant(y[:4]))
    keras.utils.set_random_seed(11)
    model = keras.Sequential([keras.layers.Dense(3)])
    model(x[:1])
    losses = train(model, optimizer(sgd()), batches(), step=tf.function(step))
    return model, losses


def own_data():
    """Each rank takes its samples by itself, as many as the others."""
    model, stepping = mlp(keras.Input((12,))), optimizer(sgd())
    for begin in range(0, 40, 8):
        own_part = slice(begin + rank, begin + 8, size)
        inputs, targets = map(keras.ops.convert_to_tensor, (x[own_part], y[own_part]))
        step(model, stepping, inputs, targets)
    return model, evaluate(model)


def micro_batches():
    """The samples on each rank are stated, and the batches made of arrays."""
    model, stepping = mlp(keras.Input((12,))), optimizer(sgd())
    if plain:
        data = [(x[i : i + 8], y[i : i + 8]) for i in range(0, SAMPLES, 8)]
        data = [tuple(map(keras.ops.convert_to_tensor, batch)) for batch in data]
    else:
        whole = tnt.data.Dataset((x, y), num_ranks=size, rank=rank)
        data = whole.distribute_dataset_across_ranks(user_micro_batch_size=8 // size)
        with pytest.raises(InvalidCall, match="Leave num_ranks and rank out"):
            tnt.data.Dataset(x, num_ranks=7)
        pieces = whole.distribute_dataset_across_ranks(user_micro_batch_size=3, is_training=False)
        assert [len(inputs) for inputs, _ in pieces] == [3] * 15 + [1]
    for inputs, targets in data:
        step(model, stepping, inputs, targets)
    return model, evaluate(model)


results = {}
for kind in (
    usual,
    unbuilt,
    embedding,
    *(
        (automatic, without_gradients)
        if on_torch
        else (as_a_function, unbuilt_in_a_function, unwrapped_in_a_function)
    ),
    after_fit,
    own_data,
    micro_batches,
):
    keras.utils.set_random_seed(11 + rank)  # ranks build other weights than rank 0, whose all get
    model, more = kind()
    results[kind.__name__] = {
        "weights": np.concatenate([w.ravel() for w in model.get_weights()]).astype("float64").tolist(),
        "more": more,
    }
Path(sys.argv[1].replace("RANK", os.environ["RANK"])).write_text(json.dumps(results))
