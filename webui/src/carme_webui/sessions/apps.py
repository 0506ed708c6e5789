"""The Django app of sessions."""

from django.apps import AppConfig


class SessionsConfig(AppConfig):
    name = "carme_webui.sessions"
    # Django's own logins have the label "sessions".
    label = "notebooks"
