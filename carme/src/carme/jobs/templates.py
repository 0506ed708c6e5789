"""Batch jobs to begin with, one for each framework: for `carme submit --template` and the job form."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

__all__ = ["TEMPLATES", "Template"]


class Template(NamedTuple):
    """How `carme-run` starts a framework's programs, and what such a job mostly asks for.

    Args:
        title: The framework's name.
        backend: For `carme-run --backend`.
        program: An example of what is run, as carme-run wants it.
        gpus_per_node: GPUs.
        nodes: Nodes.
        minutes: Time that the portal's form begins with.
    """

    title: str
    backend: str
    program: str = "train.py"
    gpus_per_node: int = 1
    nodes: int = 2
    minutes: int = 60

    def command(self, words: Sequence[str]) -> list[str]:
        """What starts the program with the words `words`: a script, or `--` and a program."""
        return ["carme-run", "--backend", self.backend, *words]

    def image(self, names: Collection[str], default: str) -> str:
        """The image that its jobs begin with: one with the framework's name, where there is one.

        Args:
            names: Of the site's images.
            default: The image of sessions that name none.
        """
        return self.backend if self.backend in names else default

    @property
    def script(self) -> str:
        """A batch script, for its author to change."""
        return (
            "#!/bin/bash\nset -eu\n\ncd ~/my-project\n"
            "# Over all nodes and GPUs of the job; with --dry-run it says how\n"
            f"carme-run --backend {self.backend} {self.program}\n"
        )


TEMPLATES = {
    template.backend: template
    for template in (
        Template("PyTorch", "torch"),
        Template("TensorFlow", "tensorflow"),
        Template("JAX", "jax"),
        Template("Accelerate", "accelerate"),
        Template("Lightning", "lightning"),
        Template("DeepSpeed", "deepspeed"),
        Template("MXNet", "mxnet"),
        Template("Dask", "dask", "analyse.py", gpus_per_node=0),
        Template("Ray", "ray", "analyse.py", gpus_per_node=0),
        Template("Horovod", "horovod"),
        Template("MPI", "mpi", "-- ./simulate", gpus_per_node=0),
        Template("GPI-2", "gaspi", "-- ./simulate", gpus_per_node=0),
    )
}
