"""JupyterHub's server extension with what a session adds: its place, its time, its apps, its end."""

import asyncio
import contextlib
import gc
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from jupyter_server.serverapp import ServerApp
from jupyterhub.singleuser.extension import JupyterHubSingleUser

from carme_spawner.singleuser import apps, connections, folders, home, language, panel, workspaces
from carme_spawner.singleuser.address import service_url
from carme_spawner.singleuser.certificates import Certificates
from carme_spawner.singleuser.hub import Hub, Refused, Unanswered
from carme_spawner.singleuser.process_start import STARTED
from carme_spawner.singleuser.time_left import TimeLeft

#: JupyterLab's panel of the session.
LABEXTENSIONS = Path(__file__).with_name("labextensions")
#: Seconds that open pages get at most to save their documents when the session is to end.
SAVE_SECONDS = 8.0
#: Bytes of a request to the server itself, such as a notebook that is saved, and of a message from a browser.
#: Both are held in the session's memory. Tornado closes channels at 10 MiB, less than a file for a widget.
LARGEST_REQUEST = 2 << 30
LARGEST_MESSAGE = 512 << 20
#: Seconds for which a hub that knows this server may take to look for it.
HUB_TIMEOUT = 2.0


#: What the pages of a session are made of: users' own settings may add extensions, not take these away.
NEEDED = ("jupyterlab", "jupyter_server_terminals")


