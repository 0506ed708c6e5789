"""Sending what is due by mail, never twice.

A mail is marked before it is sent, by its sender, and tried again only where the server reported that it
did not take it. Where nobody knows, because the worker or the connection ended in between, the mark stays:
that mail may be lost, and it is not sent a second time; the sentence is on the user's pages all the same.
"""

import logging
import smtplib
from datetime import timedelta

from django.conf import settings
from django.core.mail import EmailMessage, get_connection
from django.core.mail.backends.base import BaseEmailBackend
from django.utils import timezone, translation
from django.utils.translation import gettext as _

from carme_webui.accounts.language import language_of
from carme_webui.profile.models import Mailing, Notice

__all__ = ["send_due"]

logger = logging.getLogger(__name__)

#: At most so many in one round; the rest is sent in the next.
ROUND = 100
#: Minutes until the next try, after each failure; then it is given up.
AGAIN = (1, 5, 15, 60, 240, 720)


def send_due() -> int:
    """Send what is due; two rounds at once do no harm.

    Returns:
        How many were sent.
    """
    if not settings.SITE.mail.server:
        return 0
    due = Notice.objects.filter(mailing=Mailing.DUE, due__lte=timezone.now()).order_by("due", "pk")
    numbers = list(due.values_list("pk", flat=True)[:ROUND])
    if not numbers:
        return 0
    connection = get_connection()
    try:
        connection.open()
    except (OSError, smtplib.SMTPException) as error:
        # Nothing is lost or counted: the next round asks again.
        logger.warning("The mail server does not take mails: %s", error)
        return 0
    try:
        return sum(_send(number, connection) for number in numbers)
    except (smtplib.SMTPServerDisconnected, OSError) as error:
        logger.warning("The mail server broke off, maybe after it had taken the mail: %s", error)
        return 0
    finally:
        connection.close()


def _send(number: int, connection: BaseEmailBackend) -> bool:
    """Send one, unless another worker has it; whether it was sent."""
    if not Notice.objects.filter(pk=number, mailing=Mailing.DUE).update(mailing=Mailing.BEING_SENT):
        return False
    notice = Notice.objects.select_related("user").get(pk=number)
    try:
        connection.send_messages([mail_of(notice)])
    except smtplib.SMTPServerDisconnected:
        raise
    except (smtplib.SMTPRecipientsRefused, smtplib.SMTPResponseException, ValueError) as error:
        if _is_permanent(error):
            logger.warning("The mail to %s is given up: %s", notice.user.username, error)
            _mark(notice, Mailing.REFUSED)
        else:
            _schedule_retry(notice, error)
        return False
    _mark(notice, Mailing.SENT)
    return True


def mail_of(notice: Notice) -> EmailMessage:
    """The mail: in the user's language, with a number by which servers know a mail that comes twice."""
    site = settings.SITE.site
    with translation.override(language_of(notice.user)):
        parts = [notice.text]
        if notice.link:
            parts.append(f"{site.url}{notice.link}")
        parts.append(
            _("You get this mail because of your notification settings at %(address)s.")
            % {"address": f"{site.url}/profile/"}
        )
    first = " ".join(notice.text.split())
    return EmailMessage(
        subject=f"{site.name}: {first if len(first) < 80 else first[:79] + '…'}",
        body="\n\n".join(parts) + "\n",
        to=[notice.user.email],
        headers={
            "Message-ID": f"<notice-{notice.pk}-{int(notice.created.timestamp())}@{_host(site.url)}>",
            "Auto-Submitted": "auto-generated",
        },
    )


def _host(url: str) -> str:
    return url.partition("://")[2].partition(":")[0]


def _is_permanent(error: Exception) -> bool:
    """Whether the server will say the same next time: codes of 500 and above (RFC 5321), or no address."""
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        return all(code >= 500 for code, _message in error.recipients.values())
    return isinstance(error, ValueError) or getattr(error, "smtp_code", 0) >= 500


def _schedule_retry(notice: Notice, error: Exception) -> None:
    if notice.tries >= len(AGAIN):
        logger.warning("The mail to %s is given up: %s", notice.user.username, error)
        _mark(notice, Mailing.REFUSED)
        return
    minutes = AGAIN[notice.tries]
    logger.warning("The mail to %s is tried again in %d minutes: %s", notice.user.username, minutes, error)
    Notice.objects.filter(pk=notice.pk).update(
        mailing=Mailing.DUE, tries=notice.tries + 1, due=timezone.now() + timedelta(minutes=minutes)
    )


def _mark(notice: Notice, mailing: Mailing) -> None:
    Notice.objects.filter(pk=notice.pk).update(mailing=mailing)
