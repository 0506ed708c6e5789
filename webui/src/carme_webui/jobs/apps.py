"""The Django app of jobs."""

from django.apps import AppConfig


class JobsConfig(AppConfig):
    name = "carme_webui.jobs"
    label = "jobs"
