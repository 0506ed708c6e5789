"""The Django app of announcements."""

from django.apps import AppConfig


class AnnouncementsConfig(AppConfig):
    name = "carme_webui.announcements"
    label = "announcements"
