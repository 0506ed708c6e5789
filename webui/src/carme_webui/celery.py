"""The portal's background work: `celery -A carme_webui.celery worker` and `... beat`."""

import logging
import os
from typing import Any

from celery import Celery
from kombu.exceptions import OperationalError

__all__ = ["app", "run_soon"]

logger = logging.getLogger(__name__)

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "carme_webui.settings")

app = Celery("carme_webui")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()


def run_soon(task: Any, *arguments: Any) -> None:
    """Have the worker run a task; while Redis is away, this process runs it, and the page waits for it.

    Args:
        task: A task of Celery's.
        arguments: The task's, which JSON can hold.
    """
    from carme_webui.notifier import notifier

    # Celery itself would try for seconds.
    if notifier.redis_answers():
        try:
            task.apply_async(arguments, retry=False)
            return
        except OperationalError as error:
            logger.warning("The worker cannot be reached: %s", error)
    task.apply(arguments)
