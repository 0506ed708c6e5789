"""Callbacks on many ranks: all see the same logs, and one of them writes files."""

from collections.abc import Callable as Function
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

from carme_runtime import progress
from carme_runtime.checkpoint import Checkpoints as Files
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.keras import state
from carme_runtime.keras.library import keras
from carme_runtime.keras.steps import VALIDATION
from carme_runtime.keras.world import World, wanted, world
from carme_runtime.starts import check_start

# Two writers of one file destroy it.
WRITERS = tuple(
    getattr(keras.callbacks, name)
    for name in (
        "BackupAndRestore",
        "CSVLogger",
        "ModelCheckpoint",
        "OrbaxCheckpoint",
        "RemoteMonitor",
        "TensorBoard",
    )
    if hasattr(keras.callbacks, name)
)
# What these do has nothing to do with weights.
BLIND = tuple(
    getattr(keras.callbacks, name)
    for name in (
        "CSVLogger",
        "EarlyStopping",
        "History",
        "LearningRateScheduler",
        "ProgbarLogger",
        "ReduceLROnPlateau",
        "RemoteMonitor",
        "TerminateOnNaN",
    )
)
_TENSORBOARD_EVERYWHERE = "TNT_TENSORBOARD_ON_ALL_DEVICES"
_STOPS = {"train": "stop_training", "test": "stop_evaluating", "predict": "stop_predicting"}  # Keras' names


class Callback(keras.callbacks.Callback):
    """A Keras callback, with a say in where it runs and what it sees.

    Args:
        keras_callback: The callback.
        aggregate_logs: Give it losses and metrics over the samples of all ranks; if not, over this rank's.
        run_on_all_ranks: Whether it runs on all ranks, or on the master rank only. By default callbacks that
            write files run on the master rank, and all others on all ranks.
    """

    def __init__(
        self,
        keras_callback: Any,
        aggregate_logs: bool = True,
        run_on_all_ranks: bool | None = None,
    ) -> None:
        super().__init__()
        if isinstance(keras_callback, Callback):
            keras_callback = keras_callback.keras_callback
        self.keras_callback, self.aggregate_logs = keras_callback, aggregate_logs
        self.run_on_all_ranks = (
            _runs_everywhere(keras_callback) if run_on_all_ranks is None else run_on_all_ranks
        )
        self.localize: Function[[dict[str, Any], str], dict[str, Any]] = lambda logs, prefix: logs

    def set_params(self, params: dict[str, Any]) -> None:
        """Notify the callback."""
        super().set_params(params)
        self.keras_callback.set_params(params)

    def set_model(self, model: Any) -> None:
        """Notify the callback."""
        super().set_model(model)
        self.keras_callback.set_model(model)

    def _logs(self, logs: dict[str, Any] | None, prefix: str) -> dict[str, Any] | None:
        return logs if self.aggregate_logs or logs is None else self.localize(logs, prefix)


