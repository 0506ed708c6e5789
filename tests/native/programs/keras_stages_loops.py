"""Trains models in stages by steps of their own and loops of a script's, as Keras alone does.

keras_stages_loops.py GROUP: of those below.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportOptionalSubscript=false, reportOptionalMemberAccess=false

import sys
from typing import Any

import keras
import numpy as np
import pytest
from keras_stages import BATCH, SAMPLES, TENSORFLOW, alike, numbers

import carme_runtime.keras as tnt
from carme_runtime.collectives.errors import InvalidCall

if TENSORFLOW:
    import tensorflow
else:
    import torch

layers, ops = keras.layers, keras.ops
PIPELINING, ALL = tnt.ParallelStrategy.PIPELINING, tnt.ParallelStrategy.ALL
x = numbers.normal(size=(SAMPLES, 6)).astype("float32")
y = [numbers.normal(size=(SAMPLES, width)).astype("float32") for width in (3, 2)]


def distance(model: Any, inputs: Any, wanted: Any, training: bool) -> Any:
    """A loss that is not a mean over samples, and what layers add to it."""
    first, second = model(inputs, training=training)
    wanted = [ops.convert_to_tensor(part) for part in wanted]
    deviation = ops.mean(ops.var(second - wanted[1], axis=0)) + ops.sqrt(ops.mean(second**2))
    return ops.mean((first - wanted[0]) ** 2) + deviation + sum(model.losses)


def trained(model: Any, optimizer: Any, inputs: Any, wanted: Any) -> Any:
    """The loss of a step."""
    if TENSORFLOW:
        with tensorflow.GradientTape() as tape:
            loss = distance(model, inputs, wanted, training=True)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss
    model.zero_grad()
    loss = distance(model, inputs, wanted, training=True)
    loss.backward()
    with torch.no_grad():
        optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)
    return loss.detach()


class OwnSteps(keras.Model):
    """Steps that use the whole batch."""

    def train_step(self, data):
        inputs, wanted, _ = keras.utils.unpack_x_y_sample_weight(data)
        return {"distance": trained(self, self.optimizer, inputs, wanted)}

    def test_step(self, data):
        inputs, wanted, _ = keras.utils.unpack_x_y_sample_weight(data)
        return {"distance": distance(self, inputs, wanted, training=False)}


class OwnLoss(keras.Model):
    """A loss with a part of its own."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        usual = super().compute_loss(x, y, y_pred, sample_weight, training)
        return usual + ops.sqrt(ops.mean(y_pred[0] ** 2)) * ops.mean(ops.abs(x))


def network(kind: Any = keras.Model) -> Any:
    keras.utils.set_random_seed(7)
    inputs = keras.Input((6,))
    hidden = layers.Dense(8, "tanh", kernel_regularizer="l2", activity_regularizer="l2")(inputs)
    hidden = tnt.layers.SplitLayer(name="halves")(layers.Dropout(0.3, seed=3)(hidden))
    hidden = layers.Dense(8, "tanh", kernel_regularizer="l2")(hidden)
    return kind(inputs, [layers.Dense(3, name="first")(hidden), layers.Dense(2, name="second")(hidden)])


def both(kind: Any = keras.Model, strategy: Any = PIPELINING) -> tuple[Any, Any]:
    """A model in stages, and the same for Keras alone."""
    own_result, alone = network(kind), network(kind)
    for v, another in zip(own_result.variables, alone.variables, strict=True):
        v.assign(another)
    return tnt.Model(own_result, parallel_strategy=strategy, micro_batches=2), alone


def same(own_result: Any, alone: Any, what: str) -> None:
    for own_part, expected in zip(own_result.get_weights(), alone.get_weights(), strict=True):
        alike(own_part, expected, f"{what}: weights")
    for own_part, expected in zip(own_result.predict_on_batch(x), alone.predict_on_batch(x), strict=True):
        alike(own_part, expected, f"{what}: predictions")


