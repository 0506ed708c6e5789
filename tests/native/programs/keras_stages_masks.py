"""Trains models with masks, states and added losses in stages, and sees that Keras alone does the same.

keras_stages_masks.py GROUP: of the cases below.
"""

# pyright: reportMissingImports=false

import sys
from typing import Any

import keras
import numpy as np
import pytest
from keras_stages import BATCH, SAMPLES, TENSORFLOW, alike, numbers

import carme_runtime.keras as tnt
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.keras.layers import SplitLayer

layers = keras.layers
WORDS, LENGTH = 9, 6
PIPELINING = tnt.ParallelStrategy.PIPELINING


def sentences():
    """Numbers of words; zeros at the end, and some in the middle, are no words."""
    found = numbers.integers(1, WORDS, (SAMPLES, LENGTH))
    found[np.arange(LENGTH) >= numbers.integers(1, LENGTH + 1, (SAMPLES, 1))] = 0
    found[:, 1][::5] = 0
    return found


def classes(shape=(SAMPLES,)):
    return numbers.integers(0, 3, shape)


def embedded(tokens, **more):
    return layers.Embedding(WORDS, 6, mask_zero=True, **more)(tokens)


def split(x, name):
    return SplitLayer(name=name)(x)


def lstm():
    tokens = keras.Input((LENGTH,), dtype="int32")
    hidden = split(embedded(tokens), "words")
    hidden = layers.LSTM(5)(layers.LSTM(5, return_sequences=True)(hidden))
    # As a pipeline itself may call an input.
    return keras.Model(tokens, layers.Dense(3, name="input_0")(hidden)), sentences(), classes()


def attention():
    tokens = keras.Input((LENGTH,), dtype="int32")
    hidden = split(layers.Dense(6, "tanh", name="dense")(embedded(tokens)), "words")
    # Without biases: those of keys have no gradient but rounding, from which Adam makes steps.
    attended = layers.MultiHeadAttention(2, 3, use_bias=False)(hidden, hidden)
    hidden = layers.LayerNormalization()(layers.Add()([hidden, attended]))
    hidden = layers.GlobalAveragePooling1D()(hidden)
    # As a pipeline itself may call the mask of the other one.
    return keras.Model(tokens, layers.Dense(3, name="dense_1")(hidden)), sentences(), classes()


def cut_by_itself():
    """Wherever it is cut, a mask crosses."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    first = layers.Dense(6, "tanh")(embedded(tokens))
    second = layers.Dense(6, "tanh")(layers.Dense(6, "tanh")(first))
    attended = layers.MultiHeadAttention(2, 3, use_bias=False)(second, second)
    hidden = layers.Concatenate()([layers.Dense(4)(attended), layers.Dense(2)(layers.Dense(6)(attended))])
    hidden = layers.GlobalAveragePooling1D()(hidden)
    return keras.Model(tokens, layers.Dense(3)(hidden)), sentences(), classes()


def merged():
    tokens = [keras.Input((LENGTH,), dtype="int32", name=name) for name in ("first", "second")]
    hidden = [split(embedded(each), f"split_{place}") for place, each in enumerate(tokens)]
    added = layers.Add()(hidden)
    behind = layers.Concatenate(axis=1)([hidden[0], added])
    beside = layers.Maximum()([hidden[1], layers.Dense(6)(added)])
    pooled = [layers.GlobalAveragePooling1D()(behind), layers.LSTM(4)(beside)]
    outputs = layers.Dense(3)(layers.Concatenate()(pooled))
    return keras.Model(tokens, outputs), [sentences(), sentences()], classes()


def masking():
    inputs = keras.Input((LENGTH, 4))
    hidden = split(layers.Masking()(inputs), "rows")
    hidden = layers.TimeDistributed(layers.Dense(5, "tanh"))(hidden)
    hidden = layers.Bidirectional(layers.SimpleRNN(4))(hidden)
    x = numbers.normal(size=(SAMPLES, LENGTH, 4)).astype("float32") * (sentences() > 0)[:, :, None]
    return keras.Model(inputs, layers.Dense(3)(hidden)), x.astype("float32"), classes()


def dropped():
    """Dropout takes a value with a mask, and another model in the model, too."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Dropout(0.3, seed=3)(embedded(tokens))
    hidden = split(hidden, "words")
    inner = keras.Sequential([keras.Input((LENGTH, 6)), layers.Dense(4), layers.SimpleRNN(4)], name="inner")
    return keras.Model(tokens, layers.Dense(3)(inner(hidden))), sentences(), classes()


