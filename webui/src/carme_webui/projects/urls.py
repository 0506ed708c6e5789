"""Addresses of projects."""

from django.urls import path

from carme_webui.projects import views

urlpatterns = [
    path("", views.project_list, name="projects"),
    path("new/", views.new, name="project-new"),
    path("invitations/<int:number>/", views.answer, name="project-answer"),
    path("at/<slug:name>/", views.project, name="project"),
    path("at/<slug:name>/limits/", views.limits, name="project-limits"),
    path("at/<slug:name>/use/", views.use, name="project-use"),
    path("at/<slug:name>/state/", views.state, name="project-state"),
    path("at/<slug:name>/members/<str:user>/", views.member, name="project-member"),
    path("at/<slug:name>/invitations/<str:user>/", views.withdraw, name="project-withdraw"),
]
