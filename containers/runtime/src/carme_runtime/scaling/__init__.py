"""How far training scales: a step on many ranks, predicted from what a probe measured on one.

    carme-run -n 1 --scale-probe train.py        # writes scale.json
    python -m carme_runtime.scaling scale.json   # or: carme scale scale.json

    from carme_runtime import scaling
    scaling.advise(model, loader)                # in a notebook

Keuper and Pfreundt (Distributed Training of Deep Neural Networks: Theoretical and Practical Limits of
Parallel Scalability, 2016) name the limits: communication, matrices that get too skinny when the batch is
divided, and input data. Reading and predicting need nothing but Python, measuring needs PyTorch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carme_runtime.scaling.curves import save
    from carme_runtime.scaling.errors import ScalingError
    from carme_runtime.scaling.network import Machine, parse_network
    from carme_runtime.scaling.prediction import Point, Prediction, predict
    from carme_runtime.scaling.profiles import Gradient, Input, Memory, Profile, load
    from carme_runtime.scaling.show import as_dict, drawing, table
    from carme_runtime.scaling.shown import Advice

__all__ = [
    "Gradient",
    "Input",
    "Machine",
    "Memory",
    "Point",
    "Prediction",
    "Profile",
    "ScalingError",
    "advise",
    "as_dict",
    "drawing",
    "load",
    "parse_network",
    "predict",
    "save",
    "table",
]


_PARTS = {
    "curves": ("save",),
    "errors": ("ScalingError",),
    "network": ("Machine", "parse_network"),
    "prediction": ("Point", "Prediction", "predict"),
    "profiles": ("Gradient", "Input", "Memory", "Profile", "load"),
    "show": ("as_dict", "drawing", "table"),
}


def advise(model: Any, loader: Any, **options: Any) -> "Advice":
    """Measure a model with a loader's batches, and predict it on more ranks; see `advice.advise`.

    Args:
        model: A PyTorch model, in training, on its device.
        loader: A DataLoader, or other batches.
        options: Keywords of `advice.advise`: loss, network, ranks_per_node, upto and seconds.

    Returns:
        The prediction, which a notebook shows.

    Raises:
        ScalingError: No batch comes, the model cannot be run with it, or the network cannot be read.
    """
    from carme_runtime.scaling import advice

    return advice.advise(model, loader, **options)


def __getattr__(name: str) -> Any:
    """What programs use, imported when it is: each start of `carme-run` imports its options from here."""
    for part, names in _PARTS.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{part}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
