"""What Keras scripts do around training; arguments: see keras_ranks.py."""

# pyright: reportMissingImports=false, reportOptionalSubscript=false, reportOptionalMemberAccess=false
# pyright: reportPossiblyUnboundVariable=false, reportArgumentType=false

import gc
import multiprocessing
from typing import Any

import keras
import numpy as np
import pytest
from keras_ranks import compiled, end, everywhere, folder, kind, mlp, on_torch, rank, same, size, x, y

import carme_runtime.keras as tnt
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.keras.data import Share

if on_torch:
    import torch
else:
    import tensorflow


class Watch(keras.callbacks.Callback):
    """Keeps the losses of each epoch, and stops training on one rank after some batches."""

    def __init__(self, stop_at=None):
        super().__init__()
        self.stop_at, self.losses, self.batches = stop_at, [], 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if self.batches == self.stop_at and rank == size - 1:
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        self.losses.append([logs["loss"], logs["val_loss"]])


def callbacks():
    model = trained_with_callbacks()
    evaluate_with_callbacks(model)
    stopped = Watch(stop_at=6)
    model.fit(x, y, 16, epochs=9, validation_data=(x, y), verbose=0, callbacks=[stopped])
    assert stopped.batches == 6
    assert same(model)


def trained_with_callbacks():
    rates = []

    def schedule(epoch, rate):
        rates.append(rate)
        return rate * 0.5

    model = compiled(metrics=["mae"])
    aggregated, local, master = Watch(), Watch(), Watch()
    history = model.fit(
        x,
        y,
        16,
        epochs=4,
        validation_data=(x[:9], y[:9]),
        verbose=2,
        callbacks=[
            keras.callbacks.ModelCheckpoint(str(folder / "at{epoch}.keras")),
            keras.callbacks.CSVLogger(str(folder / "log.csv")),
            keras.callbacks.LearningRateScheduler(schedule),
            keras.callbacks.EarlyStopping("val_loss", patience=9, restore_best_weights=True),
            aggregated,
            tnt.callbacks.Callback(local, aggregate_logs=False),
            tnt.callbacks.Callback(master, run_on_all_ranks=False),
        ],
    )
    assert len(rates) == 4
    assert np.isclose(rates[-1], 0.1 / 8)
    assert (everywhere(np.array(aggregated.losses)[None]) == aggregated.losses).all()
    assert aggregated.losses == np.array([history.history["loss"], history.history["val_loss"]]).T.tolist()
    assert len(master.losses) == (4 if rank == 0 else 0)
    locals_ = everywhere(np.array(local.losses)[None])
    assert size == 1 or not np.allclose(locals_[0], locals_[-1])
    # 16 samples are split evenly, so that the mean over ranks is that over samples.
    np.testing.assert_allclose(locals_.mean(0)[:, 0], history.history["loss"], rtol=1e-5)
    assert sorted(path.name for path in folder.iterdir()) == [
        *(f"at{epoch}.keras" for epoch in (1, 2, 3, 4)),
        "log.csv",
    ]
    assert (folder / "log.csv").read_text().count("\n") == 5
    # The checkpoint is Keras' own.
    loaded: Any = keras.models.load_model(folder / "at4.keras")
    assert np.isclose(loaded.evaluate(x, y, verbose=0)[0], model.evaluate(x, y, verbose=0)[0], rtol=0.2)
    return model


def evaluate_with_callbacks(model):
    class Tested(keras.callbacks.Callback):
        loss = 0.0

        def on_test_end(self, logs=None):
            self.loss = logs["loss"]

    own, averaged = Tested(), Tested()
    watching = [averaged, tnt.callbacks.Callback(own, aggregate_logs=False)]
    tested = model.evaluate(x, y, 16, verbose=0, return_dict=True, callbacks=watching)
    assert averaged.loss == tested["loss"]
    losses = everywhere(np.array([own.loss]))
    assert size == 1 or losses[0] != losses[-1]
    np.testing.assert_allclose(losses.mean(), tested["loss"], rtol=1e-5)


