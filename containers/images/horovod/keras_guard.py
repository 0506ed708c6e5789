"""Added to Horovod: refuses its wrapper for Keras where that would train wrongly without a word."""

from pathlib import Path

WARNING = (
    "Under Keras 3, Horovod's wrapper silently does not average gradients: every rank trains a model of "
    "its own. Use carme_runtime.keras instead: import carme_runtime.keras as ck; model = ck.Model(model)."
)


def check(module: str, file: str) -> None:
    """Raise ImportError where `module`, in `file`, is no use, and say what is."""
    if module == "horovod.tensorflow":
        if not any(Path(file).parent.glob("mpi_lib*.so")):
            raise ImportError(f"Horovod is built for PyTorch alone here. For Keras: {WARNING}")
        return
    if module == "horovod.keras":
        import keras
    else:
        from tensorflow import keras
    version = getattr(keras, "__version__", "2")  # tf_keras, which is Keras 2, does not say it there
    if int(version.partition(".")[0]) >= 3:
        raise ImportError(f"{module} cannot be used with Keras {version}. {WARNING}")
