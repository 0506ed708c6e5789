"""The images that jobs run in, and the apps in them."""

from carme.images.apps import app_path
from carme.images.catalogue import Image, ImageCatalogue
from carme.images.user_images import OWN_NAME, ImageFile, is_own, reference

__all__ = ["OWN_NAME", "Image", "ImageCatalogue", "ImageFile", "app_path", "is_own", "reference"]
