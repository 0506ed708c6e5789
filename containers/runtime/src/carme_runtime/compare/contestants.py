"""Who takes part: one entry of `CONTESTANTS` each."""

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from carme_runtime.compare import pythons

BEGIN, END = "# user: begin", "# user: end"
_KERAS = "KERAS_BACKEND"
#: Of Horovod, whose ranks negotiate all the time: while they are stopped, answers take longer than its 30 s.
_PATIENT = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "86400"}


@dataclass(frozen=True)
class Contestant:
    """A framework and a way of training with it over several ranks.

    Args:
        name: What options and results call it.
        title: What the report calls it.
        backend: Of `carme-run --backend`.
        program: The module of `carme_runtime.compare.programs` that trains.
        needs: The modules that Python must have, by the names that people install.
        setting: What the program is started with, such as the backend of torch.distributed.
        environment: What its ranks get on top.
        has_servers: Whether processes beside the ranks do part of a step's work.
        is_restless: Whether its ranks compute also when they have nothing to do, so that they are stopped
            between turns.
        is_predicted: Whether its program has `profile` and `machine`, from which `carme_runtime.scaling`
            predicts its steps on more ranks.
    """

    name: str
    title: str
    backend: str
    program: str
    needs: tuple[str, ...]
    setting: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    has_servers: bool = False
    is_restless: bool = False
    is_predicted: bool = False

    def missing(self, python: str = sys.executable) -> list[str]:
        """The modules that a Python lacks. Raises CompareError where it cannot be started."""
        if python == sys.executable:
            return [name for name in self.needs if importlib.util.find_spec(name) is None]
        return list(pythons.missing(python, ("carme_runtime", *self.needs)))

    def user_lines(self) -> int:
        """How many lines of code a user writes to train like this, without the network and the data."""
        text = (Path(__file__).parent / "programs" / f"{self.program}.py").read_text()
        return count_user_lines(text)


def count_user_lines(text: str) -> int:
    """Lines between the marks that hold code; those that only measure do not count."""
    counted, inside = 0, False
    for line in map(str.strip, text.splitlines()):
        if line in (BEGIN, END):
            inside = line == BEGIN
        elif inside and line and not line.startswith(("#", "mark(", '"""')):
            counted += 1
    return counted


CONTESTANTS = {
    each.name: each
    for each in (
        Contestant("torch-gloo", "PyTorch DDP (Gloo)", "torch", "torch_ddp", ("torch",), "gloo"),
        Contestant("torch-carme", "PyTorch DDP (backend carme)", "torch", "torch_ddp", ("torch",), "carme"),
        Contestant(
            "parallelize",
            "PyTorch (parallelize)",
            "torch",
            "torch_parallelize",
            ("torch",),
            is_predicted=True,
        ),
        Contestant(
            "keras-torch",
            "Keras on PyTorch (carme_runtime.keras)",
            "torch",
            "keras_model",
            ("keras", "torch"),
            environment={_KERAS: "torch"},
        ),
        Contestant(
            "keras-tensorflow",
            "Keras on TensorFlow (carme_runtime.keras)",
            "torch",
            "keras_model",
            ("keras", "tensorflow"),
            environment={_KERAS: "tensorflow"},
        ),
        Contestant(
            "horovod-face",
            "PyTorch (carme_runtime.horovod)",
            "torch",
            "torch_horovod",
            ("torch",),
            "carme_runtime.horovod",
        ),
        Contestant(
            "horovod",
            "PyTorch (Horovod)",
            "horovod",
            "torch_horovod",
            ("torch", "horovod"),
            "horovod.torch",
            environment=_PATIENT,
            is_restless=True,
        ),
        Contestant(
            "horovod-tensorflow",
            "TensorFlow (Horovod)",
            "horovod",
            "tensorflow_horovod",
            ("tensorflow", "tf_keras", "horovod"),
            environment={"TF_USE_LEGACY_KERAS": "1"} | _PATIENT,
            is_restless=True,
        ),
        Contestant(
            "tensorflow",
            "TensorFlow (MultiWorkerMirroredStrategy)",
            "tensorflow",
            "tensorflow_mirrored",
            ("tensorflow", "tf_keras"),
        ),
        Contestant("jax", "JAX (shard_map)", "jax", "jax_shards", ("jax",)),
        Contestant(
            "mxnet",
            "MXNet Gluon (kvstore dist_sync)",
            "mxnet",
            "mxnet_gluon",
            ("mxnet",),
            "dist_sync",
            has_servers=True,
        ),
    )
}
