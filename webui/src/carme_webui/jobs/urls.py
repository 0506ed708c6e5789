"""Addresses of jobs."""

from django.urls import path, register_converter
from django.urls.converters import IntConverter

from carme_webui.jobs import views


class JobIdConverter(IntConverter):
    """At most as many digits as every database can hold."""

    regex = "[0-9]{1,18}"


register_converter(JobIdConverter, "job_id")

urlpatterns = [
    path("", views.job_list, name="jobs"),
    path("month/", views.month, name="month"),
    path("submit/", views.submit, name="job-submit"),
    path("submit/directives/", views.directives, name="job-directives"),
    path("submit/predict/", views.predict, name="job-predict"),
    path("<job_id:job_id>/", views.job, name="job"),
    path("<job_id:job_id>/new/", views.wait, name="job-wait"),
    path("<job_id:job_id>/cancel/", views.cancel, name="job-cancel"),
    path("<job_id:job_id>/extend/", views.extend, name="job-extend"),
    path("<job_id:job_id>/resubmit/", views.resubmit, name="job-resubmit"),
    path("<job_id:job_id>/recipe/", views.recipe, name="job-recipe"),
    path("<job_id:job_id>/facts/", views.facts, name="job-facts"),
    path("<job_id:job_id>/net/", views.net, name="job-net"),
    path("<job_id:job_id>/log/", views.log_stream, name="job-log"),
    path("<job_id:job_id>/live/", views.job_live, name="job-live"),
    path("<job_id:job_id>/use/", views.job_use, name="job-use"),
]
