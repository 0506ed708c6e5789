"""What scripts do around a Keras model in stages; arguments: which of it, and a folder all ranks see."""

# pyright: reportMissingImports=false, reportArgumentType=false

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import carme_runtime.keras as tnt
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.errors import CarmeRuntimeError

TENSORFLOW = keras.backend.backend() == "tensorflow"
if TENSORFLOW:
    import tensorflow

    tensorflow.config.threading.set_intra_op_parallelism_threads(1)
else:
    import torch

    torch.set_num_threads(1)
kind, folder = sys.argv[1], Path(sys.argv[2])
rank, size = tnt.get_rank(), tnt.get_size()
PIPELINING, ALL = tnt.ParallelStrategy.PIPELINING, tnt.ParallelStrategy.ALL
numbers = np.random.default_rng(5)
x = numbers.normal(size=(40, 6)).astype("float32")
y = x[:, :2].copy()


def network(*more):
    keras.utils.set_random_seed(5)
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((6,)), dense(8, "tanh"), dense(8, "tanh"), *more, dense(2)])


def compiled(model=None, strategy=PIPELINING, **options):
    tested = tnt.Model(model or network(), parallel_strategy=strategy, **options)
    tested.compile(keras.optimizers.Adam(0.05), "mse")
    return tested


def close(tested, reference):
    for actual, expected in zip(tested, reference, strict=True):
        np.testing.assert_allclose(actual, expected, 1e-4, 1e-6)


def train(model, **more):
    return model.fit(x, y, 10, shuffle=False, verbose=0, **more)


def files():
    """Training goes on from a file as if nothing had happened, in another layout too."""
    expected = network()
    expected.compile(keras.optimizers.Adam(0.05), "mse")
    train(expected, epochs=4)
    tested = compiled(stages=size)
    train(tested, epochs=2)
    held = sum(np.asarray(keras.ops.convert_to_numpy(v.value)).size for v in tested.keras_model.variables)
    assert held < tested.count_params(), "a stage holds all layers"
    slots = sum(np.asarray(keras.ops.convert_to_numpy(v.value)).size for v in tested.optimizer.variables)
    assert slots < 2 * tested.count_params()
    tested.save(folder / "model.keras")
    tested.save_weights(folder / "only.weights.h5")
    loaded = tnt.Model(keras.models.load_model(folder / "model.keras"), parallel_strategy=ALL, stages=size)
    train(loaded, epochs=2)
    close(loaded.get_weights(), expected.get_weights())
    train(tested, epochs=2)
    close(tested.get_weights(), expected.get_weights())
    tested.load_weights(folder / "only.weights.h5")
    plain = tnt.models.load_model(folder / "model.keras")  # each rank has all of it
    close(tested.get_weights(), plain.get_weights())
    close(tested.predict(x, verbose=0), plain.predict(x, verbose=0))
    tested.set_weights(expected.get_weights())
    close([tested.predict(x, verbose=0)], [expected.predict(x, verbose=0)])
    # Layers are frozen, and batches become larger.
    for model in (tested.keras_model, expected):
        model.layers[0].trainable = False
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    tested.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    for model in (tested, expected):
        for batch in (5, 10, 20):
            model.train_on_batch(x[:batch], y[:batch])
    close(tested.get_weights(), expected.get_weights())
    grow()


def untrained():
    """A model with a layer in both stages that gets no gradients, and so no weight decay either."""
    keras.utils.set_random_seed(5)
    stop, shared = keras.ops.stop_gradient, keras.layers.Dense(6, "tanh")
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(6, "tanh")(inputs) + stop(shared(inputs))
    hidden = tnt.layers.SplitLayer(name="halves")(hidden)
    return keras.Model(inputs, keras.layers.Dense(2)(hidden + stop(shared(hidden))))


