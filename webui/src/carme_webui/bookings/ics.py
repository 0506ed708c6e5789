"""Bookings as an iCalendar feed (RFC 5545), at an address that only its owner knows."""

from collections.abc import Iterable
from datetime import UTC, datetime

from django.conf import settings
from django.core.signing import Signer
from django.utils.crypto import constant_time_compare

from carme.bookings import BookingState
from carme_webui.accounts.models import User
from carme_webui.bookings.models import Booking, Feed

__all__ = ["calendar_text", "owner_of", "renew", "secret_of"]

_SALT = "carme_webui.bookings.feed"
_LINE = 75  # octets; longer ones are folded


def secret_of(user: User) -> str:
    """The secret part of the address; nothing that opens it is stored."""
    feed, _created = Feed.objects.get_or_create(owner=user)
    return _secret(user, feed.number)


def renew(user: User) -> None:
    """Give the feed another address; the old one stops working."""
    feed, _created = Feed.objects.get_or_create(owner=user)
    feed.number += 1
    feed.save()


def owner_of(username: str, secret: str) -> User | None:
    """Whose feed this is; None when the secret is not that of an active user's."""
    feed = (
        Feed.objects.select_related("owner").filter(owner__username=username, owner__is_active=True).first()
    )
    # As much is computed for a name that does not exist.
    right = _secret(feed.owner, feed.number) if feed else Signer(salt=_SALT).signature(username)
    same = constant_time_compare(right, secret)
    return feed.owner if feed and same else None


def _secret(user: User, number: int) -> str:
    return Signer(salt=_SALT).signature(f"{user.pk}:{number}")


def calendar_text(rows: Iterable[Booking], now: datetime) -> str:
    """The feed's text."""
    site = settings.SITE.site
    lines = [
        *["BEGIN:VCALENDAR", "VERSION:2.0", "PRODID:-//Carme//Bookings//EN", "CALSCALE:GREGORIAN"],
        f"X-WR-CALNAME:{_escaped(site.name)}",
    ]
    for row in rows:
        requested = row.state == BookingState.REQUESTED
        lines += [
            *["BEGIN:VEVENT", f"UID:{row.name}@{site.url.partition('://')[2].partition(':')[0]}"],
            *[f"DTSTAMP:{_moment(now)}", f"DTSTART:{_moment(row.start)}", f"DTEND:{_moment(row.end)}"],
            f"SUMMARY:{_escaped(row.heading)}",
            f"DESCRIPTION:{_escaped(_description(row))}",
            f"URL:{site.url}{row.get_absolute_url()}",
            *["STATUS:TENTATIVE" if requested else "STATUS:CONFIRMED", "END:VEVENT"],
        ]
    lines.append("END:VCALENDAR")
    return "".join(f"{_folded(line)}\r\n" for line in lines)


def _description(row: Booking) -> str:
    return f"{row.label}. {row.gpus} x {row.gpu_type} on {', '.join(row.node_names)}"


def _moment(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")


def _escaped(text: str) -> str:
    for sign in "\\;,":
        text = text.replace(sign, f"\\{sign}")
    return "".join(letter for letter in text if letter.isprintable())


def _folded(line: str) -> str:
    """In pieces that are short enough, no letter torn apart."""
    pieces, piece = [], ""
    for letter in line:
        if len((piece + letter).encode()) > _LINE - 1:
            pieces.append(piece)
            piece = ""
        piece += letter
    return "\r\n ".join([*pieces, piece])
