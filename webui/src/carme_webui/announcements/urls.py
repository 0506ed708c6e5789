"""Addresses of news and maintenance."""

from django.urls import path

from carme_webui.announcements import views

urlpatterns = [
    path("announcements/", views.news, name="announcements"),
    path("announcements/new/", views.edit_news, name="news-new"),
    path("announcements/<int:number>/", views.edit_news, name="news-edit"),
    path("announcements/<int:number>/delete/", views.delete_news, name="news-delete"),
    path("maintenance/", views.maintenance, name="maintenance"),
    path("maintenance/new/", views.edit_maintenance, name="maintenance-new"),
    path("maintenance/<int:number>/", views.edit_maintenance, name="maintenance-edit"),
    path("maintenance/<int:number>/cancel/", views.cancel, name="maintenance-cancel"),
]
