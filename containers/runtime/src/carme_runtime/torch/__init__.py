"""PyTorch on the runtime's core: the `torch.distributed` backend `carme`, `parallelize`, `pipeline`,
and `trace`.

`torch.distributed.init_process_group("carme")` works without an import of this module where carme_runtime is
installed, because torch loads it by its entry point.
"""

from carme_runtime.torch.backend import ProcessGroupCarme
from carme_runtime.torch.parallel import parallelize
from carme_runtime.torch.pipelines import Pipeline, pipeline
from carme_runtime.torch.registration import register
from carme_runtime.torch.tracing import trace

__all__ = ["Pipeline", "ProcessGroupCarme", "parallelize", "pipeline", "register", "trace"]

register()
