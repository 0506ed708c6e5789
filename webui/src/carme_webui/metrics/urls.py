"""Addresses of metrics; what follows `api/v1/` is Prometheus' own."""

from django.urls import path, re_path

from carme_webui.metrics import views

_QUESTION = r"api/v1/(?P<question>[a-zA-Z0-9_/]+)$"

urlpatterns = [
    path("sparks/", views.my_sparks, name="sparks"),
    re_path(rf"^mine/{_QUESTION}", views.of_mine, name="metrics-mine"),
    re_path(
        rf"^account/(?P<account>[A-Za-z0-9._-]{{1,64}})/{_QUESTION}", views.of_account, name="metrics-account"
    ),
    re_path(rf"^all/{_QUESTION}", views.of_all, name="metrics-all"),
]
