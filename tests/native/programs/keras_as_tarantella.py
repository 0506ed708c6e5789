"""Scripts in the way that Tarantella's users write them; only the import differs. Argument: which of them.

Each sees that Keras alone does the same on whole batches, on the rank that it is right to ask.
"""

# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false

import sys
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import keras

import carme_runtime.keras as tnt
import carme_runtime.keras.layers as tnt_layers

kind = sys.argv[1]
BATCH, SAMPLES = 16, 64
numbers = np.random.default_rng(3)
x = numbers.normal(size=(SAMPLES, 8, 8, 1)).astype("float32")
y = numbers.integers(0, 10, SAMPLES).astype("float32")
more = numbers.normal(size=(SAMPLES, 6)).astype("float32")


def dataset(inputs: Any = x, targets: Any = y, batch: int = BATCH) -> Any:
    whole = tf.data.Dataset.from_tensor_slices((inputs, targets))
    whole = whole.shuffle(SAMPLES, seed=42, reshuffle_each_iteration=False)
    return whole.batch(batch).prefetch(tf.data.experimental.AUTOTUNE)


def lenet(split: bool) -> Any:
    inputs = keras.Input(shape=(8, 8, 1), name="input")
    hidden = keras.layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    hidden = keras.layers.MaxPooling2D(pool_size=(2, 2), strides=(2, 2))(hidden)
    if split:
        hidden = tnt_layers.SplitLayer(name="split_layer1")(hidden)
    hidden = keras.layers.Flatten()(hidden)
    hidden = keras.layers.Dense(20, activation="relu")(hidden)
    outputs = keras.layers.Dense(10, activation="softmax")(hidden + hidden)
    return keras.Model(inputs=inputs, outputs=outputs)


def skip() -> Any:
    inputs = keras.Input(shape=(8, 8, 1), name="input")
    hidden = keras.layers.Conv2D(4, 3, strides=(1, 1), padding="valid", name="conv")(inputs)
    first = tnt_layers.SplitLayer(name="split_layer0")(hidden)
    second = tnt_layers.SplitLayer(name="split_layer1")(hidden)
    hidden = keras.layers.Conv2D(4, 1, padding="valid", activation="relu", name="conv_relu")(first)
    hidden = tnt_layers.SplitLayer(name="split_layer2")(hidden)
    hidden = keras.layers.Concatenate(name="concat")([hidden, second])
    hidden = keras.layers.Flatten(name="flatten")(hidden)
    outputs = keras.layers.Dense(10, activation="softmax", name="dense_softmax")(hidden)
    return keras.Model(inputs=inputs, outputs=outputs)


def several_inputs() -> Any:
    images, numbers = keras.Input(shape=(8, 8, 1), name="input0"), keras.Input(shape=(6,), name="input1")
    hidden = keras.layers.Flatten(name="flatten")(images)
    hidden = keras.layers.Dense(6, activation="relu")(hidden)
    hidden = tnt_layers.SplitLayer(name="split_layer0")(hidden)
    hidden = keras.layers.Concatenate(name="concat")([numbers, hidden])
    outputs = keras.layers.Dense(10, activation="softmax", name="dense_softmax")(hidden)
    return keras.Model(inputs=[images, numbers], outputs=outputs)


def several_outputs() -> Any:
    inputs = keras.Input(shape=(8, 8, 1), name="input")
    hidden = keras.layers.Flatten(name="flatten")(inputs)
    hidden = keras.layers.Dense(10, activation="relu", name="dense_relu")(hidden)
    first = tnt_layers.SplitLayer(name="first")(hidden)
    second = tnt_layers.SplitLayer(name="second")(hidden)
    hidden = keras.layers.Add(name="add")([first, second])
    tens = keras.layers.Dense(10, activation="softmax", name="ten_classes")(hidden)
    twos = keras.layers.Dense(2, activation="softmax", name="two_classes")(hidden)
    return keras.Model(inputs=inputs, outputs=[tens, twos], name="model")


def compiled(model: Any, several: bool = False) -> Any:
    loss: Any = keras.losses.SparseCategoricalCrossentropy()
    metrics: Any = [keras.metrics.SparseCategoricalAccuracy()]
    if several:
        loss, metrics = [loss, keras.losses.SparseCategoricalCrossentropy()], [metrics, ["accuracy"]]
    model.compile(optimizer=keras.optimizers.SGD(learning_rate=0.1), loss=loss, metrics=metrics)
    return model


