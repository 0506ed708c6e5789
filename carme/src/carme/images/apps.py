"""Where the apps of a session are."""

from urllib.parse import quote

__all__ = ["app_path"]

_OWN_PLACES = {
    "lab": "lab",
    "terminal": "carme/terminal",
    "vscode": "vscode/",
    "tensorboard": "tensorboard/",
}


def app_path(name: str) -> str:
    """An entry point's address below the server's own: `lab`, `vscode/`, an image's own app `app/NAME/`."""
    return _OWN_PLACES.get(name) or f"app/{quote(name, safe='')}/"
