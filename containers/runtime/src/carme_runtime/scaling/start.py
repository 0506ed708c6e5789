"""The probe that `carme-run --scale-probe` puts into a script that knows nothing of it."""

import argparse
import atexit
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.imports import changed_spec
from carme_runtime.scaling.ending import NO_RESULT, end, lacks_memory, memory_sentence

PROBE, NETWORK, SECONDS = "CARME_SCALE_PROBE", "CARME_SCALE_NETWORK", "CARME_SCALE_SECONDS"
OPTIONS_WITH_VALUE = ("--scale-result", "--scale-seconds", "--network")
USUAL_SECONDS, _LONGEST = 60.0, 120.0
_USUAL_RESULT = Path("scale.json")
_MEASURED = (
    "PyTorch (it calls a model and steps an optimizer), with Keras on PyTorch, or with Keras' fit or "
    "train_on_batch on TensorFlow"
)
_INSTEAD = "compare the steps of carme-run -n 1 and -n 2 with --backend"
_ONE_PROGRAM = "cannot be measured: JAX compiles a step as one program, which shows none of its parts."
_UNKNOWN = "cannot be measured: the probe does not know its steps."
_PROBE_ANOTHER = f"Probe the same model in a script that trains with {_MEASURED}, or {_INSTEAD}"
_chosen: list[tuple[Path, str | None, float]] = []


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `carme-run`."""
    parser.add_argument(
        "--scale-probe",
        action="store_true",
        help="with -n 1: measure the first steps of a PyTorch script, or of a Keras script on PyTorch or "
        "TensorFlow, for at most two minutes, then end it and predict how it scales",
    )
    parser.add_argument(
        "--scale-result",
        type=Path,
        metavar="FILE",
        help=f"where --scale-probe writes what it measured (default: {_USUAL_RESULT})",
    )
    add_fine_options(parser)


def add_fine_options(parser: argparse.ArgumentParser) -> None:
    """Those of them that `%carme_scale` has too."""
    parser.add_argument(
        "--scale-seconds",
        type=float,
        metavar="S",
        help=f"about how long --scale-probe measures (default: {USUAL_SECONDS:.0f})",
    )
    parser.add_argument(
        "--network",
        metavar="TEXT",
        help='with --scale-probe: the links between nodes, such as "100 Gbit/s, 2 us" (default: those of the '
        "file that CARME_LINKS names, else 10 Gbit/s)",
    )


def prepare(options: argparse.Namespace) -> dict[str, str]:
    """What the rank's environment gets. An earlier result stays until there is a new one; see `checked`.

    Raises:
        CarmeRuntimeError: The options do not go together, or the network cannot be read.
    """
    if not options.scale_probe:
        if any(each is not None for each in (options.scale_result, options.network, options.scale_seconds)):
            raise CarmeRuntimeError(
                "--scale-result, --scale-seconds and --network belong to --scale-probe.", "Add it."
            )
        return {}
    if options.n not in (None, 1) or options.max_restarts:
        raise CarmeRuntimeError("--scale-probe measures one rank.", "Use -n 1, without --max-restarts.")
    if options.scale_seconds is not None and not 0 < options.scale_seconds <= _LONGEST:
        raise CarmeRuntimeError(
            f"--scale-seconds {options.scale_seconds:g} is not possible.",
            f"Give more than 0 and at most {_LONGEST:.0f}.",
        )
    options.n = 1
    chosen = {PROBE: str(_result(options).absolute())}
    if options.scale_seconds:
        chosen[SECONDS] = str(options.scale_seconds)
    if options.network is not None:
        from carme_runtime.scaling.network import parse_network

        parse_network(options.network)
        chosen[NETWORK] = options.network
    options.earlier_result = _identity(_result(options))
    return chosen


def checked(options: argparse.Namespace, code: int) -> int:
    """The exit code of the run: that of a run without an error and without a result is one of ours."""
    if not options.scale_probe or _identity(_result(options)) != options.earlier_result:
        return code
    if not code:
        print(
            "carme-run --scale-probe: The script made no step with PyTorch or Keras, so nothing was "
            f"measured. Name a script that trains with {_MEASURED}. Or {_INSTEAD} NAME.",
            file=sys.stderr,
        )
    if options.earlier_result:
        print(
            f"carme-run --scale-probe: {_result(options)} still holds the result of an earlier probe.",
            file=sys.stderr,
        )
    return code or NO_RESULT


def _result(options: argparse.Namespace) -> Path:
    return options.scale_result or _USUAL_RESULT


def _identity(file: Path) -> tuple[int, int] | None:
    """Tells a result from an earlier one, which it replaces as another file. None: there is no result."""
    try:
        with file.open("rb") as opened:  # NFS looks at what another node wrote when a file is opened
            state = os.fstat(opened.fileno())
    except OSError:
        return None
    return state.st_ino, state.st_mtime_ns


def watch() -> None:
    """Measure this process's training, where `carme-run` asks for it. PyTorch has been imported."""
    chosen = _take()
    if chosen is None:
        return
    from carme_runtime.scaling.watching import Watch

    watch = _begin(Watch, *chosen)
    watch.install()
    _follow(watch, chosen[0])


