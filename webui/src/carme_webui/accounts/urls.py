"""Addresses for signing in and out."""

from allauth.account import views
from django.urls import path

from carme_webui.accounts import outside
from carme_webui.accounts.login import sign_out

urlpatterns = [
    path("login/", views.login, name="account_login"),
    path("logout/", sign_out, name="account_logout"),
    path("outside/", outside.begin, name="outside-begin"),
    path("outside/back/", outside.end, name="outside-end"),
    path("inactive/", views.account_inactive, name="account_inactive"),
    path("reauthenticate/", views.reauthenticate, name="account_reauthenticate"),
]