def backup():
    class Crash(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError

    def run(epochs, *more):
        model = compiled(optimizer="adam")
        restoring = keras.callbacks.BackupAndRestore(str(folder / "backup"), delete_checkpoint=False)
        try:
            return model, model.fit(x, y, 16, epochs, 0, [restoring, *more], shuffle=False)
        except RuntimeError:
            return model, None

    run(4, Crash())
    model, history = run(4)
    assert history.epoch == [2, 3]
    assert same(model)


def saving():
    model = compiled()
    model.fit(x, y, 16, verbose=0)
    outputs = model.predict(x, verbose=0)
    model.save(folder / "whole.keras")
    model.save_weights(folder / "only.weights.h5")
    tnt.models.save_model(model, folder / "again.keras")
    tnt.models.save_model(mlp(), folder / "keras.keras")
    model.save(folder / f"rank{rank}.keras", tnt_save_all_devices=True)
    model.save(folder / "master.keras")
    loaded = tnt.models.load_model(folder / "whole.keras")
    assert isinstance(loaded, tnt.TarantellaModel)
    np.testing.assert_allclose(loaded.predict(x, verbose=0), outputs, rtol=1e-6)
    for another in (
        tnt.models.clone_model(model),
        tnt.models.model_from_config(model.get_config()),
        tnt.models.model_from_json(model.to_json()),
        tnt.Model.from_config(model.get_config()),
    ):
        another.load_weights(folder / "only.weights.h5")
        np.testing.assert_allclose(another.predict(x, verbose=0), outputs, rtol=1e-6)
    both = [loaded, model]
    for trained in both:
        trained.fit(x, y, 16, shuffle=False, verbose=0)
    np.testing.assert_allclose(loaded.get_weights()[0], model.get_weights()[0], rtol=1e-5)
    assert (folder / f"rank{size - 1}.keras").exists()


def layers_with_state():
    model = compiled(keras.layers.BatchNormalization(), keras.layers.Dropout(0.3), optimizer="adam")
    history = model.fit(x, y, 16, epochs=3, validation_data=(x, y), verbose=0)
    weights = model.get_weights()
    assert same(model)
    assert abs(model.layers[1].moving_mean.numpy()).sum() > 0
    assert np.isclose(model.evaluate(x, y, verbose=0), history.history["val_loss"][-1])
    # Dropout hits other places on every rank.
    seeds = model.layers[2].seed_generator.state.numpy()
    assert len(set(everywhere(seeds[None])[:, 0].tolist())) == size
    assert len(weights) == 8


def numbering():
    """Ranks may have built other layers before: Keras numbers the next ones otherwise there."""

    def build():
        layers = [keras.layers.Dense(6, activation="tanh") for _ in range(3)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    keras.utils.clear_session()
    for _ in range(8 * rank):
        keras.layers.Dense(1)
    keras.utils.set_random_seed(7)
    parallel = build()
    assert parallel.layers[2].name == ("dense_2", "dense_10")[rank]
    weights = parallel.get_weights()
    tnt.Model(parallel).fit(x, x, 16, epochs=2, shuffle=False, verbose=0)
    alone = build()
    alone.set_weights(weights)
    alone.fit(x, x, 16, epochs=2, shuffle=False, verbose=0)
    for weight, expected in zip(parallel.get_weights(), alone.get_weights(), strict=True):
        assert np.allclose(weight, expected, 1e-4, 1e-6)


def micro_batches():
    class Count(keras.callbacks.Callback):
        batches = 0

        def on_train_batch_end(self, batch, logs=None):
            Count.batches += 1

    model = compiled()
    first = model.fit(x, y, tnt_micro_batch_size=4, epochs=1, verbose=0, shuffle=False, callbacks=[Count()])
    assert Count.batches == -(-64 // (4 * size))
    model.fit(
        x,
        y,
        tnt_micro_batch_size=4,
        validation_data=(x, y),
        tnt_validation_micro_batch_size=8,
        verbose=0,
    )
    assert model.predict(x, tnt_micro_batch_size=3, verbose=0).shape == (64, 2)
    assert first.history["loss"]
    data_split_by_the_ranks()
    if not on_torch:
        data_of_single_samples()


def data_split_by_the_ranks():
    """Data that the ranks have split themselves: the same training as when it is done for them."""
    keras.utils.set_random_seed(1)
    own_result, reference = compiled(), compiled()
    reference.set_weights(own_result.get_weights())
    shares = [np.concatenate([part[i : i + 16][rank::size] for i in range(0, 64, 16)]) for part in (x, y)]
    own = own_result.fit(shares[0], shares[1], 16 // size, 2, 0, shuffle=False, tnt_distribute_dataset=False)
    whole = reference.fit(x, y, 16, 2, 0, shuffle=False)
    np.testing.assert_allclose(own.history["loss"], whole.history["loss"], rtol=1e-5)
    np.testing.assert_allclose(own_result.get_weights()[0], reference.get_weights()[0], rtol=1e-4, atol=1e-6)
    # The same for validation, evaluation and prediction.
    check = (shares[0], shares[1])
    own_result.set_weights(reference.get_weights())
    options = {"shuffle": False, "verbose": 0, "validation_batch_size": 16 // size}
    own = own_result.fit(x, y, 16, validation_data=check, tnt_distribute_validation_dataset=False, **options)
    whole = reference.fit(x, y, 16, validation_data=(x, y), shuffle=False, verbose=0)
    np.testing.assert_allclose(own.history["val_loss"], whole.history["val_loss"], rtol=1e-4)
    own_result.set_weights(reference.get_weights())
    expected = reference.evaluate(x, y, 16, verbose=0)
    for loss in (
        reference.evaluate(x, y, tnt_micro_batch_size=5, verbose=0),
        own_result.evaluate(*check, batch_size=8, tnt_distribute_dataset=False, verbose=0),
    ):
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    predicted = own_result.predict(check[0], 8, tnt_distribute_dataset=False, verbose=0)
    assert predicted.shape == (64 // size, 2)
    alone = np.asarray(keras.ops.convert_to_numpy(own_result(check[0])))
    np.testing.assert_allclose(predicted, alone, rtol=1e-4, atol=1e-6)


def data_of_single_samples():
    """A data set of single samples, and one in batches that fit: the same as arrays."""
    single = tensorflow.data.Dataset.from_tensor_slices((x, y))
    keras.utils.set_random_seed(1)
    models = [compiled() for _ in range(3)]
    for model in models[1:]:
        model.set_weights(models[0].get_weights())
    arrays, singles, batches = (
        model.fit(*data, tnt_micro_batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]
        for model, data in zip(models, [(x, y), (single,), (single.batch(4 * size),)], strict=True)
    )
    assert singles == batches
    np.testing.assert_allclose(singles, arrays, rtol=1e-6)
    assert models[0].predict(single, tnt_micro_batch_size=4, verbose=0).shape == (64, 2)
    with pytest.raises(InvalidCall, match="comes in batches of 7 samples, but"):
        models[0].fit(single.batch(7, drop_remainder=True), tnt_micro_batch_size=4, verbose=0)


def sequential():
    model = tnt.Sequential([keras.Input((6,)), keras.layers.Dense(2)], name="line")
    model.add(keras.layers.Dense(2))
    assert model.name == "line"
    assert len(model.layers) == 2
    inputs = keras.Input((6,))
    functional = tnt.Model(inputs, keras.layers.Dense(2)(inputs))
    functional.compile("sgd", "mse")
    functional.optimizer.learning_rate = 0.25
    functional.stop_training = False
    assert float(functional.keras_model.optimizer.learning_rate) == 0.25
    assert functional(x).shape == (64, 2)
    functional.summary()
    # As Tarantella's scripts may say.
    assert tnt.keras.callbacks.Callback is tnt.callbacks.Callback
    assert tnt.keras.models.load_model is tnt.models.load_model
    data = tnt.ParallelStrategy.DATA
    assert tnt.Model(mlp(), parallel_strategy=data).fit is not None
    assert tnt.Sequential(name="with", parallel_strategy=data).name == "with"
    everything = tnt.ParallelStrategy.ALL
    for model in (
        tnt.Model(mlp(), data),
        tnt.Model(mlp(), everything),
        tnt.Sequential([keras.Input((6,)), keras.layers.Dense(2)], everything),
        tnt.Sequential.from_config(mlp().get_config()),
        tnt.Model.from_config(mlp().get_config()),
    ):
        assert isinstance(model, tnt.Model)
        model.compile("sgd", "mse")
        model.fit(x, y, batch_size=32, verbose=0)
        assert same(model)
    if size == 2:
        cut = tnt.Model(mlp(), parallel_strategy=tnt.ParallelStrategy.PIPELINING)
        cut.compile("sgd", "mse")
        cut.fit(x, y, batch_size=32, verbose=0)
        assert "2 stages x 1 replicas" in str(cut.plan())


def optimizers():
    """A model with steps of its own and an optimizer for each half, as adversarial networks have them."""

    class Halves(keras.Model):
        def __init__(self, holder):
            super().__init__()
            shapes = (6, 5), (5, 2)
            self.halves = [
                keras.Sequential([keras.Input((inputs,)), keras.layers.Dense(outputs, "tanh")])
                for inputs, outputs in shapes
            ]
            self.built = on_torch  # whose trainer asks for it; that of TensorFlow does not
            first, second = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.9)
            if holder == "attributes":
                self.first, self.second = first, second
            elif holder == "list":
                self.own_part = [first, second]
            else:
                self.own_part = {"first": first, "more": {"second": second}}
            self.pairs = lambda: zip(self.halves, (first, second), strict=True)

        def train_step(self, data):
            for half, optimizer in self.pairs():
                weights = half.trainable_weights
                if on_torch:
                    self.zero_grad()
                    loss = self.distance(*data)
                    loss.backward()
                    with torch.no_grad():
                        optimizer.apply([w.value.grad for w in weights], weights)
                else:
                    with tensorflow.GradientTape() as tape:
                        loss = self.distance(*data)
                    gradients: Any = tape.gradient(loss, weights)
                    optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return {"loss": loss}

        def distance(self, inputs, wanted):
            distance: Any = keras.ops.mean((self.halves[1](self.halves[0](inputs)) - wanted) ** 2)
            return distance

    for holder in ("attributes", "list", "dictionary"):
        own_result, alone = Halves(holder), Halves(holder)
        for half, optimizer in [*own_result.pairs(), *alone.pairs()]:
            optimizer.build(half.trainable_weights)
        # Another state of an optimizer on every rank: the master rank's holds.
        _, (_, momentum) = own_result.pairs()
        momentum.variables[2].assign(np.full((5, 2), 0.1 * rank, "float32"))
        model = tnt.Model(own_result)
        for trained in (model, alone):
            trained.compile()
        weights = model.get_weights()
        alone.set_weights(tnt.TensorBroadcaster(weights).broadcast(weights))
        for trained in (model, alone):
            trained.fit(x[:44], y[:44], 16, epochs=2, shuffle=False, verbose=0)
        assert same(model), holder
        for own_part, another in zip(model.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(own_part, another, rtol=1e-4, atol=1e-6, err_msg=holder)


def compilation():
    """Where there is a GPU, Keras compiles for TensorFlow with XLA, which cannot leave the graph."""
    resolve = keras.Model._resolve_auto_jit_compile
    keras.Model._resolve_auto_jit_compile = lambda self: True
    model = compiled()
    assert model.jit_compile or size > 1
    before = model.evaluate(x, y, verbose=0)
    model.fit(x, y, 16, verbose=0, validation_data=(x, y))
    model.train_on_batch(x, y)
    assert model.predict(x, verbose=0).shape == (64, 2)
    assert model.evaluate(x, y, verbose=0) < before
    model.save(folder / "compiled.keras")
    loaded = tnt.models.load_model(folder / "compiled.keras")
    loaded.fit(x, y, 16, verbose=0)
    assert same(loaded)
    assert not (size > 1 and (model.jit_compile or loaded.jit_compile))
    keras.Model._resolve_auto_jit_compile = resolve


def outputs():
    """Predictions of types that the core does not know, and how training goes on without piling up."""
    inputs = keras.Input((6,))
    first: Any = inputs
    first = first[:, :1]
    results = [
        keras.ops.cast(first > 0, "bool"),
        keras.ops.cast(first * 9, "int8"),
        keras.ops.cast(first, "float32"),
    ]
    predicted = tnt.Model(inputs, results).predict(x[:43], 16, verbose=0)
    assert [part.dtype.name for part in predicted] == ["bool", "int8", "float32"]
    assert (predicted[0] == (x[:43, :1] > 0)).all()
    assert (predicted[1] == (x[:43, :1] * 9).astype("int8")).all()
    assert (predicted[2] == x[:43, :1]).all()

    class Count(keras.callbacks.Callback):
        shares = 0

        def on_epoch_end(self, epoch, logs=None):
            Count.shares = sum(isinstance(each, Share) for each in gc.get_objects())

    def endless():
        while True:
            yield x[:4], y[:4]

    compiled().fit(endless(), steps_per_epoch=60, epochs=2, verbose=0, callbacks=[Count()])
    assert 0 < Count.shares < 20


def stopping():
    """What one rank's callback ends, ends on all."""

    class Stop(keras.callbacks.Callback):
        batches = 0

        def stop(self, what):
            self.batches += 1
            if self.batches == 2 and rank == size - 1:
                setattr(self.model, what, True)

    class Tests(Stop):
        def on_test_batch_end(self, batch, logs=None):
            self.stop("stop_evaluating")

    class Predictions(Stop):
        def on_predict_batch_end(self, batch, logs=None):
            self.stop("stop_predicting")

    class Begun(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            self.model.stop_evaluating = rank == 0

    model = compiled()
    tests, predictions = Tests(), Predictions()
    model.evaluate(x, y, 8, verbose=0, callbacks=[tests])
    assert tests.batches == 2
    assert model.predict(x, 8, verbose=0, callbacks=[predictions]).shape == (16, 2)
    assert predictions.batches == 2
    only = model.evaluate(x, y, 8, verbose=0, callbacks=[Begun()])
    assert np.isclose(only, model.evaluate(x[:8], y[:8], verbose=0))
    everywhere(0)


def workers():
    """Processes that read ahead: they shuffle alike, and stay where they were to be."""
    started = multiprocessing.Value("i", 0)

    def count(_):
        with started.get_lock():
            started.value += 1

    data = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    loader = torch.utils.data.DataLoader(
        data, 16, shuffle=True, num_workers=1, persistent_workers=True, worker_init_fn=count
    )
    model = compiled()
    model.fit(loader, epochs=3, verbose=0)
    assert same(model)
    assert started.value == 1


def texts():
    """Batches whose first samples are texts."""
    words = np.array([["the", "quick"], ["brown", "fox"], ["jumps", "over"]] * 8)
    inputs = keras.Input((2,), dtype="string")
    numbers_ = keras.layers.StringLookup(vocabulary=sorted(set(words.flat)))(inputs)
    model = tnt.Model(inputs, keras.layers.Dense(1)(keras.layers.Embedding(9, 4)(numbers_)[:, 0]))
    model.compile("sgd", "mse")
    data = tensorflow.data.Dataset.from_tensor_slices((words, np.ones((24, 1), "float32"))).batch(8)
    model.fit(data, verbose=0)
    assert same(model)


def printing():
    model = compiled()
    model.summary()
    model.fit(
        x, y, 16, verbose=2, callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch: 0.1, verbose=1)]
    )
    model.evaluate(x, y, verbose=2)

    class Predicted(keras.callbacks.Callback):
        verbose = 1

        def on_predict_end(self, logs=None):
            if self.verbose:
                print("predicted")

    model.predict(x, verbose=2, callbacks=[Predicted()])


def tensorboards():
    """Each rank's own, where that is requested."""
    model = compiled()
    for _ in range(2):
        model.fit(x, y, 16, verbose=0, callbacks=[keras.callbacks.TensorBoard(str(folder / "boards"))])
    everywhere(0)
    assert sorted(path.name for path in (folder / "boards").iterdir()) == [f"rank_{r}" for r in range(size)]


def overlap():
    """Between nodes gradients travel while backpropagation goes on: shown by the order of events."""
    from carme_runtime.collectives import Plan

    wide = [keras.layers.Dense(600) for _ in range(4)]  # 1.4 MB each: buckets are of 1 MiB
    model = tnt.Model(keras.Sequential([keras.Input((600,)), *wide]))
    model.compile("sgd", "mse")
    events = []
    begin = Plan.start

    def start(self):
        events.append("begun")
        return begin(self)

    Plan.start = start
    data = np.ones((32, 600), "float32")
    model.fit(data, data, 16, verbose=0)
    first: Any = wide[0].kernel
    first = first.value
    first.register_post_accumulate_grad_hook(lambda _: events.append("the last gradient"))
    events.clear()
    model.fit(data, data, 16, epochs=3, verbose=0)
    lasts = [place for place, event in enumerate(events) if event == "the last gradient"]
    buckets = events.count("begun") // 6
    assert len(lasts) == 6 and buckets >= 4 and events.count("begun") == 6 * buckets, events
    # All but maybe the bucket of the first layer, to which backpropagation comes last.
    for step, place in enumerate(lasts):
        assert events[:place].count("begun") >= buckets * (step + 1) - 1, events
    assert same(model)


{
    function.__name__: function
    for function in (
        callbacks,
        backup,
        saving,
        layers_with_state,
        numbering,
        micro_batches,
        sequential,
        optimizers,
        compilation,
        outputs,
        stopping,
        workers,
        texts,
        printing,
        tensorboards,
        overlap,
    )
}[kind]()
end()