def watch_keras() -> None:
    """Measure this process's training, too, where Keras does it on TensorFlow. Nothing is imported yet."""
    sys.meta_path.insert(0, _Finder)


def _take() -> tuple[Path, str | None, float] | None:
    """The file, the network and the seconds, for this process: programs that it starts do not have them."""
    file, network = os.environ.pop(PROBE, None), os.environ.pop(NETWORK, None)
    seconds = float(os.environ.pop(SECONDS, USUAL_SECONDS))
    if file is not None:
        _chosen.append((Path(file), network, seconds))
    return _chosen[0] if _chosen else None


class _Finder:
    """Changes modules when they are imported; of Keras the trainer of its backend alone is."""

    watch: Any = None

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        changes: dict[str, Callable[[ModuleType], None]] = {
            "keras.src.backend.tensorflow.trainer": cls._train_on_tensorflow,
            "keras.src.backend.jax.trainer": _train_on_jax,
            "optax": _train_with_optax,
            "mxnet.gluon.trainer": _train_with_mxnet,
            "tf_keras.src.engine.training": _train_with_tf_keras,
        }
        return changed_spec(name, path, changes[name]) if name in changes else None

    @classmethod
    def _train_on_tensorflow(cls, trainer: ModuleType) -> None:
        chosen = _take()
        if chosen is None or cls.watch is not None:
            return
        from carme_runtime.scaling.keras_watching import KerasWatch

        cls.watch = _begin(KerasWatch, *chosen)
        cls.watch.watch_trainer(trainer)
        # The trainer has imported it.
        if optimizers := sys.modules.get("keras.src.optimizers.base_optimizer"):
            cls.watch.watch_optimizers(optimizers)
        _follow(cls.watch, chosen[0])


def _train_on_jax(trainer: ModuleType) -> None:
    if _take() is None:
        return
    refuse = _refuse(f"Keras on JAX {_ONE_PROGRAM} Use KERAS_BACKEND=tensorflow or torch for the probe.")
    kind: Any = trainer.JAXTrainer
    kind.make_train_function = refuse
    # The trainer has imported it; loops of the script's own use it.
    if optimizers := sys.modules.get("keras.src.optimizers.base_optimizer"):
        base: Any = optimizers.BaseOptimizer
        base.apply = refuse


def _train_with_optax(optax: ModuleType) -> None:
    """Flax calls this, too. What updates its weights by itself ends as any script that is not measured."""
    if _take() is not None:
        module: Any = optax
        module.apply_updates = _refuse(f"A program of JAX {_ONE_PROGRAM} {_PROBE_ANOTHER} jax.")


def _train_with_mxnet(trainer: ModuleType) -> None:
    if _take() is not None:
        kind: Any = trainer.Trainer
        kind.step = _refuse(f"MXNet {_UNKNOWN} {_PROBE_ANOTHER} mxnet.")


def _train_with_tf_keras(training: ModuleType) -> None:
    if _take() is not None:
        kind: Any = training.Model
        kind.make_train_function = _refuse(
            f"tf_keras, the Keras before Keras 3, {_UNKNOWN} {_PROBE_ANOTHER} tensorflow."
        )


def _refuse(sentence: str) -> Callable[..., NoReturn]:
    """What stands in the place of what begins training: all of it would be in vain."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        end(sentence)

    return refuse


def _begin(kind: Callable[[Path, str | None, float], Any], *chosen: Any) -> Any:
    """A probe; the script ends where it cannot be one, before it trains in vain."""
    try:
        return kind(*chosen)
    except CarmeRuntimeError as error:
        end(str(error))


def _follow(watch: Any, file: Path) -> None:
    """Have the process explain why there is no result of it."""
    _explain_errors(watch)
    atexit.register(_note_missing_result, watch, file, _identity(file))


def _note_missing_result(watch: Any, file: Path, earlier: tuple[int, int] | None) -> None:
    if not watch.over and _identity(file) == earlier and (sentence := watch.shortage()):
        end(sentence)


def _explain_errors(watch: Any) -> None:
    usual = sys.excepthook

    def explained(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if lacks_memory(error):
            end(memory_sentence(error))
        watch.over = True  # what the script says of its error is enough
        usual(kind, error, trace)

    sys.excepthook = explained
