"""ONNX Runtime's sessions."""

from typing import Any

from carme_runtime.onnx.errors import OnnxError
from carme_runtime.onnx.library import library

CUDA = "CUDAExecutionProvider"
CPU = "CPUExecutionProvider"


def session(
    source: Any,
    *,
    threads: int = 1,
    name: str = "The model",
    gpu: bool = False,
    packed: bool = True,
    **settings: Any,
) -> Any:
    """An `onnxruntime.InferenceSession`.

    Args:
        source: Bytes of a model, or its file.
        threads: Of one operator; there is one operator at a time.
        name: Of the model, for sentences.
        gpu: Whether it runs on a GPU.
        packed: Whether it has copies of its matrices, in the order in which processors read them.
        settings: More attributes of `onnxruntime.SessionOptions`.

    Raises:
        OnnxError: ONNX Runtime refuses the model, or knows no GPU.
    """
    runtime = library("onnxruntime")
    if gpu and CUDA not in runtime.get_available_providers():
        raise OnnxError(
            "This ONNX Runtime cannot use GPUs.",
            "Install onnxruntime-gpu, or plan for workers of the kind cpu.",
        )
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    # Workers share the processors: threads that wait must not spin.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not packed:
        options.add_session_config_entry("session.disable_prepacking", "1")
    for key, value in settings.items():
        setattr(options, key, value)
    try:
        return runtime.InferenceSession(source, options, providers=[CUDA, CPU] if gpu else [CPU])
    except Exception as error:
        text = " ".join(str(error).split())
        raise OnnxError(
            f"ONNX Runtime {runtime.__version__} refuses {name}: {text[:400]}", "Export the model again."
        ) from None


def result_of(session: Any, names: list[str] | None, inputs: Any, name: str) -> list[Any]:
    """What a session gives. Raises OnnxError where it fails."""
    try:
        return session.run(names, inputs)
    except Exception as error:
        text = " ".join(str(error).split())
        raise OnnxError(
            f"ONNX Runtime failed in {name}: {text[:400]}", "Check the values and shapes of the inputs."
        ) from None
