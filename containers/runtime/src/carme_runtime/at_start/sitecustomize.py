"""What Python runs first in ranks of `carme-run` with --memory-per-rank or --scale-probe.

Its folder is in their PYTHONPATH. Scripts that never import PyTorch are seen by nothing else of ours.
"""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path


def _run_shadowed_sitecustomize() -> None:
    """Python takes one module of this name; what a site has in its own still runs."""
    own_folder = Path(__file__).parent
    sys.path[:] = [folder for folder in sys.path if Path(folder) != own_folder]
    spec = importlib.machinery.PathFinder.find_spec(__name__)
    if spec is None or spec.loader is None:
        return
    sys.modules[__name__] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _watch() -> None:
    limited, probed = "CARME_MEMORY_PER_RANK" in os.environ, "CARME_SCALE_PROBE" in os.environ
    # A rank may run another Python, without our package.
    if not (limited or probed) or not importlib.util.find_spec("carme_runtime"):
        return
    if limited:
        from carme_runtime.out_of_core.keras_scripts import refuse_other_frameworks

        refuse_other_frameworks()
    if probed:
        from carme_runtime.scaling.start import watch_keras

        watch_keras()


try:
    _watch()
finally:
    _run_shadowed_sitecustomize()
