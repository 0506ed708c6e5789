"""Real ONNX models out of packages, what to give them, and what ONNX Runtime gives for them."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

import carme_runtime.onnx as carme_onnx
from carme_runtime.onnx.tracing import as_source

Shapes = dict[str, tuple[int, ...]]
SPEECH: Shapes = {"input": (1, 576), "state": (2, 1, 128)}
VOICES: Shapes = {"input": (1, 3, 20, 160)}
LIGHT = (
    "bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet",
    "vgg19", "zfnet512",
)  # fmt: skip


@dataclass(frozen=True)
class Real:
    """A model.

    Args:
        file: Below the folder of packages.
        shapes: Of inputs whose dimensions it leaves open.
        values: Of inputs that are settings.
    """

    file: str
    shapes: Shapes = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its package and file."""
        return f"{self.file.split('/')[0]}/{Path(self.file).stem}"

    @property
    def light(self) -> bool:
        """Whether its weights are constants in the file, which are replaced by random numbers."""
        return "/light/" in self.file

    def load(self) -> "carme_onnx.Model":
        """The model; a light one with weights, and without the softmax that would hide differences."""
        model = carme_onnx.load(folder() / self.file)
        if self.light:
            _reseed(model.proto.graph)
            last = model.proto.graph.node[-1]
            if last.op_type == "Softmax":
                model.proto.graph.output[0].name = last.input[0]
                del model.proto.graph.node[-1]
                model = carme_onnx.load(model.proto)
        return model

    def inputs(self, model: "carme_onnx.Model") -> dict[str, Any]:
        """Inputs for the model."""
        found = carme_onnx.example_of(model, self.shapes)
        if "bytes" in found:
            found["bytes"] = np.random.default_rng(0).integers(0, 256, found["bytes"].shape).astype(np.int32)
        return found | {name: np.asarray(value) for name, value in self.values.items()}


SETTINGS = {"sr": np.int64(16000)}
REAL = (
    *(Real(f"onnx/backend/test/data/light/light_{name}.onnx") for name in LIGHT),
    Real("rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx", {"x": (1, 3, 160, 224)}),
    Real("rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx", {"x": (1, 3, 48, 160)}),
    Real("rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx", {"x": (1, 3, 48, 192)}),
    Real("silero_vad/data/silero_vad.onnx", SPEECH, SETTINGS),
    Real("silero_vad/data/silero_vad_16k_op15.onnx", SPEECH, SETTINGS),
    Real("silero_vad/data/silero_vad_op18_ifless.onnx", SPEECH, SETTINGS),
    Real("silero_vad/data/silero_vad_half.onnx", SPEECH),
    Real("silero_vad/data/silero_vad_16k_sequence.onnx", {"input": (3, 576)}),
    Real("silero_vad/data/silero_vad_openvino_16k.onnx"),
    *(Real(f"speechmos/aecmos_models/Run_{name}_Stage_0.onnx", VOICES)
      for name in ("1663829550", "1663915512", "1668423760")),
    *(Real(f"speechmos/dnsmos_models/{name}.onnx") for name in ("bak_ovr", "model_v8", "sig", "sig_bak_ovr")),
    Real("speechmos/pdnsmos_models/sig_bak_ovr.onnx"),
    Real("speechmos/plcmos_models/plcmos_v2.onnx", {"degraded_audio": (1, 1, 20, 257)}),
    Real("swift_f0/model.onnx", {"audio": (1, 16000)}, {"fmin": np.float32(50), "fmax": np.float32(2000)}),
    Real("magika/models/standard_v3_3/model.onnx"),
)  # fmt: skip


def folder() -> Path:
    """Where `./test models` has put the packages."""
    return Path(os.environ["CARME_MODELS"])


def _reseed(graph: Any) -> None:
    chance = np.random.default_rng(1)
    fixed = {node.input[k] for node in graph.node if node.op_type == "BatchNormalization" for k in (3, 4)}
    for tensor in graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype != np.float32 or array.size < 2:
            continue
        if tensor.name in fixed:
            values = np.abs(1 + 0.1 * chance.standard_normal(array.shape)).astype(np.float32)
        elif array.ndim == 1 or array.size == array.shape[0]:
            values = (0.5 + 0.1 * chance.standard_normal(array.shape)).astype(np.float32)
        else:
            scale = np.float32((1 / np.prod(array.shape[1:])) ** 0.5)
            values = chance.standard_normal(array.shape, dtype=np.float32) * scale
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def expected(model: "carme_onnx.Model", inputs: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """What ONNX Runtime gives for the whole model."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    source = as_source(model.proto, scratch, "whole")
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return dict(zip(model.outputs, session.run(list(model.outputs), inputs), strict=True))


def distance(found: Any, wanted: Any) -> float:
    """The largest difference, relative to the largest number if that is above 1."""
    assert found.shape == wanted.shape
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    return float(np.abs(a - b).max() / max(1.0, np.abs(b).max())) if a.size else 0.0


assert onnx  # its light networks are among the models