def grow():
    """Batches become larger from one fit to the next, and within one."""

    class Growing(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            batch = (15, 30, 40)[index]
            return x[:batch], y[:batch]

    expected, tested = network(), compiled(stages=size)
    expected.compile(keras.optimizers.Adam(0.05), "mse")
    for model in (expected, tested):
        model.predict(x[:5], verbose=0)
        for batch in (10, 20):
            model.fit(x, y, batch, shuffle=False, verbose=0)
        model.fit(Growing(), shuffle=False, verbose=0)
    close(tested.get_weights(), expected.get_weights())
    close([tested.predict(x, verbose=0)], [expected.predict(x, verbose=0)])
    if TENSORFLOW:
        on_tensorflow_alone()


def on_tensorflow_alone():
    """A variable without gradients stays, and a model that is not cut runs as it was compiled."""
    for model in (expected := untrained(), tested := compiled(untrained(), stages=size)):
        model.compile(keras.optimizers.AdamW(0.05, weight_decay=0.1), "mse")
        train(model)
    close(tested.get_weights(), expected.get_weights())
    for eager in (True, False):
        whole = compiled(strategy=ALL, stages=1)
        whole.compile("sgd", "mse", run_eagerly=eager)
        train(whole)
        assert whole.run_eagerly is eager
        inner = network()
        inner.compile("sgd", "mse", run_eagerly=eager)
        again = tnt.Model(tnt.Model(inner, parallel_strategy=ALL, stages=1), parallel_strategy=ALL, stages=1)
        train(again)
        assert again.run_eagerly is eager


def taken_over():
    """A model that is given to another tnt.Model has all weights, and runs as it was compiled."""
    for eager in (False, True):
        expected, tested = network(), compiled(stages=size)
        for model in (expected, tested):
            model.compile("sgd", "mse", run_eagerly=eager)
            train(model)
        for strategy in (tnt.ParallelStrategy.DATA, PIPELINING, PIPELINING, ALL):
            tested = tnt.Model(tested, parallel_strategy=strategy)
            close(tested.keras_model.get_weights(), expected.get_weights())
            if strategy is tnt.ParallelStrategy.DATA:
                assert tested.run_eagerly is eager
            for model in (expected, tested):
                train(model)
            close(tested.get_weights(), expected.get_weights())


def callbacks():
    """They see the whole model at the end of an epoch, and what they set holds."""
    seen = []

    class Probe(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            model: Any = self.model
            seen.append([np.array(w) for w in model.get_weights()])

    best = keras.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True, baseline=None)
    tested = compiled()
    saved = keras.callbacks.ModelCheckpoint(folder / "{epoch}.keras")
    rates = keras.callbacks.LearningRateScheduler(lambda epoch: 0.05 if epoch < 3 else 5.0)
    history = train(tested, epochs=9, callbacks=[Probe(), saved, rates, best]).history["loss"]
    chosen = int(np.argmin(history))
    assert len(history) < 9
    close(tested.get_weights(), seen[chosen])
    loaded: Any = keras.models.load_model(folder / f"{chosen + 1}.keras")
    close(loaded.get_weights(), seen[chosen])
    with pytest.raises(InvalidCall, match="Use save_freq='epoch'"):
        train(tested, callbacks=[keras.callbacks.ModelCheckpoint(folder / "x.keras", save_freq=3)])
    tested = compiled()
    train(tested, epochs=2, callbacks=[tnt.callbacks.Checkpoints(folder / "checkpoints")])
    peer = compiled(strategy=tnt.ParallelStrategy.DATA)
    train(peer, epochs=3, callbacks=[tnt.callbacks.Checkpoints(folder / "checkpoints")])
    train(tested, epochs=1)
    close(tested.get_weights(), peer.get_weights())


def refused(sentence, call):
    with pytest.raises(CarmeRuntimeError) as caught:
        call()
    assert sentence in str(caught.value) and caught.value.remedy, str(caught.value)


def mistakes():
    """What cannot be gets a sentence, and the nearest that can."""
    layers = keras.layers
    marked = network(tnt.layers.SplitLayer(name="a"), layers.Dense(4), tnt.layers.SplitLayer(name="b"))
    refused("SplitLayers cut the model into 3 stages", lambda: compiled(marked))
    inputs = keras.Input((6,))
    hidden = layers.Dense(4)(inputs)
    around = layers.Add()([tnt.layers.SplitLayer(name="bypassed")(hidden), hidden])
    refused(
        "The SplitLayer bypassed does not end a stage",
        lambda: compiled(keras.Model(inputs, layers.Dense(2)(around))),
    )

    class Subclassed(keras.Model):
        def call(self, inputs):
            return inputs

    refused("it is not a functional or sequential model", lambda: compiled(Subclassed()))
    unbuilt = keras.Sequential([layers.Dense(2)])
    refused("does not begin with keras.Input. Use ParallelStrategy.DATA", lambda: compiled(unbuilt))
    refused("Use micro_batches=", lambda: train(compiled(micro_batches=4)))
    refused("no schedule 'fast'", lambda: train(compiled(schedule="fast")))
    peer = network(layers.Activation(("relu", "tanh")[rank], name="unlike"))
    refused("settings of layers differ", lambda: train(compiled(peer)))
    refused("stages='2' is not a whole number", lambda: compiled(stages="2"))
    refused("into 0 micro-batches. Use micro_batches=1", lambda: train(compiled(micro_batches=0)))
    refused("no argument 'stage' beside a model", lambda: compiled(stage=2))
    refused("'pipeline' is not a ParallelStrategy", lambda: compiled(strategy="pipeline"))
    refused("A stage needs", lambda: train(compiled(memory="0.1K")))
    refused("too few for", lambda: train(compiled(keras.Sequential([keras.Input((6,)), layers.Dense(2)]))))
    if TENSORFLOW:
        refused("needs Keras' torch backend", lambda: train(compiled(schedule="zbv")))
        refused("Choose from micro, exact", lambda: train(compiled(batch_norm="deferred")))
        accumulating = compiled()
        accumulating.compile(keras.optimizers.Adam(gradient_accumulation_steps=2), "mse")
        refused("gradient_accumulation_steps", lambda: train(accumulating))
    summing = compiled()
    summing.compile("sgd", keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    refused("which depends on the whole batch", lambda: train(summing))
    wide = np.ones((40, 3), "float32")
    refused(
        "The loss or a metric fails for outputs of shape [None, 2] and targets of ",
        lambda: compiled().fit(x, wide, 10, verbose=0),
    )
    tested = compiled()
    train(tested)
    refused("its optimizer does not know that", lambda: tested(x, training=True))
    assert tested(x).shape == (40, 2)


def normalising(batch_norm):
    """A model whose first layer's moving averages depend on the data alone, after training."""
    keras.utils.set_random_seed(5)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((6,)), layers.BatchNormalization(momentum=0.8), layers.Dense(8, "tanh"), layers.Dense(2)]
    )
    if batch_norm is None:
        model.compile(keras.optimizers.Adam(0.05), "mse")
    else:
        model = compiled(model, stages=size, micro_batches=5, batch_norm=batch_norm)
    train(model, epochs=2)
    averages = model.get_weights()[2:4]
    if batch_norm:
        assert f"BatchNorm: {batch_norm}." in str(model.plan()), model.plan()
    return averages