def compare_steps(kind: Any, strategy: Any = PIPELINING, samples: int = SAMPLES) -> None:
    """With the first `samples`."""
    results, metrics = [], [["mae"], ["mae"]] if kind is OwnLoss else None
    inputs, wanted = x[:samples], [part[:samples] for part in y]
    own_result, alone = both(kind, strategy)
    for model in (own_result, alone):
        optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.5)
        model.compile(optimizer, ["mse", "mse"], metrics=metrics, run_eagerly=True)
        history = model.fit(
            inputs, wanted, BATCH, epochs=2, shuffle=False, verbose=0, validation_data=(inputs, wanted)
        ).history
        first = [part[:BATCH] for part in wanted]
        batch = model.train_on_batch(inputs[:BATCH], first, return_dict=True)
        tested = model.test_on_batch(inputs[:BATCH], first, return_dict=True)
        evaluated = model.evaluate(inputs, wanted, BATCH, verbose=0, return_dict=True)
        results.append([history, batch, tested, evaluated])
    for own_part, expected in zip(*results, strict=True):
        assert own_part.keys() == expected.keys()
        for name in expected:
            alike(own_part[name], expected[name], f"{kind.__name__}: {name}")
    same(own_result, alone, kind.__name__)
    predictions = [model.predict(inputs, BATCH, verbose=0) for model in (own_result, alone)]
    for own_part, expected in zip(*predictions, strict=True):
        alike(own_part, expected, f"{kind.__name__}: predictions")
    assert own_result.plan().replicas * own_result.plan().schedule.ranks == tnt.get_size()


def compare_loops(strategy: Any = PIPELINING) -> None:
    own_result, alone = both(strategy=strategy)
    optimizers = [keras.optimizers.Adam(0.01, global_clipnorm=0.5) for _ in range(2)]
    tnt.Optimizer(optimizers[0])
    for begin in [*range(0, SAMPLES, BATCH)] * 2:
        part = slice(begin, begin + BATCH)
        first, second = (
            ops.convert_to_numpy(trained(model, optimizer, x[part], [each[part] for each in y]))
            for model, optimizer in zip((own_result, alone), optimizers, strict=True)
        )
        alike(first, second, f"the loss of the batch from {begin} on")
    same(own_result, alone, "a loop")
    first, second = (ops.convert_to_numpy(ops.stop_gradient(model(x)[0])) for model in (own_result, alone))
    alike(first, second, "evaluation")
    slots = sum(ops.convert_to_numpy(v.value).size for v in optimizers[0].variables)
    assert slots < sum(ops.convert_to_numpy(v.value).size for v in optimizers[1].variables)


def steps() -> None:
    compare_steps(OwnSteps)
    compare_steps(OwnLoss)


def replicas() -> None:
    """Two pipelines: gradients come back to each one's share of a batch that none of them divides."""
    compare_loops(ALL)
    compare_steps(OwnSteps, ALL)
    for kind in (OwnSteps, OwnLoss):  # of the last batch, one pipeline has nothing
        compare_steps(kind, ALL, samples=2 * BATCH + 1)


def refused() -> None:
    own_result, _ = both()
    own_result.predict_on_batch(x[:BATCH])
    with pytest.raises(InvalidCall, match="its optimizer does not know that"):
        own_result(x[:BATCH], training=True)
    optimizer = tnt.Optimizer(keras.optimizers.Adam(0.01))
    with pytest.raises(InvalidCall, match="Rank 1 gave a model in stages another batch than rank 0"):
        own_result(x[tnt.get_rank() :][:BATCH], training=True)
    variables = own_result.trainable_variables
    with pytest.raises(InvalidCall, match="No variable of the model in stages has a gradient"):
        optimizer.apply([None for _ in variables], variables)
    if TENSORFLOW:
        graph = tensorflow.function(lambda: own_result(x[:BATCH], training=True), autograph=False)
        with pytest.raises(InvalidCall, match=r"within tf\.function"):
            graph()
    first = [part[:BATCH] for part in y]
    trained(own_result, optimizer, x[:BATCH], first)
    with pytest.raises(InvalidCall, match="Several optimizers train one model in stages"):
        trained(own_result, tnt.Optimizer(keras.optimizers.SGD()), x[:BATCH], first)
    own = keras.Variable(np.zeros(3, "float32"))
    with pytest.raises(InvalidCall, match="beside the layers of a model in stages"):
        optimizer.apply([None for _ in [*variables, own]], [*variables, own])


{"steps": steps, "loops": compare_loops, "replicas": replicas, "refused": refused}[sys.argv[1]]()
