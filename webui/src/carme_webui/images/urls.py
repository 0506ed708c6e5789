"""Addresses of images."""

from django.urls import path

from carme_webui.images import views

urlpatterns = [
    path("", views.image_list, name="images"),
    path("build/", views.build, name="image-build"),
    path("site/<str:image>/", views.site_image, name="image-of-site"),
    path("at/<str:reference>/", views.image, name="image"),
    path("at/<str:reference>/live/", views.image_live, name="image-live"),
    path("at/<str:reference>/share/", views.share, name="image-share"),
    path("at/<str:reference>/delete/", views.delete, name="image-delete"),
]
