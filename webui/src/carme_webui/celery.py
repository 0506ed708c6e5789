"""The portal's background work: `celery -A carme_webui.celery worker` and `... beat`."""

import os

from celery import Celery

__all__ = ["app"]

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "carme_webui.settings")

app = Celery("carme_webui")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
