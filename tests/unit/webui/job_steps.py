"""What tests do to jobs: have the portal read what the broker knows."""

from datetime import timedelta
from typing import Any

from django.utils import timezone

from carme_webui.cluster import broker as site_broker
from carme_webui.jobs.mirror import follow
from carme_webui.jobs.models import Job, Mirror

from .fake_broker import NOW, FakeBroker, make_job


def states() -> dict[int, str]:
    return dict(Job.objects.values_list("id", "state"))


def read_changes() -> bool:
    """Read what has changed at the broker."""
    return follow(site_broker())


def sweep_is_due() -> None:
    Mirror.objects.update(swept=timezone.now() - timedelta(hours=1))


def array(broker: FakeBroker, number: int = 50, **states: str) -> None:
    """An array of ten tasks; those from `len(states)` on wait."""
    for task, state in enumerate(states.values()):
        reported: dict[str, Any] = {"state": state, "ended": None if state == "RUNNING" else NOW}
        broker.put(
            make_job(number + 1 + task, array_id=number, task=task, kind="batch", name="sweep", **reported)
        )
    rest = f"{len(states)}-9%2"
    broker.put(make_job(number, state="PENDING", array_id=number, tasks=rest, kind="batch", name="sweep"))
