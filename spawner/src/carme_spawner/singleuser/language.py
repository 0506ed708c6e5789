"""JupyterLab in the language of the portal's pages, for users who have chosen none in JupyterLab itself.

The server's own sentences are in the language that JupyterLab shows, by the catalogue of `carme.translation`.
"""

import os

from jupyter_server.serverapp import ServerApp
from jupyterlab_server import settings_utils, translations_handler
from jupyterlab_server.translation_utils import L10N_SCHEMA_NAME, is_valid_locale
from tornado import web

from carme.translation import follow

#: JupyterLab's names of the portal's languages. Images have the language pack of each but English.
LOCALES = {"en": "en", "de": "de_DE"}


def install(server: ServerApp) -> None:
    """Begin in the language that the hub names; an image without its language pack stays English.

    JupyterLab's default is the locale of the server's process, and images have only C.UTF-8. What a user
    chooses in JupyterLab's settings is stored in their home and comes first.
    """
    if locale := LOCALES.get(os.environ.get("CARME_LANGUAGE", "")):
        for module in (settings_utils, translations_handler):
            vars(module)["SYS_LOCALE"] = locale
    follow(lambda: current_language(server))


def current_language(server: ServerApp) -> str:
    """The language of JupyterLab's pages at this moment: `de_DE`, or empty where nothing names one."""
    default = os.environ.get("CARME_LANGUAGE", "")
    if default in LOCALES and not is_valid_locale(LOCALES[default]):
        default = "en"  # as the pages of an image without the language pack
    assert server.extension_manager is not None
    point = server.extension_manager.extension_points.get("lab")
    if point is None or point.app is None:
        return default
    folders = [getattr(point.app, name) for name in ("app_settings_dir", "schemas_dir", "user_settings_dir")]
    try:
        found, _ = settings_utils.get_settings(*folders, schema_name=L10N_SCHEMA_NAME)
    except (web.HTTPError, OSError):
        return default  # without that setting JupyterLab shows the default, too
    locale = found.get("settings", {}).get("locale")
    return default if locale in (None, "", "default") else str(locale)
