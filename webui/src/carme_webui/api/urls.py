"""Addresses of the API."""

from django.urls import path

from carme_webui.api.v1 import urls

urlpatterns = [path("v1/", urls)]
