"""The images that jobs run in."""

from carme.images.catalogue import Image, ImageCatalogue

__all__ = ["Image", "ImageCatalogue"]
