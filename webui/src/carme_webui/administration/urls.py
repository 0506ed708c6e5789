"""Addresses of administration."""

from django.urls import path

from carme_webui.administration import views

urlpatterns = [
    path("", views.home, name="admin"),
    path("policies/", views.policies, name="admin-policies"),
    path("record/", views.record, name="admin-record"),
    path("record/export/", views.export_record, name="admin-record-export"),
    path("nodes/", views.nodes, name="admin-nodes"),
    path("nodes/<str:name>/", views.node, name="admin-node"),
    path("approvals/", views.approvals, name="admin-approvals"),
    path("jobs/", views.jobs, name="admin-jobs"),
    path("jobs/<int:number>/", views.job, name="admin-job"),
    path("jobs/<int:number>/stop/", views.stop, name="admin-stop"),
    path("users/", views.users, name="admin-users"),
    path("users/new/", views.new_user, name="admin-new-user"),
    path("users/at/<str:name>/", views.user, name="admin-user"),
    path("impersonation/end/", views.end_impersonation, name="admin-end-impersonation"),
]
