"""Addresses of the profile."""

from django.urls import include, path

from carme_webui.profile import views

urlpatterns = [
    path("", views.profile, name="profile"),
    path("read/", views.mark_read, name="notices-read"),
    path("appearance/", views.appearance, name="profile-appearance"),
    path("hints/<slug:name>/", views.dismiss, name="hint-dismiss"),
    path("notify/", views.notify, name="profile-notify"),
    path("password/", views.password, name="profile-password"),
    path("security/", include("allauth.mfa.urls")),
]
