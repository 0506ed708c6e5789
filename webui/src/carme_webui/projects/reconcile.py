"""Makes projects and Slurm's accounts agree, whatever was away in between, and reads what is used.

Each round works out anew what is to be done; two rounds at once do no harm.
"""

import logging

from django.utils import timezone

from carme.broker import BrokerClient
from carme.errors import CarmeError
from carme.projects import ProjectAccount, changes
from carme_webui.projects.desk import keep
from carme_webui.projects.models import Project

__all__ = ["reconcile"]

logger = logging.getLogger(__name__)


def reconcile(broker: BrokerClient) -> bool:
    """One round.

    Returns:
        Whether Slurm could be seen. If not, nothing was done.
    """
    try:
        accounts = {one.account: one for one in broker.projects()}
    except CarmeError as error:
        logger.warning("Projects and Slurm's accounts are compared later: %s", error)
        return False
    for project in Project.objects.prefetch_related("memberships"):
        there = accounts.get(project.account)
        if changes(project.grant, there):
            keep(project, broker, "carme-portal")
        else:
            _note(project, there)
    return True


def _note(project: Project, there: ProjectAccount | None) -> None:
    """Remember what is used, where that is news."""
    assert there is not None
    used = there.use.model_dump()
    if project.used != used or project.kept is None or project.problem:
        kept = project.kept or timezone.now()
        Project.objects.filter(pk=project.pk).update(used=used, kept=kept, problem="")