class Checkpoints(keras.callbacks.Callback):
    """Lets training go on where it was cut off, on any number of ranks.

    When training begins, the newest checkpoint in the folder is loaded: weights, optimizer, random seeds, and
    the epoch to go on with. After epochs one is written in the background; see `carme_runtime.checkpoint`.

    Args:
        folder: That all ranks see. Each model has one of its own; several calls of `fit` count their epochs
            on, by `initial_epoch`.
        keep: How many checkpoints are kept, the newest.
        every: Epochs from one checkpoint to the next. The last epoch is saved in any case.
        start: `streamed`: rank 0 alone reads the checkpoint. The others get its values with all that training
            brings them at its begin, as `Model` says of the same `start`. Not with stages.

    Raises:
        InvalidCall: The folder has checkpoints of another model.
    """

    def __init__(self, folder: str | Path, keep: int = 3, every: int = 1, start: str = "") -> None:
        super().__init__()
        check_start(start)
        if every < 1:
            raise InvalidCall(f"Checkpoints got every={every}.", "Save every epoch, or every second, ...")
        self._folder, self._keep, self._every, self._start = folder, keep, every, start
        self._files: Files | None = None
        self._seen = self._saved = 0  # epochs

    def on_train_begin(self, logs: Any = None) -> None:
        """Load the newest one."""
        self._files = Files(self._folder, self._keep)
        if self._start:
            loaded = self._files.load_on_rank_0(own=state.own)
            world().together(lambda: self._give(loaded[1]) if loaded and loaded[1] else None)
            state.build(self.model)  # as the checkpoint has done it on rank 0
            self._seen = self._saved = world().exchange(self._saved)[0] if loaded else 0
        else:
            loaded = self._files.load(own=state.own)
            self._seen = self._saved = 0
            if loaded:
                self._give(loaded[1])
        if loaded:
            self.model._initial_epoch = self._saved

    def _give(self, parts: dict[str, Any]) -> None:
        if "epoch" not in parts or "model" not in parts:
            raise InvalidCall(
                f"The checkpoints in {self._folder} have no epoch and model: {', '.join(parts)}.",
                "Give a folder of their own to those of this callback.",
            )
        state.give(self.model, parts["model"])
        self._seen = self._saved = parts["epoch"]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Begin to write one."""
        self._seen = epoch + 1
        if self._seen % self._every == 0:
            self._save()

    def on_train_end(self, logs: Any = None) -> None:
        """Write the last one. Raises what went wrong with it."""
        if self._seen != self._saved:
            self._save()
        if self._files:
            self._files.wait()
        self.model._initial_epoch = None  # Keras would begin there again

    def _save(self) -> None:
        assert self._files is not None
        self._files.save(self._seen, model=state.take(self.model), epoch=self._seen)
        self._saved = self._seen


def _forward(name: str, numbered: bool) -> None:
    """Let `Callback` pass calls of this hook on."""
    # Only in the logs of an epoch do names say by themselves what is of the validation data.
    prefix = VALIDATION if name.startswith("on_test") else ""

    def with_number(self: Callback, number: int, logs: dict[str, Any] | None = None) -> None:
        getattr(self.keras_callback, name)(number, self._logs(logs, prefix))

    def without_number(self: Callback, logs: dict[str, Any] | None = None) -> None:
        getattr(self.keras_callback, name)(self._logs(logs, prefix))

    setattr(Callback, name, with_number if numbered else without_number)


for _moment in ("begin", "end"):
    _forward(f"on_epoch_{_moment}", True)
    for _work in ("train", "test", "predict"):
        _forward(f"on_{_work}_{_moment}", False)
        _forward(f"on_{_work}_batch_{_moment}", True)


def _runs_everywhere(callback: Any) -> bool:
    if isinstance(callback, keras.callbacks.TensorBoard):
        return wanted(_TENSORBOARD_EVERYWHERE)
    return not isinstance(callback, WRITERS)


class Trained(Protocol):
    """What the callbacks below need of the model they serve."""

    def begin(self) -> None: ...

    def arrive(self) -> None: ...

    def expose(self) -> None: ...

    def resume(self) -> None: ...

    def settle(self) -> None: ...

    def forget_local_logs(self, prefix: str) -> None: ...

    def localize(self, logs: dict[str, Any], prefix: str) -> dict[str, Any]: ...


class First(keras.callbacks.Callback):
    """Before all others: what they save and see is the same on every rank."""

    def __init__(self, trained: Trained) -> None:
        super().__init__()
        self._trained = trained

    def on_train_begin(self, logs: Any = None) -> None:
        """Show the whole model."""
        self._trained.expose()

    def on_train_end(self, logs: Any = None) -> None:
        """Show the whole model."""
        self._trained.expose()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Count anew."""
        self._trained.forget_local_logs("")

    def on_test_begin(self, logs: Any = None) -> None:
        """Test the model that all ranks have."""
        self._trained.forget_local_logs(VALIDATION)
        self._trained.settle()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save the model that all ranks have."""
        self._trained.settle()
        self._trained.expose()


class Last(keras.callbacks.Callback):
    """After all others: what one rank's callbacks decided holds for every rank.

    Args:
        trained: The model.
        watched: The kinds of work whose batches callbacks see one by one, and may stop at.
        looks_early: Whether a callback may look at weights before the first batch.
    """

    def __init__(self, trained: Trained, watched: Collection[str], looks_early: bool = False) -> None:
        super().__init__()
        self._trained, self._looks_early = trained, looks_early
        for work in watched:
            # Not as methods: Keras goes on with the next batch while callbacks run, unless one has these.
            setattr(
                self, f"on_{work}_batch_end", lambda batch, logs=None, work=work: self._agree_to_stop(work)
            )

    def on_train_begin(self, logs: Any = None) -> None:
        """The master rank may have restored a backup."""
        epochs = world().exchange(self.model._initial_epoch)
        self.model._initial_epoch = epochs[0]
        self._trained.begin()
        if self._looks_early:
            self._trained.arrive()
        self._trained.resume()

    def on_train_end(self, logs: Any = None) -> None:
        """Callbacks may have restored the best weights."""
        self._trained.resume()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop together."""
        self._trained.resume()
        self._agree_to_stop("train")

    def on_test_begin(self, logs: Any = None) -> None:
        """Stop together."""
        self._agree_to_stop("test")

    def on_predict_begin(self, logs: Any = None) -> None:
        """Stop together."""
        self._agree_to_stop("predict")

    def _agree_to_stop(self, work: str) -> None:
        stop = bool(getattr(self.model, _STOPS[work]))
        setattr(self.model, _STOPS[work], bool(world().table([stop]).any()))


