"""The portal's settings with the app `portal_without`, for `./test bench portal --without`."""

from carme_webui.settings import *  # noqa: F403
from carme_webui.settings import INSTALLED_APPS as _APPS

INSTALLED_APPS = [*_APPS, "portal_without.Without"]
