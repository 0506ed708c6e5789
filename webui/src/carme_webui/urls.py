"""All addresses of the portal."""

from django.urls import include, path

from carme_webui.datasets.views import add, dataset_list
from carme_webui.guides import guide, help_page

urlpatterns = [
    path("", include("carme_webui.sessions.urls")),
    path("jobs/", include("carme_webui.jobs.urls")),
    path("datasets/", dataset_list, name="datasets"),
    path("datasets/add/", add, name="dataset-add"),
    path("images/", include("carme_webui.images.urls")),
    path("bookings/", include("carme_webui.bookings.urls")),
    path("files/", include("carme_webui.files.urls")),
    path("projects/", include("carme_webui.projects.urls")),
    path("admin/", include("carme_webui.administration.urls")),
    path("", include("carme_webui.announcements.urls")),
    path("profile/", include("carme_webui.profile.urls")),
    path("api/", include("carme_webui.api.urls")),
    path("tokens/", include("carme_webui.api.page_urls")),
    path("metrics/", include("carme_webui.metrics.urls")),
    path("help/", help_page, name="help"),
    path("help/<slug:guide>/", guide, name="guide"),
    path("accounts/", include("carme_webui.accounts.urls")),
    # /identity/o/... and /.well-known/openid-configuration
    path("", include("allauth.idp.urls")),
]

handler400 = "carme_webui.pages.bad_request"
handler403 = "carme_webui.pages.forbidden"
handler404 = "carme_webui.pages.not_found"
handler500 = "carme_webui.pages.server_error"
