"""Train on many processes, GPUs and nodes of a job.

`carme-run train.py` starts a script in one process per GPU on all nodes of the job; each process is a rank.
In the script:

- `carme_runtime.torch.parallelize(model, optimizer)` averages gradients over the ranks (PyTorch),
- `carme_runtime.keras.Model(model)` does so for Keras 3, and `carme_runtime.horovod` for scripts of Horovod,
- `carme_runtime.torch.pipeline(model, ...)` splits a model that is too large for one process,
- `carme_runtime.memory(limit)` trains a model in less memory than it needs,
- `carme_runtime.checkpoint.Checkpoints` saves a training run, and resumes it,
- `carme_runtime.scaling.advise(model, loader)` predicts how fast training is on more ranks,
- `carme_runtime.petri` runs workflows as Petri nets, and `carme_runtime.onnx` ONNX models on several workers,
- `carme_runtime.gaspi` has one-sided communication for programs of your own.

`help()` of each of them says more. Importing this package needs only Python's standard library, so it
installs into any container; PyTorch, Keras and other frameworks are needed by the parts that use them.
"""

import os
from typing import TYPE_CHECKING

from carme_runtime.errors import CarmeRuntimeError

if TYPE_CHECKING:
    from carme_runtime.out_of_core.budget import Budget

__all__ = ["CarmeRuntimeError", "__version__", "memory"]
__version__ = "0.1.0"


def memory(limit: int | str, spill: str | os.PathLike[str] | None = None, device: str = "cpu") -> "Budget":
    """Train in less memory than a model needs: `with carme_runtime.memory("2GiB") as budget:`. Needs PyTorch.

    Args:
        limit: The most memory that this process may use, in bytes or such as "2GiB"; of a GPU, the most that
            tensors may use.
        spill: A folder on a local disk, for what does not fit into the host's memory. Carme leaves nothing
            in it.
        device: The device whose memory is limited. With `cuda`, or `cuda:1`, what does not fit waits in the
            host's memory, which must have room for it.

    Returns:
        A budget: give it your model and optimizer with `adopt`; its `plan()` says what a step costs.

    Raises:
        CarmeRuntimeError: The limit is not a size of memory, or there is no such device.
    """
    if str(device) != "cpu":
        if spill is not None:
            raise CarmeRuntimeError(
                "What does not fit into a GPU waits in the memory of the host, and a spill folder was given.",
                "Leave spill out, or leave device out to limit the memory of the host.",
            )
        from carme_runtime.out_of_core.gpu import GpuBudget

        return GpuBudget(limit, device)
    if spill is None:
        raise CarmeRuntimeError(
            "There is no folder for what does not fit into memory.", "Give spill=, a folder on a local disk."
        )
    from carme_runtime.out_of_core.budget import Budget

    return Budget(limit, spill)
