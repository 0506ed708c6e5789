"""The fixture: two users at work on the same node at the same time, and what is known about the victim."""

import contextlib
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from bs4 import BeautifulSoup

from carme.broker import BrokerClient
from carme.config import Settings
from carme.errors import CarmeError
from carme.jobs import Job
from carme.slurm import UnixAccount
from carme.validation.attacks.executors import Executor
from carme.validation.visitor import Visitor

#: What the attacker's own server answers to anybody, without asking who it is.
EVIL = "/carme-evil"
EVIL_TEXT = "delivered by the attacker"
#: For which a job of the attacker's own waits for room on the victim's node.
ROOM_SECONDS = 60
#: Of each session: enough for a notebook server and one kernel.
SESSION_MEMORY_MB = 4096
_EVIL_CONFIGURATION = f'''
# Written by Carme's security check, and removed by it.
import sys, types
from tornado.web import RequestHandler

class Evil(RequestHandler):
    def get(self, *parts):
        self.set_header("Set-Cookie", "carme-evil=1; Path=/")
        self.write("{EVIL_TEXT} cookies: " + self.request.headers.get("Cookie", ""))

module = types.ModuleType("carme_evil")
module.default_handlers = [(r"{EVIL}(/.*)?", Evil)]
sys.modules["carme_evil"] = module
c.ServerApp.extra_services = ["carme_evil"]
c.ServerApp.allow_unauthenticated_access = True
'''


@dataclass
class Player:
    """One of the two users: their session, their places, their browser."""

    account: UnixAccount
    password: str
    visitor: Visitor
    session: str = ""
    job: Job | None = None
    base: str = ""
    environment: dict[str, str] | None = None

    @property
    def name(self) -> str:
        return self.account.name

    @property
    def folder(self) -> str:
        """The private folder of the session's job."""
        assert self.job and self.job.key
        return str(Path(self.account.home, ".local/share/carme/jobs", self.job.key))

    @property
    def token(self) -> str:
        """The session's own token to the hub."""
        assert self.environment
        return self.environment["JUPYTERHUB_API_TOKEN"]

    def cookies(self, path: str) -> str:
        """The cookies that the browser sends to a path of the site."""
        return "; ".join(
            f"{cookie.name}={cookie.value}"
            for cookie in self.visitor.http.cookies.jar
            if path.startswith(cookie.path)
        )