def over_two_cuts():
    tokens = keras.Input((LENGTH,), dtype="int32")
    first = embedded(tokens)
    hidden = layers.LSTM(6, return_sequences=True)(split(first, "first"))
    hidden = layers.Add()([split(hidden, "second"), split(first, "skip")])
    return keras.Model(tokens, layers.Dense(3)(layers.LSTM(4)(hidden))), sentences(), classes()


def tagged():
    """An output for each word has a mask, which the loss and the metrics count by."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.LSTM(5, return_sequences=True)(split(embedded(tokens), "words"))
    hidden = layers.Dropout(0.2, seed=8)(hidden)
    model = keras.Model(tokens, layers.TimeDistributed(layers.Dense(3))(hidden))
    return model, sentences(), classes((SAMPLES, LENGTH))


def tagged_twice():
    """Two outputs with masks of their own, and one without."""
    tokens = [keras.Input((LENGTH,), dtype="int32", name=name) for name in ("first", "second")]
    hidden = [split(embedded(each), f"split_{place}") for place, each in enumerate(tokens)]
    both = layers.Concatenate(axis=1, name="both")([layers.Dense(3)(each) for each in hidden])
    last = layers.Dense(3, name="last")(hidden[1])
    whole = layers.Dense(3, name="whole")(layers.LSTM(4)(hidden[0]))
    y = [classes((SAMPLES, 2 * LENGTH)), classes((SAMPLES, LENGTH)), classes()]
    return keras.Model(tokens, [both, last, whole]), [sentences(), sentences()], y


def ignoring():
    """Targets of a class do not count."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    hidden = split(layers.Embedding(WORDS, 6)(tokens), "words")
    y = classes((SAMPLES, LENGTH))
    y[:7] = 0
    y[7:, 2:] = np.where(numbers.random((SAMPLES - 7, LENGTH - 2)) < 0.7, 0, y[7:, 2:])
    return keras.Model(tokens, layers.Dense(3)(hidden)), sentences(), y


@keras.saving.register_keras_serializable(package="tests")
class Penalized(layers.Dense):
    """Adds to the loss from its call."""

    def call(self, inputs, training=None):
        outputs = super().call(inputs)
        penalty: Any = keras.ops.mean(keras.ops.square(outputs))
        self.add_loss(0.1 * penalty)
        return outputs


def penalized():
    inputs = keras.Input((6,))
    hidden = layers.Dense(8, "tanh", activity_regularizer="l2", kernel_regularizer="l2")(inputs)
    hidden = split(Penalized(8)(hidden), "halves")
    hidden = layers.Dense(6, "tanh", activity_regularizer="l1")(hidden)
    x = numbers.normal(size=(SAMPLES, 6)).astype("float32")
    return keras.Model(inputs, layers.Dense(3)(hidden)), x, classes()


def stateful():
    inputs = keras.Input(batch_shape=(BATCH, 3, 4))
    hidden = layers.SimpleRNN(5, stateful=True, return_sequences=True)(inputs)
    hidden = split(hidden, "steps")
    hidden = layers.Bidirectional(layers.SimpleRNN(4, stateful=True))(hidden)
    x = numbers.normal(size=(4 * BATCH, 3, 4)).astype("float32")
    return keras.Model(inputs, layers.Dense(3)(hidden)), x, classes((len(x),))


def stateful_words():
    """With masks, which must not change a state."""
    tokens = keras.Input(batch_shape=(BATCH, LENGTH), dtype="int32")
    hidden = layers.SimpleRNN(5, stateful=True)(split(embedded(tokens), "words"))
    return keras.Model(tokens, layers.Dense(3)(hidden)), sentences()[: 3 * BATCH], classes((3 * BATCH,))


class Reset(keras.callbacks.Callback):
    """States begin anew with each epoch but the last one."""

    def on_epoch_begin(self, epoch, logs=None):
        model: Any = self.model
        for layer in model.layers if epoch < 2 else ():
            if getattr(layer, "stateful", False):
                layer.reset_state()


def compiled(model, case):
    ignored = 0 if case is ignoring else None
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=ignored)
    several = len(model.outputs)
    weights = {"loss_weights": [1.0, 2.0, 0.5]} if several > 1 else {}
    metrics = [["accuracy"]] * several if several > 1 else ["accuracy"]
    losses = [loss] * several if several > 1 else loss
    model.compile(keras.optimizers.Adam(0.01), losses, metrics=metrics, **weights)
    return model


