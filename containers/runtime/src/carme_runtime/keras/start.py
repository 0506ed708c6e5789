"""What must be set before a script makes its first tensor: this rank's GPU, and the seed of what shuffles.

And the name that loops which were written for Tarantella use, and that Keras 3 no longer has.
"""

import os
import warnings
from importlib import import_module

from carme_runtime.keras.library import keras

SEED = 42  # of Tarantella too


def begin() -> None:
    """Take this rank's GPU, and let `tf.data` shuffle alike on all ranks."""
    _name_as_keras_2_did()
    backend = keras.backend.backend()
    if backend == "tensorflow":
        _seed_tensorflow()
        _take_gpu_of_tensorflow()
    elif backend == "torch":
        _take_gpu_of_torch()


def _name_as_keras_2_did() -> None:
    """Let loops reset a metric by the name that it had when Tarantella's users wrote them."""
    metric = keras.metrics.Metric
    if not hasattr(metric, "reset_states"):
        # By name, so that a metric's own `reset_state` is the one that runs.
        metric.reset_states = lambda self: self.reset_state()


def _seed_tensorflow() -> None:
    """Give a seed to what has none, as a data set's `shuffle`. A script's own `tf.random.set_seed` holds."""
    tf = import_module("tensorflow")
    # The names of one rank's script count too: a single rank shuffles as many do.
    if tf.compat.v1.get_seed(None) == (None, None):
        tf.random.set_seed(SEED)


def _take_gpu_of_tensorflow() -> None:
    """TensorFlow would take the memory of all GPUs that it sees, and every rank sees all of its node."""
    tf = import_module("tensorflow")
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus or not _launched() or tf.config.get_visible_devices("GPU") != gpus:
        return
    own_gpu = gpus[_local_rank() % len(gpus)]
    try:
        tf.config.set_visible_devices(own_gpu, "GPU")
        tf.config.experimental.set_memory_growth(own_gpu, True)
    except RuntimeError:
        warnings.warn(
            "TensorFlow has taken all GPUs already. Import carme_runtime.keras before anything is computed.",
            stacklevel=4,
        )


def _take_gpu_of_torch() -> None:
    """The GPU of Keras' torch backend is PyTorch's current one, which is the node's first at first."""
    torch = import_module("torch")
    if _launched() and torch.cuda.is_available():
        torch.cuda.set_device(_local_rank() % torch.cuda.device_count())


def _launched() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
