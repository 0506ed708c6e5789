"""Forms that take what a browser says of a passkey: whatever it sends, the answer is a sentence."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from allauth.mfa.adapter import get_adapter
from allauth.mfa.webauthn import forms
from cryptography.exceptions import InvalidSignature

__all__ = ["AddPasskey", "AuthenticatePasskey", "LoginPasskey", "ReauthenticatePasskey"]


@contextmanager
def _readable() -> Iterator[None]:
    """The library expects the fields, types and signatures that an honest browser sends."""
    try:
        yield
    except (AttributeError, IndexError, InvalidSignature, KeyError, TypeError, ValueError):
        raise get_adapter().validation_error("incorrect_code") from None


class AddPasskey(forms.AddWebAuthnForm):
    def clean(self) -> dict[str, Any]:
        with _readable():
            return super().clean()


class AuthenticatePasskey(forms.AuthenticateWebAuthnForm):
    def clean_credential(self) -> Any:
        with _readable():
            return super().clean_credential()


class LoginPasskey(forms.LoginWebAuthnForm):
    def clean_credential(self) -> Any:
        with _readable():
            return super().clean_credential()


class ReauthenticatePasskey(forms.ReauthenticateWebAuthnForm):
    def clean_credential(self) -> Any:
        with _readable():
            return super().clean_credential()
