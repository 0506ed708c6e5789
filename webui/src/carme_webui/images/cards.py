"""What an image is, in a line or two of the choice of images: what is inside, and when it was built."""

from dataclasses import dataclass
from datetime import datetime

from django.urls import reverse

from carme.images import Image, is_own

__all__ = ["Card", "card", "unreadable_card"]

#: What people look for in an image, the most important first.
KNOWN = (
    *("torch", "tensorflow", "keras", "jax", "transformers", "lightning", "horovod", "scikit-learn"),
    *("onnxruntime", "numpy", "pandas", "jupyterlab"),
)
MOST = 3


@dataclass(frozen=True)
class Card:
    """An image in short.

    Attributes:
        title: What users call it.
        description: What its builder says of it.
        inside: Its most important packages with their versions.
        further: How many packages it has besides.
        built: When.
        address: The page that names all of them.
    """

    title: str
    description: str = ""
    inside: tuple[tuple[str, str], ...] = ()
    further: int = 0
    built: datetime | None = None
    address: str = ""


def card(image: Image) -> Card:
    """The card of an image."""
    important = [name for name in KNOWN if name in image.packages] or list(image.packages)
    shown = important[:MOST]
    return Card(
        title=image.title,
        description=image.description,
        inside=tuple((name, image.packages[name]) for name in shown),
        further=len(image.packages) - len(shown),
        built=image.built,
        address=reverse("image" if is_own(image.name) else "image-of-site", args=[image.name]),
    )


def unreadable_card(name: str) -> Card:
    """The card of an image that cannot be read; the check says why."""
    return Card(name)
