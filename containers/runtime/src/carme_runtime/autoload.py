"""What PyTorch calls when it is imported (entry point `torch.backends`)."""

import sys
from importlib.util import find_spec

from carme_runtime import profile


def register_backend() -> None:
    """Make the `torch.distributed` backend `carme` known; nothing where the native core was left out."""
    if "carme_runtime.torch" in sys.modules:
        profile.watch_loaders()
        return  # it is importing torch just now and registers itself when it has
    profile.watch_loaders()
    if find_spec("carme_runtime._core"):
        from carme_runtime.torch import register

        register()
