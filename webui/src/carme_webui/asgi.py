"""The portal as an ASGI application."""

import os
import warnings

from django.core.asgi import get_asgi_application

__all__ = ["application"]

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "carme_webui.settings")

# The portal streams nothing but its own small static files, and those may well be read at once.
warnings.filterwarnings("ignore", message="StreamingHttpResponse must consume synchronous iterators")

application = get_asgi_application()