class ReportProgress(keras.callbacks.Callback):
    """Reports the progress of training."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """One step more."""
        progress.report(steps=1, loss=(logs or {}).get("loss"))


def prepare(callbacks: Any, trained: Trained, run: World) -> tuple[list[Any], bool]:
    """The callbacks that this rank runs, and whether any wants this rank's own logs."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    wrapped = [
        each if isinstance(each, Callback) else Callback(each) for each in keras.tree.flatten(callbacks or [])
    ]
    # What a single rank decides holds anyway.
    watching = [
        run.size > 1 and any(_looks_at_batches(each.keras_callback, work) for each in wrapped)
        for work in _STOPS
    ]
    watched = run.table([*watching]).sum(0)  # by any rank
    running = [each for each in wrapped if each.run_on_all_ranks or run.is_master]
    for each in running:
        each.localize = trained.localize
        if not run.prints and hasattr(each.keras_callback, "verbose"):
            each.keras_callback.verbose = 0
        if isinstance(each.keras_callback, keras.callbacks.TensorBoard) and each.run_on_all_ranks:
            _own_folder(each.keras_callback, run.rank)
    stopping = [work for work, watch in zip(_STOPS, watched, strict=True) if watch]
    last = Last(trained, stopping, any(_looks_early(each.keras_callback) for each in running))
    # Unwrapped where nothing is changed: Keras looks at the classes of some.
    plain = [each.keras_callback if each.aggregate_logs else each for each in running]
    reporting = [ReportProgress()] if progress.active() else []
    return [First(trained), *plain, *reporting, last], any(not each.aggregate_logs for each in wrapped)


def _looks_early(callback: Any) -> bool:
    """Whether a callback, which is none of Keras' own, does something before the first batch."""
    names = ("on_epoch_begin", "on_train_batch_begin", "on_batch_begin")
    plain = keras.callbacks.Callback
    kind = type(callback)
    own = any(getattr(kind, name, None) is not getattr(plain, name) for name in names)
    lambdas = kind is keras.callbacks.LambdaCallback
    return lambdas or (own and kind.__module__.partition(".")[0] != "keras")


def look_at_weights(callbacks: Any, run: World) -> bool:
    """Whether any of these, on any rank, may look at the model's weights at the end of an epoch.

    Raises:
        InvalidCall: One saves after so many batches, where a rank has some of the layers only.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    flat = [
        each.keras_callback if isinstance(each, Callback) else each
        for each in keras.tree.flatten(callbacks or [])
    ]
    for each in flat:
        if isinstance(getattr(each, "save_freq", "epoch"), int):
            raise InvalidCall(
                f"{type(each).__name__} has save_freq={each.save_freq}, and the model is in stages then.",
                "Use save_freq='epoch'.",
            )
    need_weights = any(
        not isinstance(each, BLIND) or getattr(each, "restore_best_weights", False) for each in flat
    )
    return bool(run.table([need_weights]).any())


def _own_folder(tensorboard: Any, rank: int) -> None:
    """Let each rank write below the folder, and not anew below that in a second call of fit."""
    folder = Path(tensorboard.log_dir)
    if folder.name != f"rank_{rank}":
        tensorboard.log_dir = str(folder / f"rank_{rank}")


def _looks_at_batches(callback: Any, work: str) -> bool:
    names = [f"on_{work}_batch_begin", f"on_{work}_batch_end"]
    if work == "train":
        names += ["on_batch_begin", "on_batch_end"]
    return any(
        getattr(type(callback), name, None) is not getattr(keras.callbacks.Callback, name) for name in names
    ) or isinstance(callback, keras.callbacks.LambdaCallback)
