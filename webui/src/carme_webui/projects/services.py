"""What can be done with projects: the rules, the row, and the account in Slurm, in this order.

The row is written first, then the request is sent to Slurm. If Slurm refuses, the row becomes what it was; if
it cannot be reached just now, the row stays and the reconciler sends the request.
"""

import logging
from collections.abc import Callable
from typing import Any

from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _

from carme.broker import BrokerClient
from carme.errors import BrokerUnavailable, CarmeError, Denied, InvalidRequest, NotFound, SlurmError
from carme.jobs import Cluster
from carme.wording import listing
from carme_webui.accounts.models import User
from carme_webui.profile.kinds import Kind
from carme_webui.profile.notices import notify
from carme_webui.projects.models import Invitation, Membership, Project

__all__ = [
    *("LIMITS", "MOST", "answer", "choices", "close", "create", "invite", "is_manager", "keep", "limit"),
    *("manager_of", "remove", "reopen", "require_known", "require_manager", "set_manager", "withdraw"),
]

logger = logging.getLogger(__name__)

#: The largest number of anything.
MOST = 1_000_000
#: The fields by which admins limit a project.
LIMITS = ("title", "partitions", "gpu_types", "gpus", "nodes", "jobs", "minutes", "gpu_hours")


def is_manager(user: User, project: Project) -> bool:
    """Whether a user may say who is in a project: its managers and the admins."""
    return user.is_staff or project.memberships.filter(user=user, manager=True).exists()


def require_manager(user: User, project: Project) -> None:
    """Raises Denied."""
    if not is_manager(user, project):
        raise Denied(_("Only managers of the project may do this."), _("Ask one of them."))


def _require_admin(user: User) -> None:
    if not user.is_staff:
        raise Denied(_("Only administrators may do this."), _("Ask one of them."))


def keep(project: Project, broker: BrokerClient, by: str, undo: Callable[[], Any] | None = None) -> None:
    """Have Slurm grant what the row says. When nobody answers, the reconciler does it later.

    Args:
        by: Whose change it is.
        undo: Makes the row what it was before.

    Raises:
        CarmeError: Slurm or the broker refuses.
    """
    try:
        state = broker.grant(project.grant, user=by)
    except CarmeError as error:
        away = isinstance(error, BrokerUnavailable) or (
            isinstance(error, SlurmError) and error.code == "slurm-away"
        )
        if not away and undo is not None:
            undo()
            raise
        Project.objects.filter(pk=project.pk).update(granted=None, problem=error.text)
        logger.warning("The project %s is granted later: %s", project.name, error)
    else:
        # Who has left and still has jobs is taken out when these have ended.
        saved = None if set(state.members) - set(project.grant.members) else timezone.now()
        Project.objects.filter(pk=project.pk).update(granted=saved, problem="", used=state.use.model_dump())


def create(by: User, name: str, title: str, manager: User, broker: BrokerClient) -> Project:
    """Make a project with its first manager.

    Raises:
        Denied: Only admins may.
        InvalidRequest: The name is none, or taken.
        CarmeError: Slurm refuses.
    """
    _require_admin(by)
    project = Project(name=name, title=title)
    try:
        project.full_clean()
    except ValidationError as error:
        field, sentences = next(iter(error.message_dict.items()))
        raise InvalidRequest(sentences[0], _("Choose another one."), field=field) from None
    with transaction.atomic():
        project.save()
        Membership.objects.create(project=project, user=manager, manager=True)
    keep(project, broker, by.username, undo=project.delete)
    return project


def manager_of(name: str) -> User:
    """The user who is to manage a project. Raises InvalidRequest."""
    user = User.objects.filter(username=name, is_active=True).first()
    if user is None:
        raise InvalidRequest(
            _("There is no such user."), _("Enter that person's sign-in name."), field="manager"
        )
    return user


def choices(project: Project, cluster: Cluster | None) -> tuple[list[str], list[str]]:
    """The partitions and the types of GPUs that a project can be limited to or in: those that there are, and
    those that it names already."""
    partitions = {partition.name for partition in cluster.partitions} if cluster else set()
    kinds = {kind for node in cluster.nodes for kind in node.gpus} if cluster else set()
    return sorted(partitions | set(project.partitions)), sorted(kinds | set(project.gpu_types))


