"""The second factor: app, passkeys and recovery codes are allauth's; what is the site's own is here."""

import base64
import hashlib

from allauth.mfa.adapter import DefaultMFAAdapter
from allauth.mfa.models import Authenticator
from cryptography.fernet import Fernet
from django.conf import settings
from django.contrib.auth.base_user import AbstractBaseUser
from django.utils.translation import gettext as _

__all__ = ["SecondFactorAdapter", "remove_second_factor"]


def _box() -> Fernet:
    """What secrets are closed with: a key of the portal's own, that is in no backup of the database."""
    key = hashlib.sha256(b"carme second factor\0" + settings.SECRET_KEY.encode()).digest()
    return Fernet(base64.urlsafe_b64encode(key))


class SecondFactorAdapter(DefaultMFAAdapter):
    """Secrets of apps and recovery codes are not readable in the database, and bear the site's name."""

    def get_totp_issuer(self) -> str:
        return settings.SITE.site.name

    def _get_site_name(self) -> str:
        return settings.SITE.site.name

    def _get_user_identifier(self, user: AbstractBaseUser) -> str:
        return user.get_username()

    def encrypt(self, text: str) -> str:
        return _box().encrypt(text.encode()).decode()

    def decrypt(self, encrypted_text: str) -> str:
        return _box().decrypt(encrypted_text.encode()).decode()

    def generate_authenticator_name(self, user: AbstractBaseUser, type: Authenticator.Type) -> str:
        number = Authenticator.objects.filter(user_id=user.pk, type=type).count() + 1
        return _("Passkey %d") % number


def remove_second_factor(user: AbstractBaseUser) -> int:
    """Take the second factor off an account whose owner has lost it; how many were there."""
    return Authenticator.objects.filter(user_id=user.pk).delete()[0]
