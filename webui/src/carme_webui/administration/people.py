"""Taking in a new user in one step: account, association in Slurm, home, quotas, project."""

import secrets

from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from carme.broker import BrokerClient
from carme.errors import CarmeError, InvalidRequest
from carme_webui.accounts.directory import unix_name
from carme_webui.accounts.models import User
from carme_webui.projects.models import Membership, Project
from carme_webui.projects.services import keep

__all__ = ["onboard"]


def onboard(
    by: str, name: str, email: str, project: Project | None, broker: BrokerClient
) -> tuple[User, str, list[str]]:
    """Make all that a user needs; what is there already stays, so it may be requested again.

    Args:
        by: Who asks for it.
        name: The Unix account's name; that account must be there.

    Returns:
        The user, the first password (empty where the account was there), and what had to be done.

    Raises:
        InvalidRequest: The name or address is none.
        CarmeError: There is no such Unix account, or Slurm refuses; then nothing is left over.
    """
    name = unix_name(name)
    user = User.objects.filter(username=name).first()
    password = ""
    created = user is None
    if user is None:
        password = secrets.token_urlsafe(12)
        user = User(username=name, email=email)
        user.set_password(password)
        try:
            user.full_clean()
        except ValidationError as error:
            field, sentences = next(iter(error.message_dict.items()))
            raise InvalidRequest(
                sentences[0], _("Correct it."), field={"username": "name"}.get(field, field)
            ) from None
    # First what can fail: an account without a Unix account could do nothing.
    done = broker.enrol(name, user=by)
    user.enrolled = timezone.now()
    if created:
        user.save()
        done = [_("created the portal account"), *done]
    else:
        user.save(update_fields=["enrolled"])
    if project is not None:
        with transaction.atomic():
            member, joined = Membership.objects.get_or_create(project=project, user=user)
        if joined:
            try:
                keep(project, broker, by, undo=member.delete)
            except CarmeError:
                if created:
                    user.delete()
                raise
            done.append(_("added to the project %s") % project.name)
    return user, password, done
