"""The Django app of accounts."""

from django.apps import AppConfig
from django.utils.translation import get_language

from carme.translation import follow


class AccountsConfig(AppConfig):
    name = "carme_webui.accounts"
    label = "accounts"

    def ready(self) -> None:
        # Errors are reported in the language of the page that shows them.
        follow(get_language)
