"""Addresses of the page of API tokens."""

from django.urls import path

from carme_webui.api import pages

urlpatterns = [
    path("", pages.tokens, name="tokens"),
    path("<int:number>/revoke/", pages.revoke, name="token-revoke"),
]
