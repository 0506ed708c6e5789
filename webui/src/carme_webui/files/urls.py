"""Addresses of files."""

from django.urls import path

from carme_webui.files import views

urlpatterns = [
    path("", views.folder, name="files"),
    path("quota/", views.quota, name="files-quota"),
    path("download/", views.download, name="file-download"),
    path("upload/", views.upload, name="file-upload"),
    path("make/", views.make, name="file-make"),
    path("rename/", views.rename, name="file-rename"),
    path("delete/", views.delete, name="file-delete"),
]
