"""JupyterLab's workspaces and language servers, where what its pages ask for is not all there."""

from pathlib import Path
from typing import Any

from jupyter_server.base.handlers import APIHandler
from jupyter_server.serverapp import ServerApp
from jupyter_server.utils import url_path_join
from jupyterlab_server import workspaces_handler
from tornado import web


class LanguageServersHandler(APIHandler):
    """`GET lsp/status`: there are none; pages ask all the same. What else would answer slows each start."""

    @web.authenticated
    def get(self) -> None:
        self.finish({"version": 2, "sessions": {}, "specs": {}})


def install(server: ServerApp) -> None:
    """Let one broken workspace not hide all others, and answer who asks for language servers."""
    _skip_broken()
    assert server.extension_manager is not None
    lsp = server.extension_manager.extensions.get("jupyter_lsp")
    if lsp is None or not lsp.enabled:
        path = url_path_join(server.base_url, "lsp/status")
        server.web_app.add_handlers(".*$", [(path, LanguageServersHandler)])


def _skip_broken() -> None:
    """A file that another session is writing, or that a full disk cut off, counts as an empty workspace."""
    load = workspaces_handler._load_with_file_times

    def loaded(path: Path) -> dict[str, Any]:
        try:
            found = load(path)
            found["metadata"]["id"]
        except (OSError, ValueError, KeyError, TypeError):
            # Its file is called after it, with a check sum at the end.
            return {"data": {}, "metadata": {"id": path.stem.rpartition("-")[0] or path.stem}}
        return found

    workspaces_handler._load_with_file_times = loaded