def fitted(model, x, y, weights):
    keras.utils.set_random_seed(11)
    more = {} if weights is None else {"sample_weight": weights}
    shuffled = not TENSORFLOW and model.inputs[0].shape[0] is None  # rows keep their places where states do
    fit = model.fit(x, y, BATCH, epochs=3, verbose=0, shuffle=shuffled, callbacks=[Reset()], **more)
    return fit.history


def compare(case, strategy=PIPELINING, **options):
    keras.utils.set_random_seed(7)
    reference, x, y = case()
    model = keras.models.clone_model(reference)
    for v, another in zip(model.variables, reference.variables, strict=True):
        v.assign(another)
    compiled(reference, case)
    tested = compiled(tnt.Model(model, parallel_strategy=strategy, **options), case)
    weights = None
    if not isinstance(y, list) and case is not ignoring:
        weights = np.linspace(0.5, 1.5, y.size).astype("float32").reshape(y.shape)
    what = f"{case.__name__} {options}"
    expected = fitted(reference, x, y, weights)
    for name, values in fitted(tested, x, y, weights).items():
        alike(values, expected[name], f"{what}: {name}")
    for own, expected_value in zip(tested.get_weights(), reference.get_weights(), strict=True):
        alike(own, expected_value, f"{what}: weights")
    found, expected_value = (each.predict(x, BATCH, verbose=0) for each in (tested, reference))
    for own, another in zip(keras.tree.flatten(found), keras.tree.flatten(expected_value), strict=True):
        alike(own, another, f"{what}: predictions")
    found, expected_value = (each.evaluate(x, y, BATCH, verbose=0) for each in (tested, reference))
    alike(found, expected_value, f"{what}: evaluation")
    if plan := tested.plan():
        assert plan.schedule.ranks * plan.replicas == tnt.get_size()
        assert plan.schedule.micro_batches == options["micro_batches"]
    if tnt.get_rank() == 0:
        print("the same:", what, flush=True)
    return tested, reference, x, y


def states():
    tested, reference, x, y = compare(stateful, micro_batches=4)
    # States outlive the pipeline, which is made anew.
    compiled(tested, stateful)
    compiled(reference, stateful)
    for batch in (slice(0, BATCH), slice(BATCH, 2 * BATCH)):
        first, second = (each.train_on_batch(x[batch], y[batch]) for each in (tested, reference))
        alike(first, second, "a batch")
    with pytest.raises(InvalidCall, match=f"keeps the states of {BATCH} samples, and the batch has 9"):
        tested.train_on_batch(x[:9], y[:9])
    # Nor does the batch that is refused change any.
    compiled(tested, stateful)
    compiled(reference, stateful)
    first, second = (each.train_on_batch(x[:BATCH], y[:BATCH]) for each in (tested, reference))
    alike(first, second, "after a refused batch")
    compare(stateful, micro_batches=1)
    compare(stateful_words, micro_batches=3)


def refused():
    """A mask that nobody knows before the loss is computed, and a state that stages would share."""
    inputs = keras.Input((LENGTH, 4))
    hidden = layers.Masking()(split(layers.Dense(4, "relu")(inputs), "rows"))
    model = keras.Model(inputs, layers.Dense(3)(hidden))
    x = numbers.normal(size=(SAMPLES, LENGTH, 4)).astype("float32")
    tested = compiled(tnt.Model(model, parallel_strategy=PIPELINING, micro_batches=4), lstm)
    with pytest.raises(InvalidCall, match="The mask of an output depends on what layers with weights make"):
        tested.fit(x, classes((SAMPLES, LENGTH)), BATCH, verbose=0)
    inputs = keras.Input(batch_shape=(BATCH, 3, 4))
    twice = layers.SimpleRNN(4, stateful=True)
    outputs = layers.Dense(2)(layers.Add()([twice(inputs), twice(inputs)]))
    with pytest.raises(InvalidCall, match="is called at several places"):
        tnt.Model(keras.Model(inputs, outputs), parallel_strategy=PIPELINING)


def replicas():
    """Two pipelines, whose shares of a batch have other numbers of words."""
    for case in (tagged, penalized, stateful):
        compare(case, tnt.ParallelStrategy.ALL, micro_batches=2)
    compare(ignoring, tnt.ParallelStrategy.DATA)  # nor are shares of whole models alike


def group(*cases):
    def run():
        for case in cases:
            compare(case, micro_batches=4)
        compare(cases[0], micro_batches=1)

    return run


GROUPS = {
    "inside": group(attention, lstm, masking, dropped, cut_by_itself),
    "outputs": group(tagged, ignoring, penalized),
    "three": group(tagged_twice, merged, over_two_cuts),
    "states": states,
    "replicas": replicas,
    "refused": refused,
}
GROUPS[sys.argv[1]]()