class Fixture:
    """Two sessions on one node and four executors; a context manager. Needs root on the head.

    Args:
        settings: The site's.
        certificate: To trust the site by.
        victim: Name and password of the first account.
        attacker: Name and password of the second one.
        image: Of both sessions.
        gpus: Of each session.
        more: Further fields of both sessions' start form; an empty one is left to the form.
    """

    def __init__(
        self,
        settings: Settings,
        certificate: str | None,
        victim: tuple[str, str],
        attacker: tuple[str, str],
        image: str,
        gpus: int,
        more: Mapping[str, str] | None = None,
    ) -> None:
        self.settings = settings
        self.gpus = gpus
        self._certificate = certificate
        self._image = image
        self._more = {name: value for name, value in (more or {}).items() if value}
        self._open = contextlib.ExitStack()
        self.victim, self.attacker = (
            Player(UnixAccount.named(name), password, Visitor(settings.site.url, certificate))
            for name, password in (victim, attacker)
        )
        self.secret = secrets.token_hex(16)
        self.victims_gpus: list[str] = []
        self.server = ("", 0)
        self.agent = ("", 0)
        self.server_pid = 0

    def __enter__(self) -> "Fixture":
        with contextlib.ExitStack() as stack:
            self._set(stack)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def _set(self, stack: contextlib.ExitStack) -> None:
        victim, attacker = self.victim, self.attacker
        for player in (victim, attacker):
            stack.enter_context(player.visitor)
        self.attacker_head = stack.enter_context(Executor(attacker.name, attacker.account.home))
        self.victim_head = stack.enter_context(Executor(victim.name, victim.account.home))
        evil = f"{attacker.account.home}/.jupyter/jupyter_server_config.py"
        self.attacker_head.ask("put", path=evil, text=_EVIL_CONFIGURATION)
        stack.callback(self.attacker_head.ask, "remove", path=evil)
        for player in (victim, attacker):
            self._begin(player)
            stack.callback(self._end, player)
        for player in (victim, attacker):
            player.base = self._opened(player)
            player.job = self._job(player)
        for player, head in ((victim, self.victim_head), (attacker, self.attacker_head)):
            player.environment = head.ask("load", path=f"{player.folder}/environment.json")
        self.victim_node = stack.enter_context(
            Executor(victim.name, victim.account.home, self._within(victim))
        )
        self.attacker_node = stack.enter_context(
            Executor(attacker.name, attacker.account.home, self._beside_victim())
        )
        self._reach_node()
        self._find_targets()

    def _within(self, player: Player) -> list[str]:
        """The arguments that run a program in a session's job, outside of its container."""
        assert player.job
        return [
            *["srun", f"--jobid={player.job.id}", "--overlap", "--ntasks=1", "--nodes=1", "--chdir=/"],
            *([f"--gres=gpu:{self.gpus}"] if self.gpus else []),
        ]

    def _beside_victim(self) -> list[str]:
        """The arguments that run the attacker's program on the victim's node.

        Where both sessions are on one node they may have filled it: no third job would start there.
        """
        assert self.victim.job and self.attacker.job
        if self.attacker.job.node_list == self.node:
            return self._within(self.attacker)
        return [
            *["srun", f"--nodelist={self.node}", "--ntasks=1", "--nodes=1", "--chdir=/", "--time=20"],
            *["--job-name=security-check", f"--partition={self.victim.job.partition}"],
            # No more than a session: Slurm's default may be a whole node's memory.
            *["--cpus-per-task=1", f"--mem={SESSION_MEMORY_MB}M"],
            *([f"--account={self._more['account']}"] if "account" in self._more else []),
            *([f"--gres=gpu:{self.gpus}"] if self.gpus else []),
            f"--immediate={ROOM_SECONDS}",
        ]

    def _reach_node(self) -> None:
        """See that the attacker's program runs. Raises CarmeError where it does not."""
        try:
            self.attacker_node.ask("gpus_allowed")
        except CarmeError as error:
            raise CarmeError(
                f"{self.attacker.name} cannot be brought to {self.node}, to {self.victim.name}: {error}",
                "See that a second job of this size has room on that node, or leave the attacks out: "
                "-e validation_attacks=false.",
            ) from None

    def _find_targets(self) -> None:
        """What an attacker can find out or guess, and what the victim knows."""
        executor, victim = self.victim_node, self.victim
        self.victims_gpus = executor.ask("gpus_allowed")
        agent = executor.ask("load", path=f"{self.private}/fabric.json")
        self.agent = (agent["host"], agent["port"])
        ports = [
            (host, port)
            for host, port in executor.ask("tcp_ports_of", user=victim.name)
            if port != self.agent[1] and not host.startswith(("127.", "::1"))
        ]
        if not ports:
            raise CarmeError(f"The server of {victim.name} listens nowhere on {self.node}.")
        self.server = (self.agent[0], ports[0][1])
        self.server_pid = executor.ask("process_with", text="singleuser")
        for folder in ("/tmp", "/dev/shm"):
            executor.run("leave_text", path=f"{folder}/carme-two-users", text=self.secret)

    @property
    def node(self) -> str:
        """The node on which both are."""
        assert self.victim.job
        return self.victim.job.node_list

    @property
    def private(self) -> str:
        """The folder of the victim's job in the node's /tmp."""
        assert self.victim.job
        return f"/tmp/carme-{self.victim.job.id}"

    @property
    def job_id(self) -> int:
        """The victim's job."""
        assert self.victim.job
        return self.victim.job.id

    def _begin(self, player: Player) -> None:
        player.visitor.login(player.name, player.password)
        player.session = player.visitor.start(
            {
                "image": self._image,
                "nodes": "1",
                "gpus_per_node": str(self.gpus),
                # Little, so that the small jobs of some attacks find room beside both sessions.
                "cpus_per_node": "1",
                "memory_mb_per_node": str(SESSION_MEMORY_MB),
                "minutes": "20",
                "title": f"Security check {self.secret}",
                **self._more,
            }
        )

    def _opened(self, player: Player) -> str:
        """The path of a session's server, once its browser is let in."""
        end = time.monotonic() + 180
        while True:
            try:
                address = player.visitor.open(player.session)
                break
            except CarmeError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.5)
        return "/" + address.split("://", 1)[1].partition("/")[2]

    def _job(self, player: Player) -> Job:
        for job in BrokerClient(self.settings.broker.socket).jobs(user=player.name):
            if job.name == f"session-{player.session}":
                return job
        raise CarmeError(f"Session {player.session} of {player.name} has no job.")

    def _end(self, player: Player) -> None:
        with contextlib.suppress(CarmeError):
            BrokerClient(self.settings.broker.socket).cancel(self._job(player).id, user=player.name)

    def another_browser(self, player: Player) -> Visitor:
        """One more browser in which somebody has signed in and opened their session."""
        visitor = Visitor(self.settings.site.url, self._certificate)
        visitor.login(player.name, player.password)
        visitor.open(player.session)
        return visitor

    def sign_out(self, visitor: Visitor) -> None:
        """The victim signs out at the portal in this browser; returns once that is known everywhere.

        The victim's first browser, which stays signed in at the portal, opens its session again.
        """
        page = visitor.fetch(self.settings.site.url)
        form = BeautifulSoup(page.text, "html.parser").select_one('form[action*="logout"]')
        if form is None:
            raise CarmeError("The portal's page has no form to sign out.")
        with httpx.Client(verify=visitor.trust, cookies=visitor.http.cookies) as thief:
            visitor.send(page, form, {})
            time.sleep(4)  # what nginx remembers is three seconds old at most
            end = time.monotonic() + 15
            # A busy site needs a moment longer; after that an attack counts.
            while time.monotonic() < end:
                if thief.get(f"{self.settings.site.url}{self.victim.base}api/contents").status_code != 200:
                    break
                time.sleep(0.5)
            time.sleep(1)  # for what is open at the server
        self.victim.visitor.open(self.victim.session)


def evidence(fixture: Fixture) -> dict[str, Any]:
    """What the report says about the fixture."""
    return {
        "node": fixture.node,
        "victim": fixture.victim.name,
        "attacker": fixture.attacker.name,
        "victims_gpus": fixture.victims_gpus,
        "victims_job": fixture.job_id,
    }