class SessionServer(JupyterHubSingleUser):
    """JupyterHub's server extension, which takes a free port and reports it to the hub."""

    #: Whether the server ended because it could not report.
    failed = False
    certificates: Certificates | None = None
    first_page = False

    @property
    def app(self) -> ServerApp:
        """The server that this extends."""
        assert self.serverapp is not None
        return self.serverapp

    @classmethod
    def make_serverapp(cls, **arguments: Any) -> ServerApp:
        """The server, before it reads any settings: these extensions no file can switch off."""
        arguments["jpserver_extensions"] = arguments.get("jpserver_extensions", {}) | dict.fromkeys(
            NEEDED, True
        )
        return super().make_serverapp(**arguments)

    def load_config_file(self) -> None:
        """The hub's settings, then ours: home as root, any free port, no extension manager."""
        super().load_config_file()
        # Port 0 is replaced by a free one when the server's socket is made.
        self.config.ServerApp.port = 0
        self.config.ServerApp.sock = ""
        self.config.ServerApp.terminals_enabled = True
        self.config.ServerApp.max_body_size = self.config.ServerApp.max_buffer_size = LARGEST_REQUEST
        # Anyone who may connect to a kernel's TCP ports reads its output, and that is every user of the node.
        self.config.KernelManager.transport = "ipc"
        # Images cannot be written to, and the other manager asks PyPI for its list at each start.
        self.config.LabApp.extension_manager = "readonly"
        if (
            "kernel_spec_manager_class" not in self.app.config.ServerApp
        ):  # a user may have one that finds more
            self.config.ServerApp.kernel_spec_manager_class = "carme_spawner.singleuser.kernels.ImageKernels"
        self.config.LabApp.extra_labextensions_path = [str(LABEXTENSIONS)]
        self.app.update_config(self.config)

    def initialize(self, args: Any = None) -> None:
        """JupyterHub's part, then ours; without either there is no session."""
        #: The first request was answered: the hub has looked for this server. What a start needs is done.
        self.found, self.settled = asyncio.Event(), asyncio.Event()
        super().initialize(args)
        try:
            self.add_session()
        except Exception:
            # Jupyter Server itself would go on without this extension.
            self.log.exception("The session's part of the server does not work. Tell an administrator.")
            self.exit(1)

    def add_session(self) -> None:
        """Add the session's own pages, and notice the first page that a browser gets."""
        self.hub = Hub(self.certificates)
        self.time_left = TimeLeft(self.hub, self.app)
        panel.install(self.app, self.time_left)
        provider: Any = self.app.identity_provider  # JupyterHub's; our own `hub_auth` decides nothing
        self.connections = connections.install(self.app, provider.hub_auth)
        self.programs = apps.install(self.app)
        home.install(self.app)
        workspaces.install(self.app)
        language.install(self.app)
        self.app.web_app.settings["websocket_max_message_size"] = LARGEST_MESSAGE
        # Nothing can be built in an image; asking whether it should be takes longer than the rest of a page.
        page = self.app.web_app.settings.setdefault("page_config_data", {})
        page.update(buildAvailable=False, buildCheck=False)
        log = self.app.web_app.settings["log_function"]

        def log_function(handler: Any) -> None:
            log(handler)
            self.found.set()
            if not self.first_page and is_page(handler):
                self.first_page = True
                self.time_left.report_soon(first_page=time.time())

        self.app.web_app.settings["log_function"] = log_function

    async def check_hub_version(self) -> None:
        """Nothing: a hub that restarts just now is no reason to end; `report` waits for it."""

    async def keep_activity_updated(self) -> None:
        """JupyterHub's own report, with all that it imports: when it delays nobody any more."""
        await self.settled.wait()
        await super().keep_activity_updated()

    async def _start_jupyter_server_extension(self, serverapp: Any) -> None:
        """Called by Jupyter Server as soon as it listens."""
        self.listening = time.time()
        # Not awaited, or the other extensions would wait for the hub.
        self._report = asyncio.create_task(self.report())
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, lambda: setattr(self, "_end", loop.create_task(self.end())))

    async def report(self) -> None:
        """Report to the hub where this server is; end the server if the hub refuses it or stays away."""
        marks = {"container": STARTED, "listening": self.listening}
        with contextlib.suppress(KeyError, ValueError):
            marks["prolog"] = float(os.environ["CARME_STEP_PROLOG"])
        body = {"port": self.app.port, "host": self.app.ip, "pid": os.getpid(), "marks": marks}
        try:
            await self.hub.announce(body)
        except Refused as error:
            self.log.critical(
                "The hub refuses this server, which ends now. Start the session again. %s", error
            )
            return self.give_up()
        except Unanswered as error:
            self.log.critical(
                "The hub did not answer for too long, so this server ends. Start the session again. %s", error
            )
            return self.give_up()
        self.log.info("The hub knows that this server listens at %s port %s.", self.app.ip, self.app.port)
        # It looks at this moment whether the server answers, before it leads anybody here.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HUB_TIMEOUT):
                await self.found.wait()
        # Not in a thread: what is imported at its first use is not safe if two threads use it at once.
        prepare_for_pages()
        gc.collect()
        gc.freeze()
        gc.enable()
        self.time_left.start()
        self.settled.set()

    def give_up(self) -> None:
        """End the server, and the job with it."""
        type(self).failed = True
        self.app.stop()

    async def end(self) -> None:
        """On SIGTERM: let open pages save their documents, then end kernels, apps and the server."""
        if pages := self.connections.listening():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SAVE_SECONDS):
                    await self.time_left.until_saved(pages)
        self.app.stop()

    async def stop_extension(self) -> None:
        """End what this extension has started."""
        await super().stop_extension()
        self.time_left.stop()
        await self.programs.stop()


def prepare_for_pages() -> None:
    """Import what the first page needs to ask the hub who comes, while the browser is still on its way."""
    import aiohttp.client  # noqa: F401
    import jupyterhub.httpclient  # noqa: F401


def is_page(handler: Any) -> bool:
    """Whether an answer was a page for a user who is logged in."""
    kind = handler._headers.get("Content-Type", "")
    return bool(
        handler.request.method == "GET"
        and handler.get_status() == 200
        and kind.startswith("text/html")
        and handler.current_user
    )


def run(certificates: Certificates | None) -> None:
    """Run the server until it is to end, or may not go on."""
    SessionServer.certificates = certificates
    os.environ["JUPYTERHUB_SERVICE_URL"] = service_url("https" if certificates else "http")
    os.environ.setdefault("JUPYTERHUB_ROOT_DIR", "~")
    # Sockets belong on the node's own disk, in a folder that nobody else may enter.
    os.environ["JUPYTER_RUNTIME_DIR"] = str(folders.private("jupyter"))
    SessionServer.launch_instance()
    if SessionServer.failed:
        sys.exit(1)