def alike(tested: Any, expected_value: Any, what: str) -> None:
    np.testing.assert_allclose(tested, expected_value, rtol=1e-4, atol=1e-6, err_msg=what)


def trained_alike(make: Any, data: Any, several: bool = False, **options: Any) -> Any:
    """Train a model as a script of Tarantella's, and as Keras does."""
    keras.utils.set_random_seed(1)
    reference = make()
    copy = keras.models.clone_model(reference)
    copy.set_weights(reference.get_weights())
    model = compiled(tnt.Model(copy, **options), several)
    compiled(reference, several)
    tested = model.fit(data, validation_data=data, epochs=2, verbose=0)
    expected_value = reference.fit(data, validation_data=data, epochs=2, verbose=0)
    assert tested.history.keys() == expected_value.history.keys(), tested.history
    for name, values in expected_value.history.items():
        alike(tested.history[name], values, name)
    for got, expected in zip(model.get_weights(), reference.get_weights(), strict=True):
        alike(got, expected, "weights")
    alike(model.evaluate(data, verbose=0), reference.evaluate(data, verbose=0), "evaluate")
    for got, expected in zip(
        keras.tree.flatten(model.predict(data, verbose=0)),
        keras.tree.flatten(reference.predict(data, verbose=0)),
        strict=True,
    ):
        alike(got, expected, "predict")
    return model


def fit() -> None:
    trained_alike(lambda: lenet(False), dataset())
    trained_alike(lambda: lenet(False), dataset(), parallel_strategy=tnt.ParallelStrategy.DATA)
    # A SplitLayer does no harm where each rank has all layers.
    trained_alike(lambda: lenet(True), dataset())


def pipelining() -> None:
    for strategy in (tnt.ParallelStrategy.PIPELINING, tnt.ParallelStrategy.ALL):
        model = trained_alike(
            lambda: lenet(True), dataset(), parallel_strategy=strategy, num_pipeline_stages=2
        )
        assert "2 stages x 1 replicas, 2 micro-batches" in str(model.plan()), model.plan()


def skips() -> None:
    model = trained_alike(
        skip, dataset(), parallel_strategy=tnt.ParallelStrategy.PIPELINING, num_pipeline_stages=4
    )
    assert "3 stages x 1 replicas, 4 micro-batches" in str(model.plan()), model.plan()


def inputs() -> None:
    trained_alike(
        several_inputs, dataset((x, more)), parallel_strategy=tnt.ParallelStrategy.PIPELINING,
        num_pipeline_stages=2,
    )  # fmt: skip


def outputs() -> None:
    data = dataset(x, (y, (y % 2).astype("float32")))
    options = {"parallel_strategy": tnt.ParallelStrategy.PIPELINING, "num_pipeline_stages": 1}
    trained_alike(several_outputs, data, True, **options)


def loop() -> None:
    """A loop of the script's own, with Keras 2's name of `reset_state`."""
    keras.utils.set_random_seed(1)
    reference = lenet(False)
    model = tnt.Model(keras.models.clone_model(reference))
    model.set_weights(reference.get_weights())
    optimizer = tnt.Optimizer(keras.optimizers.SGD(learning_rate=1e-1))
    loss_fn = keras.losses.SparseCategoricalCrossentropy()
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    train = tnt.data.Dataset(dataset=dataset()).distribute_dataset_across_ranks(is_training=True)
    check = tnt.data.Dataset(dataset=dataset()).distribute_dataset_across_ranks(is_training=False)
    for _ in range(2):
        for inputs, targets in train:
            with tf.GradientTape() as tape:
                logits = model(inputs, training=True)
                loss = loss_fn(targets, logits)
            gradients = tape.gradient(loss, model.trainable_weights)
            optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
            accuracy.update_state(targets, logits)
        accuracy.reset_states()
        assert float(accuracy.result()) == 0
        for inputs, targets in check:
            accuracy.update_state(targets, model(inputs, training=False))
    compiled(reference).fit(dataset(), epochs=2, verbose=0)
    for got, expected in zip(model.get_weights(), reference.get_weights(), strict=True):
        alike(got, expected, "weights")
    alike(float(accuracy.result()), reference.evaluate(dataset(), verbose=0)[1], "accuracy")


{"fit": fit, "pipelining": pipelining, "skips": skips, "inputs": inputs, "outputs": outputs, "loop": loop}[
    kind
]()
