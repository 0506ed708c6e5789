"""Keras models that train on all ranks."""

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.keras import callbacks as callbacks_module
from carme_runtime.keras import state as state_module
from carme_runtime.keras.data import (
    Share,
    Shares,
    adapt,
    batched,
    length,
    rows,
    share,
    split_for_validation,
    too_small,
)
from carme_runtime.keras.graph import steps
from carme_runtime.keras.library import keras
from carme_runtime.keras.optimizer import loop
from carme_runtime.keras.parallel import OF_PIPELINES, steps_of
from carme_runtime.keras.world import world

_OWN = ("_model", "_world", "_steps")


class ParallelStrategy(enum.Flag):
    """How ranks share the work on a model.

    DATA: each has all of it, and some samples. PIPELINING: each has some layers, and sees all samples. ALL:
    either, or several pipelines of some samples each, by what is measured and where there are SplitLayers.
    """

    NONE = enum.auto()
    DATA = enum.auto()
    PIPELINING = enum.auto()
    ALL = DATA | PIPELINING


class Model:
    """A Keras model that is trained, evaluated and used for prediction by all ranks together.

        model = Model(keras_model)

    Everything else is as with the Keras model: all its attributes can be read and set here. Batch sizes
    are those over all ranks. In place of a model, the arguments of `keras.Model` will do.

    Args:
        parallel_strategy: The last argument may be this one. `carme-run --strategy` counts before it.
        stages, micro_batches, schedule, memory, batch_norm: See `carme_runtime.torch.pipeline`.
        num_pipeline_stages: Tarantella's name of `micro_batches`.
        start: `streamed`: weights travel from rank 0 while the first training step of `fit` or
            `train_on_batch` runs, which waits for those of each layer. Not with stages.

    Raises:
        InvalidCall: A pipeline was requested, and the model or the backend cannot be one.
    """

    def __init__(
        self,
        *arguments: Any,
        parallel_strategy: ParallelStrategy = ParallelStrategy.DATA,
        stages: int | None = None,
        micro_batches: int | None = None,
        schedule: str | None = None,
        memory: str | int | None = None,
        batch_norm: str | None = None,
        num_pipeline_stages: int | None = None,
        start: str = "",
        **keywords: Any,
    ) -> None:
        if arguments and isinstance(arguments[-1], ParallelStrategy):
            arguments, parallel_strategy = arguments[:-1], arguments[-1]
        if not isinstance(parallel_strategy, ParallelStrategy):
            raise InvalidCall(
                f"parallel_strategy={parallel_strategy!r} is not a ParallelStrategy.",
                "Use ParallelStrategy.DATA, ParallelStrategy.PIPELINING or ParallelStrategy.ALL.",
            )
        first = arguments[0] if arguments else None
        if keywords and len(arguments) == 1 and isinstance(first, (Model, keras.Model)):
            raise InvalidCall(
                f"Model has no argument '{next(iter(keywords))}' beside a model.",
                f"Choose from parallel_strategy, start, {', '.join(OF_PIPELINES)}.",
            )
        if isinstance(first, Model):
            model = first.keras_model
        elif len(arguments) == 1 and not keywords and isinstance(first, keras.Model):
            model = first
        else:
            model = keras.Model(*arguments, **keywords)
        if keras.backend.backend() not in ("tensorflow", "torch"):
            raise InvalidCall(
                f"carme_runtime.keras does not train on Keras' {keras.backend.backend()} backend.",
                "Set KERAS_BACKEND to torch or tensorflow.",
            )
        set_own = super().__setattr__
        set_own("_model", model)
        options = {
            "stages": stages,
            "micro_batches": num_pipeline_stages if micro_batches is None else micro_batches,
        }
        options |= {"schedule": schedule, "memory": memory, "batch_norm": batch_norm}
        allowed = ParallelStrategy.DATA in parallel_strategy, ParallelStrategy.PIPELINING in parallel_strategy
        found_world, found_steps = steps_of(model, world(), *allowed, options, start)
        set_own("_world", found_world)
        set_own("_steps", found_steps)

    def __init_subclass__(cls, **keywords: Any) -> None:
        if cls.__module__ != __name__:
            raise InvalidCall(
                "carme_runtime.keras.Model cannot be subclassed.",
                "Subclass keras.Model, and give Model an instance of it.",
            )
        super().__init_subclass__(**keywords)

    @property
    def keras_model(self) -> Any:
        """The Keras model itself."""
        return self._model

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:
            raise AttributeError(name)
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """What the Keras model makes of the arguments, on this rank alone.

        Where a loop of the script's own begins to train the model, all ranks get rank 0's variables first.
        A model in stages takes the whole batch on all ranks, which call it together.
        """
        pipe, training = self._pipeline, keywords.get("training")
        if pipe is not None and (pipe.pipe or loop().trains(training)):
            if training:
                pipe.check_loop()
            self._decide(length(arguments[0]))
            if self._pipeline is not None:
                return self._pipeline.call(arguments[0], training)
        if self._world.size > 1 and not self._steps.in_loop and loop().trains(training):
            self._steps.enter_loop(arguments, keywords)
        return self._model(*arguments, **keywords)

    def __repr__(self) -> str:
        return f"<Model {self._model.name} on {self._world.size} ranks>"

    @property
    def _pipeline(self) -> Any:
        """The steps of a model that is cut into stages; None: each rank has all of it."""
        return self._steps if hasattr(self._steps, "pipe") else None

    def plan(self) -> Any:
        """How the model is cut into stages, after the first batch; None: each rank has all of it."""
        found = self._pipeline
        return found.pipe.plan() if found is not None and found.pipe else None

    def _decide(self, samples: int | None) -> None:
        """Choose between stages and the whole model on each rank, where that was left open."""
        found = self._pipeline
        if found is not None and not found.decide(samples):
            super().__setattr__("_world", world())
            super().__setattr__("_steps", steps(self._model, self._world))

    # -- as in Keras

    def compile(self, *arguments: Any, **keywords: Any) -> None:
        """Configure the model for training; see `keras.Model.compile`."""
        if keywords.get("jit_compile") is True:
            raise InvalidCall(
                "jit_compile=True would compile the exchange between ranks into the model.",
                "Leave jit_compile out.",
            )
        self._model.compile(*arguments, **keywords)
        self._steps.recompiled()

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool | str = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
        tnt_micro_batch_size: int | None = None,
        tnt_validation_micro_batch_size: int | None = None,
        tnt_distribute_dataset: bool = True,
        tnt_distribute_validation_dataset: bool = True,
    ) -> Any:
        """Train; see `keras.Model.fit`. The history is the same on all ranks.

        Args:
            batch_size: Samples in a step over all ranks.
            tnt_micro_batch_size: Samples in a step on each rank: `batch_size` divided by the number of ranks.
            tnt_validation_micro_batch_size: The same for the validation data.
            tnt_distribute_dataset: False if each rank gives data of its own, and its own batch size.
            tnt_distribute_validation_dataset: The same for the validation data.

        Raises:
            InvalidCall: Ranks that do not do the same, batches that are too small, data of an unknown kind.
        """
        training = {
            "batch_size": batch_size, "micro": tnt_micro_batch_size, "steps": steps_per_epoch,
            "shuffle": shuffle, "class_weight": class_weight, "distribute": tnt_distribute_dataset,
        }  # fmt: skip
        validation = _Validation(
            validation_data, validation_split, validation_batch_size, tnt_validation_micro_batch_size,
            validation_steps, tnt_distribute_validation_dataset,
        )  # fmt: skip
        schedule = {
            "epochs": epochs, "initial_epoch": initial_epoch, "steps_per_epoch": steps_per_epoch,
            "validation_steps": validation_steps, "validation_freq": validation_freq,
        }  # fmt: skip
        found: list[Any] = []
        self._world.together(
            lambda: found.extend(self._shares_of_fit((x, y, sample_weight), training, validation)),
            call="fit",
            batch_size=batch_size if tnt_distribute_dataset else None,
            tnt_micro_batch_size=tnt_micro_batch_size if tnt_distribute_dataset else None,
            validation_batch_size=validation_batch_size,
            optimizer=type(self._model.optimizer).__name__,
            **schedule,
        )
        shares, check = found
        return self._fit(shares, check, verbose, callbacks, schedule)

    def _shares_of_fit(
        self, data: tuple[Any, Any, Any], training: dict[str, Any], validation: "_Validation"
    ) -> tuple[Shares, Shares | None]:
        """This rank's shares of the data to train with, and of those to validate with, if there are any."""
        check = validation.data
        if validation.split and check is None:
            data, check = split_for_validation(data, validation.split)
        shares = self._shares(*data, **training, training=True)
        if check is None:
            return shares, None
        as_training = validation.micro is None and _takes_batch_size(check)
        return shares, self._shares(
            *keras.utils.unpack_x_y_sample_weight(check),
            batch_size=validation.batch_size or (training["batch_size"] if as_training else None),
            micro=validation.micro,
            steps=validation.steps,
            distribute=validation.distribute,
        )

    def _fit(
        self,
        shares: Shares,
        check: Shares | None,
        verbose: Any,
        callbacks: Any,
        schedule: dict[str, Any],
    ) -> Any:
        """Train with the shares that all ranks have agreed on; the history."""
        self._decide(shares.batch_size)
        running = self._callbacks(callbacks)
        self._steps.restart()
        self._steps.build(shares)
        history = self._model.fit(
            shares,
            verbose=self._verbose(verbose),
            callbacks=running,
            validation_data=check,
            shuffle=False,
            **schedule,
        )
        self._world.barrier()  # what the master rank's callbacks write is complete
        return history

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        tnt_micro_batch_size: int | None = None,
        tnt_distribute_dataset: bool = True,
    ) -> Any:
        """Loss and metrics over the samples of all ranks; see `keras.Model.evaluate`, and `fit`."""
        shares = self._data_of_call(
            "evaluate", x, y, sample_weight, batch_size, tnt_micro_batch_size, steps, tnt_distribute_dataset
        )
        self._decide(shares.batch_size)
        self._steps.build(shares)
        return self._model.evaluate(
            shares,
            verbose=self._verbose(verbose),
            steps=steps,
            callbacks=self._callbacks(callbacks),
            return_dict=return_dict,
        )

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
        tnt_micro_batch_size: int | None = None,
        tnt_distribute_dataset: bool = True,
    ) -> Any:
        """What the model makes of all samples, on every rank, in their order; see `keras.Model.predict`.

        With `tnt_distribute_dataset=False` each rank gets what the model makes of its own data.
        """
        self._steps.settle()
        shares = self._data_of_call(
            "predict", x, None, None, batch_size, tnt_micro_batch_size, steps, tnt_distribute_dataset
        )
        self._decide(shares.batch_size)
        shares.history = []
        own = self._model.predict(
            shares, verbose=self._verbose(verbose), steps=steps, callbacks=self._callbacks(callbacks)
        )
        if self._world.size == 1 or not tnt_distribute_dataset:
            return own
        history = shares.history
        return keras.tree.map_structure(lambda part: self._in_order(part, history), own)

    def train_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, **keywords: Any) -> Any:
        """One step on a global batch, which all ranks give; see `keras.Model.train_on_batch`."""
        return self._on_batch(self._model.train_on_batch, x, y, sample_weight, True, keywords)

    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, **keywords: Any) -> Any:
        """Loss and metrics of a global batch, which all ranks give; see `keras.Model.test_on_batch`."""
        return self._on_batch(self._model.test_on_batch, x, y, sample_weight, False, keywords)

    def predict_on_batch(self, x: Any) -> Any:
        """What the model makes of a batch, on every rank; see `keras.Model.predict_on_batch`.

        Where ranks have stages, all of them give the same batch. Else each rank works on its own.
        """
        if self._pipeline is not None:
            total = length(x)
            self._world.agree({"call": "predict_on_batch", "batch": total})
            self._decide(total)
        if self._pipeline is not None:
            self._steps.build((x,))
        return self._model.predict_on_batch(x)

    # -- files

    def save(
        self, filepath: Any, *arguments: Any, tnt_save_all_devices: bool = False, **keywords: Any
    ) -> None:
        """Save the Keras model, on the master rank unless all are requested; see `keras.Model.save`."""
        self._write(lambda: self._model.save(filepath, *arguments, **keywords), tnt_save_all_devices)

    def save_weights(
        self, filepath: Any, *arguments: Any, tnt_save_all_devices: bool = False, **keywords: Any
    ) -> None:
        """Save the weights as `save` does; see `keras.Model.save_weights`."""
        self._write(lambda: self._model.save_weights(filepath, *arguments, **keywords), tnt_save_all_devices)

    def export(
        self, filepath: Any, *arguments: Any, tnt_save_all_devices: bool = False, **keywords: Any
    ) -> None:
        """Export for inference as `save` does; see `keras.Model.export`."""
        self._write(lambda: self._model.export(filepath, *arguments, **keywords), tnt_save_all_devices)

    def take_state(self) -> dict[str, Any]:
        """Weights, optimizer variables and random seeds, for `carme_runtime.checkpoint`; on all ranks."""
        self._steps.settle()
        with self._steps.whole(everywhere=True):
            return state_module.take(self._model)

    def own_state(self, structure: Any) -> Any:
        """Of a checkpoint's part for this model: what `give_state` takes."""
        return state_module.own(structure)

    def give_state(self, state: dict[str, Any]) -> None:
        """Go on from what `take_state` took, on any number of ranks.

        Raises:
            InvalidCall: It was taken from another model, or with another optimizer.
        """
        with self._steps.whole(everywhere=True, changes=True):
            state_module.give(self._model, state)
        self._steps.restart()

    def summary(self, *arguments: Any, **keywords: Any) -> None:
        """Print the model, on the master rank unless all are requested; see `keras.Model.summary`."""
        if self._world.prints:
            self._model.summary(*arguments, **keywords)

    @classmethod
    def from_config(cls, config: dict[str, Any], **keywords: Any) -> "Model":
        """The model that `get_config` described, with new weights."""
        # Both kinds list layers; what connects them is stated where they are not a mere sequence.
        kind = keras.Model if "input_layers" in config or "layers" not in config else keras.Sequential
        return Model(kind.from_config(config, **keywords))

    def get_weights(self) -> list[Any]:
        """All weights, on all ranks, which call this together; see `keras.Model.get_weights`."""
        with self._steps.whole(everywhere=True):
            return [np.array(weight) for weight in self._model.get_weights()]

    def set_weights(self, weights: Any) -> None:
        """Give the model these weights, on all ranks; see `keras.Model.set_weights`."""
        with self._steps.whole(everywhere=True, changes=True):
            self._model.set_weights(weights)

    def load_weights(self, *arguments: Any, **keywords: Any) -> None:
        """Load weights from a file that all ranks can read; see `keras.Model.load_weights`."""
        with self._steps.whole(everywhere=True, changes=True):
            self._model.load_weights(*arguments, **keywords)

    def _write(self, write: Callable[[], None], everywhere: bool) -> None:
        self._steps.settle()
        with self._steps.whole(everywhere):
            self._world.write(write, everywhere)

    # -- ranks

    def _shares(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        batch_size: int | None = None,
        micro: int | None = None,
        steps: int | None = None,
        shuffle: bool | str = False,
        class_weight: Any = None,
        distribute: bool = True,
        training: bool = False,
    ) -> Shares:
        size = self._world.replicas if distribute else 1
        for name, value in (("batch_size", batch_size), ("tnt_micro_batch_size", micro)):
            if value is not None and value < 1:
                raise InvalidCall(f"{name} is {value}.", "Give at least 1.")
        whole = None if micro is None else micro * size
        if whole is not None and batch_size not in (None, whole):
            raise InvalidCall(
                f"batch_size={batch_size} is not tnt_micro_batch_size={micro} times {size} ranks.",
                "Give one of the two.",
            )
        if isinstance(x, Shares):
            raise InvalidCall("The data were split over ranks already.", "Give the data set itself.")
        requested = batch_size or whole
        if training and distribute and requested is not None and requested < size:
            raise too_small(requested, size)
        if whole is not None:
            x = batched(x, whole)
        source = adapt(x, y, sample_weight, requested, steps, shuffle, class_weight)
        return Shares(source, self._world, lambda part: self._steps.take(part), distribute, whole, training)

    def _data_of_call(
        self,
        call: str,
        x: Any,
        y: Any,
        sample_weight: Any,
        batch_size: int | None,
        micro: int | None,
        steps: int | None,
        distribute: bool,
    ) -> Shares:
        found: list[Shares] = []
        self._world.together(
            lambda: found.append(
                self._shares(x, y, sample_weight, batch_size, micro, steps, distribute=distribute)
            ),
            call=call,
            batch_size=batch_size if distribute else None,
            steps=steps,
        )
        return found[0]

    def _callbacks(self, callbacks: Any) -> list[Any]:
        running, wants_local_logs = callbacks_module.prepare(callbacks, self._steps, self._world)
        self._steps.keep_local_logs(wants_local_logs)
        if self._pipeline is not None:
            self._pipeline.shows_weights = callbacks_module.look_at_weights(callbacks, self._world)
        return running

    def _verbose(self, verbose: Any) -> Any:
        return verbose if self._world.prints else 0

    def _on_batch(
        self,
        call: Callable[..., Any],
        x: Any,
        y: Any,
        sample_weight: Any,
        training: bool,
        keywords: dict[str, Any],
    ) -> Any:
        if not training:
            self._steps.settle()
        data = (x, y, sample_weight)
        total = length(data)
        self._world.agree({"call": "train_on_batch" if training else "test_on_batch", "batch": total})
        self._decide(total)
        part = share(total, self._world.part, self._world.parts)
        self._steps.take(part)
        x, y, sample_weight = rows(data, part)
        self._steps.build((x, y, sample_weight))
        if training and self._model.built and not self._steps.begun:
            self._steps.begin()
        return call(x, y, sample_weight=sample_weight, **keywords)

    def _in_order(self, own: np.ndarray, history: list[Share]) -> np.ndarray:
        """The outputs of all ranks in the order of the samples."""
        size, first = self._world.parts, self._world.rank % self._world.stages == 0
        lengths = [max(part.samples, 1) for part in history]
        saved = [
            piece[: part.samples]
            for piece, part in zip(np.split(own, np.cumsum(lengths)[:-1]), history, strict=True)
        ]
        whole = np.concatenate(saved)
        # All ranks of a pipeline have the same.
        outputs = self._world.concatenate(whole if first else whole[:0], "predictions")
        outputs = outputs[:: self._world.stages]
        begins = [0] * size
        pieces = []
        for part in history:
            for rank in range(size):
                count = share(part.total, rank, size).samples
                pieces.append(outputs[rank][begins[rank] : begins[rank] + count])
                begins[rank] += count
        return np.concatenate(pieces)


class _Validation(NamedTuple):
    """What `fit` validates with: data of its own, or a part of the training data; the rest as there."""

    data: Any
    split: float
    batch_size: int | None
    micro: int | None
    steps: int | None
    distribute: bool


class Sequential(Model):
    """`keras.Sequential` that is trained by all ranks, with its arguments and those of `Model`."""

    def __init__(
        self,
        layers: Any = None,
        parallel_strategy: ParallelStrategy = ParallelStrategy.DATA,
        **keywords: Any,
    ) -> None:
        own = {name: keywords.pop(name) for name in (*OF_PIPELINES, "start") if name in keywords}
        super().__init__(keras.Sequential(layers, **keywords), parallel_strategy=parallel_strategy, **own)

    @classmethod
    def from_config(cls, config: dict[str, Any], **keywords: Any) -> Model:
        """The sequence that `get_config` described, with new weights."""
        return Model(keras.Sequential.from_config(config, **keywords))


def _takes_batch_size(data: Any) -> bool:
    """Whether Keras makes batches of these data; data sets come in batches."""
    first = keras.tree.flatten(data)[0]
    return hasattr(first, "shape")
