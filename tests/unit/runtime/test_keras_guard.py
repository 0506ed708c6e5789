"""What refuses Horovod's wrapper for Keras in the images, without Horovod and Keras themselves."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

GUARD = Path(__file__).parents[3] / "containers/images/horovod/keras_guard.py"


@pytest.fixture
def guard() -> ModuleType:
    spec = importlib.util.spec_from_file_location("keras_guard", GUARD)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def keras(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """Let `keras`, and TensorFlow's, be of this version; None: it does not say it, as tf_keras."""
    module, tensorflow = ModuleType("keras"), ModuleType("tensorflow")
    if version:
        module.__dict__["__version__"] = version
    tensorflow.__dict__["keras"] = module
    monkeypatch.setitem(sys.modules, "keras", module)
    monkeypatch.setitem(sys.modules, "tensorflow", tensorflow)


@pytest.mark.parametrize("module", ["horovod.keras", "horovod.tensorflow.keras"])
def test_under_keras_3_it_is_refused(guard: ModuleType, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    keras(monkeypatch, "3.15.0")
    with pytest.raises(ImportError, match=r"silently does not average gradients.*carme_runtime\.keras"):
        guard.check(module, "anywhere")


@pytest.mark.parametrize("version", ["2.15.0", None])
def test_under_keras_2_it_is_not(
    guard: ModuleType, monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    keras(monkeypatch, version)
    guard.check("horovod.keras", "anywhere")
    guard.check("horovod.tensorflow.keras", "anywhere")


def test_horovod_without_tensorflow_says_so(guard: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ImportError, match="built for PyTorch alone"):
        guard.check("horovod.tensorflow", str(tmp_path / "__init__.py"))
    (tmp_path / "mpi_lib.cpython-311-x86_64-linux-gnu.so").touch()
    guard.check("horovod.tensorflow", str(tmp_path / "__init__.py"))
