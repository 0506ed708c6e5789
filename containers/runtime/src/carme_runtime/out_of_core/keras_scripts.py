"""What a limit of memory changes in Keras: it trains with its torch backend, one parameter after the other.

Keras' optimizers are none of PyTorch's, so their steps are found here, and its files are not made in memory.
Nothing of this needs PyTorch or Keras before the script imports it.
"""

import atexit
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from carme_runtime.imports import changed_spec
from carme_runtime.out_of_core.environment import LIMIT

_BACKENDS = "keras.src.backend"
_OTHER_BACKENDS = {"tensorflow": "TensorFlow", "jax": "JAX", "numpy": "NumPy", "openvino": "OpenVINO"}
_OPTIMIZERS = f"{_BACKENDS}.torch.optimizers"
# Those that treat each parameter by itself. Nadam has a product of all its calls.
_BY_PARAMETER = {"Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "Lion", "RMSprop", "SGD"}
_TOGETHER = 4 << 20  # bytes of parameters that are taken at a time; a larger one is taken alone
_budget: Any = None  # that holds now
_trains = True  # whether a model of Keras may train


def follow(budget: Any) -> None:
    """Let Keras work for a budget from now on; for none with None."""
    global _budget
    _budget = budget
    if budget is not None:
        _watch(refuse=False)


def refuse_training() -> None:
    """End this process with a sentence when a model of Keras trains: its layers cannot compute again.

    What they draw for Dropout is a state that each forward pass changes.
    """
    global _trains
    _trains = False


def refuse_other_frameworks() -> None:
    """End this process with a sentence when it trains with what no limit of memory knows."""
    _watch(refuse=True)
    atexit.register(_note_other_framework)


def _note_other_framework() -> None:
    if LIMIT in os.environ and "torch" not in sys.modules and {"tensorflow", "jax"} & sys.modules.keys():
        print(
            "carme-run: --memory-per-rank limited nothing, as the script did not import PyTorch.",
            file=sys.stderr,
            flush=True,
        )


class _Finder:
    """Changes modules of Keras when they are imported."""

    refuses = False

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        package, _, backend = name.rpartition(".")
        if (
            cls.refuses
            and package == _BACKENDS
            and backend in _OTHER_BACKENDS
            and backend == _chosen_backend()
        ):
            atexit.unregister(_note_other_framework)
            sys.exit(
                "carme-run: --memory-per-rank works with PyTorch, and this script runs Keras on its "
                f"{_OTHER_BACKENDS[backend]} backend. Set KERAS_BACKEND=torch, or leave --memory-per-rank "
                "out."
            )
        change = _CHANGES.get(name)
        if change is None:
            return None
        return changed_spec(name, path, change)


def _chosen_backend() -> str | None:
    """What Keras trains with; on PyTorch it imports TensorFlow's backend as well, for a script's data."""
    config = sys.modules.get(f"{_BACKENDS}.config")
    return config.backend() if config else None


def _watch(refuse: bool) -> None:
    _Finder.refuses = _Finder.refuses or refuse
    if _Finder in sys.meta_path:
        return
    sys.meta_path.insert(0, _Finder)
    for name, change in _CHANGES.items():
        if name in sys.modules:
            change(sys.modules[name])


def _write_files_on_disk(saving: Any) -> None:
    """Keras makes a file in memory when the machine has the room; the limit does not count as that."""
    known = getattr(saving, "is_memory_sufficient", None)
    if known is not None:
        saving.is_memory_sufficient = lambda model: _budget is None and known(model)


def _see_steps(optimizers: Any) -> None:
    """The end of an optimizer's update is the end of a step."""
    kind = optimizers.BaseOptimizer
    known = kind.apply

    @functools.wraps(known)
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _trains:
            sys.exit(
                "carme-run: --recompute works with layers of PyTorch, and this script trains a model of "
                "Keras. Leave --recompute out."
            )
        result = known(self, *args, **kwargs)
        if _budget is not None:
            _budget.end_step(self)
        return result

    kind.apply = apply


def _update_parameter_by_parameter(optimizers: Any) -> None:
    """As in `optimizers.py`: an update of lists passes over all parameters once for each operation."""
    kind = optimizers.TorchParallelOptimizer
    known = kind._backend_update_step

    @functools.wraps(known)
    def update(self: Any, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        own = type(self)
        if _budget is None or not own.__module__.startswith(_OPTIMIZERS) or own.__name__ not in _BY_PARAMETER:
            known(self, grads, trainable_variables, learning_rate)
            return
        for part in _parts([each.value for each in trainable_variables]):
            known(self, grads[part], trainable_variables[part], learning_rate)

    kind._backend_update_step = update


def _parts(parameters: Sequence[Any]) -> Iterator[slice]:
    begin = size = 0
    for place, each in enumerate(parameters):
        own = each.numel() * each.element_size()
        if place > begin and size + own > _TOGETHER:
            yield slice(begin, place)
            begin, size = place, 0
        size += own
    yield slice(begin, len(parameters))


_CHANGES = {
    "keras.src.saving.saving_lib": _write_files_on_disk,
    "keras.src.optimizers.base_optimizer": _see_steps,
    f"{_OPTIMIZERS}.torch_parallel_optimizer": _update_parameter_by_parameter,
}
