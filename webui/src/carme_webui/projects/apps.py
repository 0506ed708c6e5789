"""The Django app of projects."""

from django.apps import AppConfig


class ProjectsConfig(AppConfig):
    name = "carme_webui.projects"
    label = "projects"
