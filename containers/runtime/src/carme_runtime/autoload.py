"""What PyTorch calls when it is imported (entry point `torch.backends`)."""

import os
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

from carme_runtime import profile, progress
from carme_runtime.addresses import TURN_LOOPBACK_ON, loopback_is_down, loopback_works, meets_here
from carme_runtime.out_of_core.start import start
from carme_runtime.strategies import watch_for_plan
from carme_runtime.traces import phases

#: Options with which torchrun's ranks meet elsewhere than on this host.
_OTHER_HOSTS = ("--nnodes", "--rdzv-endpoint", "--rdzv_endpoint", "--master-addr", "--master_addr")


def _end_without_loopback() -> None:
    """End torchrun, or a rank, at once where ranks of this host cannot meet: they would wait for a minute."""
    words = sys.orig_argv
    is_torchrun = any(
        Path(word).name == "torchrun" or word in ("torch.distributed.run", "torch.distributed.launch")
        for word in words[:4]
    )
    is_local = is_torchrun and not any(word.startswith(_OTHER_HOSTS) for word in words)
    if (is_local or meets_here(os.environ)) and not loopback_works():
        sys.exit(f"carme: {loopback_is_down(socket.gethostname())} {TURN_LOOPBACK_ON}")


def register_backend() -> None:
    """Make the `torch.distributed` backend `carme` known; nothing where the native core was left out."""
    _end_without_loopback()
    profile.watch_loaders(progress.batch)
    progress.watch_optimizers()
    if profile.recorder and profile.recorder.records:
        phases.watch()
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
