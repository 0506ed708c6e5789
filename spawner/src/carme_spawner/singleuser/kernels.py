"""The kernel of the image, under a name that says which image it is; nothing is written into the home."""

import json
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from jupyter_client.kernelspec import NATIVE_KERNEL_NAME, KernelSpec, KernelSpecManager
from jupyter_core.paths import jupyter_data_dir

__all__ = ["ImageKernels", "image_name"]

#: What an image says of itself, where Apptainer puts it.
LABELS = Path("/.singularity.d/labels.json")
TITLE = "carme.title"
#: The package whose version belongs to a title.
FRAMEWORKS = {"PyTorch": "torch", "TensorFlow": "tensorflow", "JAX": "jax"}


@cache
def image_name(labels: Path = LABELS) -> str:
    """The image's title, with the version of the framework that gives it its name: `PyTorch 2.9`.

    Empty where there is no image, or where it has no title, as many of users' own.
    """
    try:
        title = json.loads(labels.read_text(encoding="utf-8"))[TITLE]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if not isinstance(title, str):
        return ""
    title = " ".join(title.split())[:60]
    try:
        number = version(FRAMEWORKS[title])
    except (KeyError, PackageNotFoundError):
        return title
    return f"{title} {'.'.join(number.split('.')[:2])}"


class ImageKernels(KernelSpecManager):
    """Finds what `KernelSpecManager` finds; the image's own kernel is called `Python 3 · PyTorch 2.9 image`.

    A kernel of the same name in the user's home is the user's, and stays as it is.
    """

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        """The kernel's specification. Raises NoSuchKernel."""
        spec = super().get_kernel_spec(kernel_name)
        name = image_name()
        own = Path(spec.resource_dir).is_relative_to(jupyter_data_dir())
        if name and kernel_name.lower() == NATIVE_KERNEL_NAME and not own:
            spec.display_name = f"Python 3 · {name} image"
        return spec
