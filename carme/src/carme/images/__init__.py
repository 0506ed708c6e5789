"""The images that jobs run in, and the apps in them."""

from carme.images.apps import app_path
from carme.images.catalogue import Image, ImageCatalogue

__all__ = ["Image", "ImageCatalogue", "app_path"]
