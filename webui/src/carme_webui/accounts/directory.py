"""Signing in with an account of the site's LDAP directory.

ldap3 is plain Python: the head needs no compiler and no LDAP library for it.
"""

import logging
import pwd
import re
import ssl
from dataclasses import dataclass, replace
from typing import Any

import ldap3
from django.conf import settings
from django.contrib.auth.backends import ModelBackend
from django.forms import ValidationError
from django.http import HttpRequest
from django.utils.translation import gettext as _
from ldap3.core.exceptions import LDAPException, LDAPInvalidCredentialsResult
from ldap3.utils.conv import escape_filter_chars

from carme.accounts import is_account_name
from carme.config.settings import LdapSettings
from carme.errors import ConfigError
from carme_webui.accounts.models import User
from carme_webui.accounts.tasks import enrol
from carme_webui.celery import run_soon

__all__ = ["Entry", "LdapBackend", "enrol_soon", "look_up", "unix_name"]

logger = logging.getLogger(__name__)

SECONDS = 5  # until a directory that does not answer is given up
#: The attributes that the filter compares with the name that was typed.
_COMPARED = re.compile(r"\(([A-Za-z][A-Za-z0-9-]*)=\{name\}\)")
_GROUP = "(|(member={dn})(uniqueMember={dn})(memberUid={name}))"


@dataclass(frozen=True)
class Entry:
    """What the directory says of somebody whose password was right."""

    name: str
    email: str
    full_name: str
    admin: bool


def look_up(name: str, password: str, site: LdapSettings, secret: str) -> Entry | None:
    """Check a password.

    Args:
        secret: The password of `bind_dn`.

    Returns:
        With the name as the directory spells it: most of them take `Anna` for `anna`. None when there is no
        such user, or more than one, or the password is wrong.

    Raises:
        LDAPException: The directory does not answer, or does not let us ask.
    """
    # An empty password would be no proof: servers take it for a question without a name (RFC 4513, 5.1.2).
    if not is_account_name(name) or not password:
        return None
    server = _server(site)
    with _connection(server, site.bind_dn or None, secret) as asking:
        compared = _COMPARED.findall(site.filter)
        attributes = [site.email, site.full_name, *compared]
        wanted = site.filter.replace("{name}", escape_filter_chars(name))
        asking.search(site.base, wanted, attributes=attributes, size_limit=2)
        found = [each for each in asking.response or [] if each["type"] == "searchResEntry"]
        if len(found) != 1:
            return None
        dn, values = found[0]["dn"], found[0]["attributes"]
        spellings = [value for attribute in compared for value in _all(values.get(attribute))]
        fitting = (value for value in spellings if is_account_name(value) and value.lower() == name.lower())
        name = next(fitting, name)
        try:
            _connection(server, dn, password).unbind()
        except LDAPInvalidCredentialsResult:
            return None
        admin = False
        if site.admin_group:
            member = _GROUP.format(dn=escape_filter_chars(dn), name=escape_filter_chars(name))
            asking.search(site.admin_group, member, search_scope=ldap3.BASE, attributes=["cn"])
            admin = any(each["type"] == "searchResEntry" for each in asking.response or [])
    return Entry(name, _first(values.get(site.email)), _first(values.get(site.full_name)), admin)


def _server(site: LdapSettings) -> ldap3.Server:
    file = str(site.certificates) if site.certificates else None  # None: the system's authorities
    tls = ldap3.Tls(
        validate=ssl.CERT_REQUIRED,
        version=ssl.PROTOCOL_TLS_CLIENT,
        ca_certs_file=file,
    )
    return ldap3.Server(site.url, tls=tls, connect_timeout=SECONDS, get_info=ldap3.NONE)


def _connection(server: ldap3.Server, dn: str | None, password: str) -> ldap3.Connection:
    """A connection that has proved who it is; no password is sent before it is encrypted."""
    plain = not server.ssl
    return ldap3.Connection(
        server,
        user=dn,
        password=password if dn else None,
        auto_bind=ldap3.AUTO_BIND_TLS_BEFORE_BIND if plain else ldap3.AUTO_BIND_NO_TLS,
        read_only=True,
        raise_exceptions=True,
        receive_timeout=SECONDS,
    )


def _first(value: Any) -> str:
    return next(iter(_all(value)), "")


def _all(value: Any) -> list[str]:
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]


class LdapBackend(ModelBackend):
    """Asks the directory, and keeps an account of the portal for each of its users who has signed in.

    An account with a password of its own is the portal's; the directory cannot take it over.
    """

    def authenticate(
        self, request: HttpRequest | None, username: str | None = None, password: str | None = None, **_: Any
    ) -> User | None:
        name = unix_name(username or "")
        if _is_of_the_portal(User.objects.filter(username=name).first()):
            return None
        try:
            secret = settings.SITE.secret("ldap-password") if settings.SITE.ldap.bind_dn else ""
            entry = look_up(name, password or "", settings.SITE.ldap, secret)
        except (LDAPException, ConfigError, OSError) as error:
            logger.error("The directory %s cannot be queried: %s", settings.SITE.ldap.url, error)
            raise ValidationError(_away()) from None
        if entry is None:
            return None
        entry = replace(entry, name=unix_name(entry.name))
        user = User.objects.filter(username=entry.name).first()
        if _is_of_the_portal(user):
            return None
        return self._account(user, entry) if user is None or self.user_can_authenticate(user) else None

    def _account(self, user: User | None, entry: Entry) -> User:
        new = user is None
        user = user or User(username=entry.name)
        if new:
            user.set_unusable_password()
        first, _space, last = entry.full_name.partition(" ")
        reported = {"email": entry.email[:254], "first_name": first[:150], "last_name": last[:150]}
        if settings.SITE.ldap.admin_group:
            reported |= {"is_staff": entry.admin, "is_superuser": entry.admin}
        if new or any(getattr(user, field) != value for field, value in reported.items()):
            for field, value in reported.items():
                setattr(user, field, value)
            user.save()
        enrol_soon(user)
        return user


def _is_of_the_portal(user: User | None) -> bool:
    return user is not None and user.has_usable_password()


def unix_name(name: str) -> str:
    """The name as Unix has it: a directory takes `Anna` for `anna`, and both must be one account here."""
    try:
        return pwd.getpwnam(name).pw_name
    except (KeyError, ValueError):
        return name


def _away() -> str:
    return _("The user directory does not answer, so its users cannot sign in. Try again in a moment.")


def enrol_soon(user: User) -> None:
    """Give who signs in an association in Slurm and a home, in the background.

    It is done once: what an administrator takes away later stays away. What failed, since Slurm was away, is
    tried again when the user signs in again.
    """
    if user.enrolled is None:
        run_soon(enrol, user.username)
