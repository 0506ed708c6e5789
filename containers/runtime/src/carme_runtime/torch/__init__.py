"""PyTorch on the runtime's core: the `torch.distributed` backend `carme`, and `parallelize`.

`torch.distributed.init_process_group("carme")` works without an import of this module where carme_runtime is
installed, because torch loads it by its entry point.
"""

from carme_runtime.torch.backend import ProcessGroupCarme, register
from carme_runtime.torch.parallel import parallelize

__all__ = ["ProcessGroupCarme", "parallelize", "register"]

register()