def require_known(project: Project, values: dict[str, Any], cluster: Cluster) -> None:
    """Raises InvalidRequest when limits name a partition or a type of GPU that there is not."""
    partitions, kinds = choices(project, cluster)
    for field, known in (("partitions", partitions), ("gpu_types", kinds)):
        for name in values.get(field, ()):
            if name not in known:
                raise InvalidRequest(
                    _("There is no %r.") % name[:40], _("There are: %s.") % listing(known), field=field
                )


def limit(by: User, project: Project, values: dict[str, Any], broker: BrokerClient) -> None:
    """Change what a project may use. `values`: some of LIMITS. Raises as `create` does."""
    _require_admin(by)
    before = {name: getattr(project, name) for name in LIMITS}

    def write(values: dict[str, Any]) -> None:
        for name in LIMITS:
            setattr(project, name, values.get(name, before[name]))
        project.save()

    write(values)
    keep(project, broker, by.username, undo=lambda: write(before))


def invite(by: User, project: Project, name: str) -> Invitation:
    """Ask somebody to join.

    Raises:
        Denied: The caller is not a manager.
        InvalidRequest: There is no such user, or they are in it, or invited, already.
    """
    require_manager(by, project)
    user = User.objects.filter(username=name, is_active=True).first()
    if user is None:
        raise InvalidRequest(
            _("There is no user %r here.") % name[:40],
            _("Enter that person's sign-in name."),
            field="user",
        )
    if project.memberships.filter(user=user).exists():
        raise InvalidRequest(_("%s is a member already.") % name, _("No action needed."), field="user")
    try:
        with transaction.atomic():
            invitation = Invitation.objects.create(project=project, user=user, by=by)
    except IntegrityError:
        raise InvalidRequest(
            _("%s has been invited already.") % name, _("Wait for the answer."), field="user"
        ) from None
    notify(
        user,
        lambda: (
            _("%(who)s invites you to the project “%(project)s”.")
            % {"who": by.username, "project": project.title}
        ),
        Kind.PROJECT,
        link=reverse("projects"),
    )
    return invitation


def withdraw(by: User, invitation: Invitation) -> None:
    """Take an invitation back. Raises Denied."""
    require_manager(by, invitation.project)
    invitation.delete()


def answer(user: User, invitation: Invitation, yes: bool, broker: BrokerClient) -> None:
    """Join, or do not.

    Raises:
        Denied: Somebody else is invited.
        CarmeError: Slurm refuses; then the invitation stays.
    """
    if invitation.user != user:
        raise Denied(_("This invitation is for somebody else."))
    project = invitation.project
    with transaction.atomic():
        if not Invitation.objects.filter(pk=invitation.pk).delete()[0]:
            raise NotFound(_("This invitation was withdrawn."), _("Ask a manager of the project."))
        if not yes:
            return
        member, _created = Membership.objects.get_or_create(project=project, user=user)

    def undo() -> None:
        member.delete()
        Invitation.objects.get_or_create(project=project, user=user, defaults={"by": invitation.by})

    keep(project, broker, user.username, undo)


def set_manager(by: User, member: Membership, manager: bool) -> None:
    """Make a member a manager, or a manager a member. Raises Denied, InvalidRequest."""
    require_manager(by, member.project)
    with transaction.atomic():
        if not manager:
            _require_another_manager(member)
        member.manager = manager
        member.save()


def remove(by: User, member: Membership, broker: BrokerClient) -> None:
    """Take somebody out of a project; everybody may leave. Jobs that run go on until they end.

    Raises:
        Denied: The caller is not a manager and somebody else.
        InvalidRequest: It is the last manager.
    """
    project = member.project
    if member.user != by:
        require_manager(by, project)
    with transaction.atomic():
        _require_another_manager(member)
        member.delete()
    keep(project, broker, by.username)


def _require_another_manager(member: Membership) -> None:
    """A project without a manager could only be helped by an admin."""
    managers = Membership.objects.select_for_update(of=("self",)).filter(project=member.project, manager=True)
    if member.manager and [manager.pk for manager in managers] == [member.pk]:
        raise InvalidRequest(
            _("%s is the only manager of this project.") % member.user.username,
            _("Make somebody else a manager first."),
        )


def close(by: User, project: Project, broker: BrokerClient) -> None:
    """Take no more jobs of a project; its members and its numbers stay. Raises Denied."""
    _require_admin(by)
    project.closed = timezone.now()
    project.save()
    keep(project, broker, by.username)


def reopen(by: User, project: Project, broker: BrokerClient) -> None:
    """Undo `close`. Raises Denied."""
    _require_admin(by)
    project.closed = None
    project.save()
    keep(project, broker, by.username)
