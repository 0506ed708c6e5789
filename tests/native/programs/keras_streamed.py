"""The first training step of a Keras model runs while rank 0's weights still travel.

    keras_streamed.py equal|overlap|once|mistakes
    keras_streamed.py save|resume FOLDER

KERAS_BACKEND is torch or tensorflow.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import importlib
import logging
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import carme_runtime.keras as ck
from carme_runtime.checkpoint import files
from carme_runtime.collectives import Group
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.keras.world import world
from patience import HANG

action, *folders = sys.argv[1:]
on_tensorflow = keras.backend.backend() == "tensorflow"
tf: Any = importlib.import_module("tensorflow") if on_tensorflow else None
if on_tensorflow:
    tf.config.threading.set_inter_op_parallelism_threads(2)  # one of them waits for weights
WIDTH = 48  # whose kernels are not small variables
numbers = np.random.default_rng(3)
x = numbers.normal(size=(24, WIDTH)).astype("float32")
y = numbers.normal(size=(24, WIDTH)).astype("float32")


def layers() -> list[Any]:
    normal, drop = keras.layers.BatchNormalization(), keras.layers.Dropout(0.25)
    first, *rest = (keras.layers.Dense(WIDTH, activation="tanh") for _ in range(4))
    return [first, normal, drop, *rest]


class Own(keras.Model):
    """Keras knows nothing of when it uses which layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = keras.Sequential([keras.Input((WIDTH,)), *layers()])

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.body(inputs, training=training)


def compiled(seed: int, start: str, kind: str = "functional") -> Any:
    """A compiled model; that of rank 0 has this seed."""
    keras.utils.set_random_seed(seed + 100 * ck.get_rank())
    model = Own() if kind == "own" else keras.Sequential([keras.Input((WIDTH,)), *layers()])
    model(x[:1])
    model = ck.Model(model, start=start)
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    return model


def trained(seed: int, start: str, kind: str) -> tuple[list[float], list[Any]]:
    """Losses and weights of two fits; the second one begins with what all ranks have."""
    model = compiled(seed, start, kind)
    losses = []
    for _ in range(2):
        history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        losses += history.history["loss"]
    losses.append(float(model.train_on_batch(x[:8], y[:8])))
    return losses, model.get_weights()


