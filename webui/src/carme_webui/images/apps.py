"""The Django app of users' own images."""

from django.apps import AppConfig


class ImagesConfig(AppConfig):
    name = "carme_webui.images"
    label = "images"
