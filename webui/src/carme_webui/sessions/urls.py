"""Addresses of sessions."""

from django.urls import path, register_converter
from django.urls.converters import StringConverter

from carme_webui.sessions import views
from carme_webui.sessions.models import NAME_PATTERN


class SessionNameConverter(StringConverter):
    """The names that the portal gives."""

    regex = NAME_PATTERN


register_converter(SessionNameConverter, "session_name")

urlpatterns = [
    path("", views.dashboard, name="dashboard"),
    path("live/", views.dashboard_live, name="dashboard-live"),
    path("updates/", views.stream, name="updates"),
    path("sessions/start/", views.start, name="session-start"),
    path("sessions/estimate/", views.estimate, name="session-estimate"),
    path("sessions/probes/", views.probes, name="probe-files"),
    path("sessions/presets/", views.save_preset, name="preset-save"),
    path("sessions/presets/<int:number>/delete/", views.delete_preset, name="preset-delete"),
    path("sessions/<session_name:name>/", views.session, name="session"),
    path("sessions/<session_name:name>/live/", views.session_live, name="session-live"),
    path("sessions/<session_name:name>/state/", views.session_state, name="session-state"),
    path("sessions/<session_name:name>/stop/", views.stop, name="session-stop"),
    path("sessions/<session_name:name>/extend/", views.extend, name="session-extend"),
    path("sessions/<session_name:name>/again/", views.start_again, name="session-again"),
]