class Rate(keras.callbacks.Callback):
    """Looks at weights before the first batch."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            model: Any = self.model
            self.weights = [np.array(value) for value in model.get_weights()]


def equal() -> None:
    for kind in ("functional", "own"):
        messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, messages=messages: messages.append(record.getMessage())  # pyright: ignore
        logging.getLogger("carme_runtime").addHandler(handler)
        expected = trained(5, "", kind)
        found = trained(5, "streamed", kind)
        logging.getLogger("carme_runtime").removeHandler(handler)
        assert found[0] == expected[0], (kind, found[0], expected[0])
        for tested, reference in zip(found[1], expected[1], strict=True):
            assert np.array_equal(tested, reference), kind
        waits = any("waits for all weights" in text for text in messages)
        assert waits == (on_tensorflow and kind == "own"), messages
    keras.utils.set_random_seed(5)
    own = keras.Sequential([keras.Input((WIDTH,)), *layers()])
    callback = Rate()
    model = compiled(5, "streamed")
    model.fit(x, y, batch_size=8, callbacks=[callback], verbose=0)
    if ck.is_master_rank():
        return
    for tested, reference in zip(callback.weights, own.get_weights(), strict=True):
        assert np.array_equal(tested, reference)


class Later:
    """A broadcast that a thread begins when it may, after the one before it."""

    def __init__(
        self, before: threading.Event, after: threading.Event, may: threading.Event, begin: Callable[[], Any]
    ) -> None:
        def run() -> None:
            for event in (before, may):
                event.wait()
            self._pending = begin()
            after.set()

        self._pending: Any = None
        self._thread = threading.Thread(target=run)
        self._thread.start()

    def wait(self) -> None:
        """Wait until it has been sent."""
        self._thread.join()
        if self._pending:
            self._pending.wait()


def overlap() -> None:
    """The master rank does not send the last kernels before another rank has run the first layer."""
    send: Any = Group.broadcast
    lane, limit = world().lane()
    count = [0]
    turns = [threading.Event()]
    turns[0].set()
    trains, first_layer_ran, may_go_on = threading.Event(), threading.Event(), threading.Event()
    in_time = np.zeros(1, np.uint8)

    def hold(group: Group, *arguments: Any, **options: Any) -> Any:
        if not options.get("asynchronous"):
            return send(group, *arguments, **options)
        count[0] += 1
        if not ck.is_master_rank() or count[0] < 3:
            return send(group, *arguments, **options)
        turns.append(threading.Event())
        return Later(turns[-2], turns[-1], may_go_on, lambda: send(group, *arguments, **options))

    def signal() -> None:
        """Let the master rank know, beside what the ranks do meanwhile."""
        if not ck.is_master_rank():
            in_time[0] = first_layer_ran.wait(HANG)
        send(lane, in_time, 1, timeout=limit)
        may_go_on.set()

    def note(value: Any) -> Any:
        if trains.is_set():
            first_layer_ran.set()
        return value

    def seen(value: Any) -> Any:
        if not on_tensorflow:
            return note(value)
        # Not stateful: in a graph it would have its place in the order of the waits.
        noted = tf.numpy_function(note, [value], value.dtype, stateful=False)
        noted.set_shape(value.shape)
        return value + tf.stop_gradient(noted - value)

    keras.utils.set_random_seed(5 + 100 * ck.get_rank())
    first, *rest = layers()
    probe = keras.layers.Lambda(seen, output_shape=(WIDTH,))
    model = keras.Sequential([keras.Input((WIDTH,)), first, probe, *rest])
    model(x[:1])
    model = ck.Model(model, start="streamed")
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    trains.set()
    thread = threading.Thread(target=signal)
    thread.start()
    Group.broadcast = hold
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    Group.broadcast = send
    thread.join()
    assert in_time[0], "the first layer waits for the last one"
    assert count[0] == 4, "the kernels of four layers travel one after the other"
    weights = model.get_weights()
    for tested, reference in zip(weights, world().exchange(weights)[0], strict=True):
        assert np.array_equal(tested, reference)


def once() -> None:
    """Neither start sends a kernel, or what the optimizer has of it, twice."""
    send: Any = Group.broadcast
    for start in ("", "streamed"):
        model = compiled(5, start)
        model.optimizer.build(model.trainable_variables)
        sent: list[int] = []

        def counting(group: Group, array: Any, *more: Any, sent: list[int] = sent, **options: Any) -> Any:
            sent.append(array.nbytes)
            return send(group, array, *more, **options)

        Group.broadcast = counting
        model.train_on_batch(x[:8], y[:8])
        Group.broadcast = send
        kernel = WIDTH * WIDTH * 4
        kernels = 4 if start else 3 * 4  # Adam's states are zero in the streamed start
        assert sorted(size for size in sent if size >= kernel) == [kernel] * kernels, (start, sent)


def save() -> None:
    """Two epochs; the folder has their end."""
    model = compiled(7, "")
    model.fit(x, y, 8, 2, 0, [ck.callbacks.Checkpoints(folders[0])], shuffle=False)


def resume() -> None:
    """What rank 0 alone reads is what every rank would have read, no matter who saved it."""
    read: Any = files.read
    reads: list[Path] = []

    def counted(checkpoint: Path, *more: Any) -> Any:
        reads.append(checkpoint)
        return read(checkpoint, *more)

    files.read = counted
    saved = Path(folders[0])
    found = []
    for number, (of_model, of_callback) in enumerate(
        [("", ""), ("streamed", "streamed"), ("", "streamed"), ("streamed", "")]
    ):
        folder = saved.with_name(f"copy-{number}")
        if ck.is_master_rank():
            shutil.copytree(saved, folder)
        world().barrier()
        reads.clear()
        model = compiled(20, of_model)  # Dropout may draw from the seed of the process
        callback = ck.callbacks.Checkpoints(folder, start=of_callback)
        history = model.fit(x, y, 8, 4, 0, [callback], shuffle=False)
        assert history.epoch == [2, 3], (of_model, of_callback, history.epoch)
        assert len(reads) == (ck.is_master_rank() or not of_callback), (of_model, of_callback, reads)
        found.append((history.history["loss"], model.get_weights()))
    for losses, weights in found[1:]:
        assert losses == found[0][0], (losses, found[0][0])
        for tested, reference in zip(weights, found[0][1], strict=True):
            assert np.array_equal(tested, reference)


def mistakes() -> None:
    model = keras.Sequential([keras.Input((WIDTH,)), *layers()])
    with pytest.raises(InvalidCall, match=r"no start 'slowly'.*'streamed'"):
        ck.Model(model, start="slowly")
    with pytest.raises(InvalidCall, match=r"may be cut into stages.*Leave start out"):
        ck.Model(model, parallel_strategy=ck.ParallelStrategy.PIPELINING, start="streamed")


globals()[action]()
