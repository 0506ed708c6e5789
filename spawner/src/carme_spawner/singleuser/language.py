"""JupyterLab in the language of the portal's pages, for users who have chosen none in JupyterLab itself."""

import os

from jupyterlab_server import settings_utils, translations_handler

#: JupyterLab's names of the portal's languages. Images have the language pack of each but English.
LOCALES = {"en": "en", "de": "de_DE"}


def install() -> None:
    """Begin in the language that the hub names; an image without its language pack stays English.

    JupyterLab's default is the locale of the server's process, and images have only C.UTF-8. What a user
    chooses in JupyterLab's settings is stored in their home and comes first.
    """
    if locale := LOCALES.get(os.environ.get("CARME_LANGUAGE", "")):
        for module in (settings_utils, translations_handler):
            vars(module)["SYS_LOCALE"] = locale
