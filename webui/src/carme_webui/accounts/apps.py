"""The Django app of accounts."""

from django.apps import AppConfig


class AccountsConfig(AppConfig):
    name = "carme_webui.accounts"
    label = "accounts"
