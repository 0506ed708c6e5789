"""What PyTorch calls when it is imported (entry point `torch.backends`)."""

import os
import sys
from importlib.util import find_spec

from carme_runtime import profile, progress
from carme_runtime.out_of_core.start import start
from carme_runtime.strategies import watch_for_plan


def register_backend() -> None:
    """Make the `torch.distributed` backend `carme` known; nothing where the native core was left out."""
    profile.watch_loaders(progress.batch)
    progress.watch_optimizers()
    start()
    watch_for_plan()
    if "CARME_SCALE_PROBE" in os.environ:
        from carme_runtime.scaling.start import watch

        watch()
    if "carme_runtime.torch" in sys.modules:
        return  # it is importing torch just now and registers itself when it has
    if find_spec("carme_runtime._core"):
        from carme_runtime.torch import register

        register()
