"""The portal's settings with the app `portal_without`, for `./test bench portal --without`."""

import os

from carme_webui.settings import *  # noqa: F403
from carme_webui.settings import CACHES as _CACHES
from carme_webui.settings import INSTALLED_APPS as _APPS

INSTALLED_APPS = [*_APPS, "portal_without.Without"]
if "object-cache" in os.environ.get("CARME_BENCH_WITHOUT", "").split(","):
    _DJANGOS = {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}
    CACHES = {
        alias: cache | _DJANGOS if cache["BACKEND"] == "carme_webui.caches.ObjectCache" else cache
        for alias, cache in _CACHES.items()
    }
