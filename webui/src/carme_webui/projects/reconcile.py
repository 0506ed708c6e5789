"""Reconciles projects with Slurm's accounts, whatever was away in between, and reads what is used.

Each round works out the changes anew; two rounds at once do no harm.
"""

import logging

from django.utils import timezone
from django.utils.translation import gettext as _

from carme.broker import BrokerClient
from carme.errors import CarmeError
from carme.projects import ProjectAccount, changes
from carme_webui.profile.kinds import Kind
from carme_webui.profile.notices import notify_all
from carme_webui.projects.models import Project
from carme_webui.projects.services import keep

__all__ = ["reconcile"]

logger = logging.getLogger(__name__)

#: Per cent of the GPU-hours at which managers are notified; the highest first.
WARNED_AT = (100, 80)


def reconcile(broker: BrokerClient) -> bool:
    """One round.

    Returns:
        Whether Slurm could be seen. If not, nothing was done.
    """
    try:
        accounts = {each.account: each for each in broker.projects()}
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
    """Remember what is used, where that has changed."""
    assert there is not None
    used = there.use.model_dump()
    if project.used != used or project.granted is None or project.problem:
        saved = project.granted or timezone.now()
        Project.objects.filter(pk=project.pk).update(used=used, granted=saved, problem="")
        _warn(project, there.use.gpu_hours)


def _warn(project: Project, hours: float) -> None:
    """Notify its managers, once for each limit, when little of the GPU-hours is left, and when nothing is."""
    if not project.gpu_hours:
        return
    for share in WARNED_AT:
        if hours * 100 < share * project.gpu_hours:
            continue
        managers = [membership.user for membership in project.memberships.all() if membership.manager]
        notify_all(
            managers,
            lambda: (
                _("The project “%(project)s” has used %(used)d of its %(most)d GPU-hours.")
                % {"project": project.title, "used": hours, "most": project.gpu_hours}
            ),
            Kind.QUOTA,
            key=f"quota:{project.name}:{share}:{project.gpu_hours}",
            link=project.get_absolute_url(),
        )
        return
