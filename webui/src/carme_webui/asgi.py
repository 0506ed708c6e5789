"""The portal as an ASGI application."""

import os

from django.core.asgi import get_asgi_application

__all__ = ["application"]

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "carme_webui.settings")

application = get_asgi_application()
