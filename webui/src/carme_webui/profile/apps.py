"""The Django app of profiles."""

from django.apps import AppConfig


class ProfileConfig(AppConfig):
    name = "carme_webui.profile"
    label = "profile"