def deferred():
    """Moving averages change once a step, by the statistics of the whole batch."""
    expected = normalising(None)
    close(normalising("deferred"), expected)
    with pytest.raises(AssertionError):
        close(normalising("micro"), expected)
    layers = keras.layers
    inner = keras.Sequential([layers.Dense(6), layers.BatchNormalization(renorm=True)])
    with pytest.raises(InvalidCall, match="cannot defer"):
        train(compiled(network(*inner.layers), stages=size, batch_norm="deferred"))


class Dying(keras.callbacks.Callback):
    """Rank 1 ends in the middle of the first epoch."""

    def on_train_batch_begin(self, batch, logs=None):
        if rank == 1 and batch == 2:
            (folder / "ended").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)


def lost():
    """The other rank says so, within a second at one of several tries."""
    tested = compiled(stages=size, micro_batches=2)
    try:
        train(tested, callbacks=[Dying()])
    except CarmeRuntimeError as error:
        seconds = time.time() - float((folder / "ended").read_text())
        assert re.search(r"[Rr]ank 1 (ended|was lost)", str(error)) and error.remedy, str(error)
        print(f"LATE {seconds:.3f} s: {error}", flush=True)
        os._exit(0)
    raise AssertionError("rank 1 was not missed")


actions = {
    "files": files,
    "callbacks": callbacks,
    "deferred": deferred,
    "lost": lost,
    "mistakes": mistakes,
    "taken_over": taken_over,
}
actions[kind]()
