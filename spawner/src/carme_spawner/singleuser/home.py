"""What JupyterLab's launcher offers besides notebooks: the session's apps, and the image's examples."""

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from jupyter_server.base.handlers import APIHandler
from jupyter_server.serverapp import ServerApp
from jupyter_server.utils import url_path_join
from tornado import web

from carme.translation import joined, message, translated
from carme_spawner.singleuser import folders, language
from carme_spawner.singleuser.apps import NAME as APP
from carme_spawner.singleuser.programs import AT_TOP, PROGRAMS, listens

#: Where an image has its notebooks; a sandbox, which has no image, says where they are.
EXAMPLES = Path(os.environ.get("CARME_EXAMPLES", "/opt/carme/examples"))
#: Where a user's copies go, in the home.
COPIES = "examples"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
TITLES = {"vscode": "VS Code", "tensorboard": "TensorBoard"}
#: Notebooks of at most so many bytes are read.
MOST_BYTES = 4 << 20


def apps(base_url: str) -> list[dict[str, str]]:
    """The image's apps, then the user's own web apps that listen: name, title and address of each."""
    names = sorted(path.name for path in _listed(PROGRAMS) if os.access(path, os.X_OK) and path.is_file())
    sockets = [path for path in _listed(folders.private("apps")) if path.suffix == ".sock"]
    own = [path.stem for path in sockets if re.fullmatch(APP, path.stem) and listens(path)]
    found = []
    for name in [*names, *sorted(set(own) - set(names))]:
        path = name if name in AT_TOP else f"app/{name}"
        url = url_path_join(base_url, path) + "/"
        found.append({"name": name, "title": TITLES.get(name, name), "url": url})
    return found


def examples(folder: Path = EXAMPLES, locale: str = "") -> list[dict[str, str]]:
    """The notebooks of a folder in the order of their files: name, title and what each shows.

    Title and description are the first heading and the first paragraph of the notebook, or what it has for
    the language under `carme` in its metadata: `{"de": {"title": "...", "description": "..."}}`. What
    cannot be read is left out.

    Args:
        folder: Where they are.
        locale: The reader's language, like `de` or `de_DE`.
    """
    found = []
    for path in _listed(folder):
        if path.suffix != ".ipynb" or not NAME.fullmatch(path.stem):
            continue
        try:
            if path.stat().st_size > MOST_BYTES:
                continue
            whole = json.loads(path.read_text(encoding="utf-8"))
            paragraphs = "".join(whole["cells"][0]["source"]).split("\n\n")
        except (OSError, ValueError, LookupError, TypeError):
            continue
        title = paragraphs[0].lstrip("# ").strip() or path.stem
        text = " ".join(paragraphs[1].replace("`", "").split()) if len(paragraphs) > 1 else ""
        shown = {"title": title, "description": text} | _own_words(whole, locale[:2])
        found.append({"name": path.stem, **shown})
    return found


def _own_words(notebook: Any, language: str) -> dict[str, str]:
    """Title and description that a notebook has for a language, as far as it has them."""
    try:
        words = notebook["metadata"]["carme"][language]
        return {name: str(words[name]) for name in ("title", "description") if words.get(name)}
    except (LookupError, TypeError, AttributeError):
        return {}


def copy_example(name: str, home: Path, folder: Path = EXAMPLES) -> str:
    """A user's own copy of a notebook; one that is there already stays as it is.

    Args:
        name: Of the notebook, without its suffix.
        home: The folder that JupyterLab shows.
        folder: That of the examples.

    Returns:
        Its path below `home`.

    Raises:
        FileNotFoundError: There is no such example.
        OSError: The copy cannot be written.
    """
    source = folder / f"{name}.ipynb"
    if not NAME.fullmatch(name) or not source.is_file():
        raise FileNotFoundError(name)
    target = home / COPIES / source.name
    target.parent.mkdir(exist_ok=True)
    if not target.exists():
        partial = target.with_name(f".{target.name}-{os.getpid()}")
        shutil.copyfile(source, partial)
        partial.replace(target)
    return f"{COPIES}/{source.name}"


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


class HomeHandler(APIHandler):
    """`GET carme/home`: the apps and examples that the launcher shows."""

    @web.authenticated
    def get(self) -> None:
        self.set_header("Cache-Control", "no-store")
        assert self.serverapp is not None
        locale = language.current_language(self.serverapp)
        self.finish({"apps": apps(self.base_url), "examples": examples(locale=locale)})


class ExampleHandler(APIHandler):
    """`POST carme/examples` with `{"name": NAME}`: copies an example, answers with its path."""

    @web.authenticated
    def post(self) -> None:
        body: Any = self.get_json_body()
        name = body.get("name") if isinstance(body, dict) else None
        try:
            path = copy_example(str(name), Path(self.settings["server_root_dir"]).expanduser())
        except FileNotFoundError:
            sentence = message("This image has no example {name!r}. Choose one of the launcher's.", name=name)
            self._refuse(404, sentence)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            sentence = message(
                "The example cannot be copied to {folder}/ in your home: {reason}.",
                folder=COPIES,
                reason=error.strerror,
            )
            remedy = (
                message("Free some space there, and try again.")
                if full
                else message("Check that you can write to the folder {folder}, and try again.", folder=COPIES)
            )
            self._refuse(507 if full else 500, joined([sentence, remedy]))
        else:
            self.finish({"path": path})

    def _refuse(self, status: int, sentence: str) -> None:
        self.set_status(status)
        self.finish({"message": translated(sentence)})


def install(server: ServerApp) -> None:
    """Add them to the server."""
    handlers: list[Any] = [("carme/home", HomeHandler), ("carme/examples", ExampleHandler)]
    pages = [(url_path_join(server.base_url, path), handler) for path, handler in handlers]
    server.web_app.add_handlers(".*$", pages)
