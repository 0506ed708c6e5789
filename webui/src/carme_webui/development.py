"""Django's settings for developers (`./dev`): changed templates, scripts and styles show at once."""

from carme_webui.settings import *  # noqa: F403
from carme_webui.settings import (
    CELERY_BROKER_TRANSPORT_OPTIONS,
    SITE,
    STORAGES,
    TEMPLATES,
)

# Errors show their tracebacks in the browser.
DEBUG = True
STORAGES = STORAGES | {
    "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
}
WHITENOISE_USE_FINDERS = WHITENOISE_AUTOREFRESH = True
_template = TEMPLATES[0]
TEMPLATES = [
    _template
    | {
        "APP_DIRS": False,
        "OPTIONS": _template["OPTIONS"]
        | {
            # Without the cache, which Django puts around these where nothing is named.
            "loaders": [
                "django.template.loaders.filesystem.Loader",
                "django.template.loaders.app_directories.Loader",
            ]
        },
    }
]
# Passwords of a sandbox protect nothing, and slow hashes would delay its start.
PASSWORD_HASHERS = ["django.contrib.auth.hashers.PBKDF2PasswordHasher"]
CELERY_BROKER_URL = SITE.portal.redis
if CELERY_BROKER_URL == "memory://":
    # No Redis: the worker and the clock are two processes, which then share a folder.
    _queue = SITE.portal.state_directory / "queue"
    _queue.mkdir(exist_ok=True)
    CELERY_BROKER_URL = "filesystem://"
    CELERY_BROKER_TRANSPORT_OPTIONS = CELERY_BROKER_TRANSPORT_OPTIONS | {
        "data_folder_in": str(_queue),
        "data_folder_out": str(_queue),
        "control_folder": str(_queue),
    }
