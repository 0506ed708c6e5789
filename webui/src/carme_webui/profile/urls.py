"""Addresses of the profile."""

from django.urls import include, path

from carme_webui.profile import views

urlpatterns = [
    path("", views.profile, name="profile"),
    path("security/", include("allauth.mfa.urls")),
]
