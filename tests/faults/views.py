"""All views of a session, and whether they show the same state."""

import contextlib
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import httpx

from carme.errors import CarmeError
from carme.sessions import SessionState
from carme.validation import Visitor
from demo_site import DemoSite
from patience import HANG

#: For each state those of the job in Slurm's queue and of the server in the hub that fit; "": none there.
FITTING: dict[SessionState, tuple[set[str], set[str]]] = {
    SessionState.REQUESTED: ({""}, {"", "spawn"}),
    SessionState.QUEUED: ({"PENDING"}, {"spawn"}),
    SessionState.STARTING: ({"RUNNING", "CONFIGURING"}, {"spawn"}),
    SessionState.READY: ({"RUNNING"}, {"ready"}),
    SessionState.STOPPING: ({"RUNNING", "COMPLETING"}, {"", "stop", "spawn", "ready"}),
    SessionState.LOST: ({"RUNNING", "COMPLETING"}, {"spawn", "ready", "check"}),
    SessionState.ENDED: ({""}, {""}),
}
OBSERVER = "/run/carme-fault-observer.py"


@dataclass(frozen=True)
class View:
    """One session in each view; None: the view is unavailable, "": it has no such session."""

    slurm: str | None
    broker: str | None
    hub: str | None
    portal: str | None
    sentence: str = ""

    @property
    def state(self) -> SessionState | None:
        """The state that all views show; None if they differ."""
        if self.portal is None or self.portal != self.broker or None in (self.slurm, self.hub):
            return None
        state = SessionState(self.portal)
        slurm, hub = FITTING[state]
        return state if self.slurm in slurm and self.hub in hub else None

    def __str__(self) -> str:
        views = {"Slurm": self.slurm, "broker": self.broker, "hub": self.hub, "portal": self.portal}
        text = [f"{who}: {'no answer' if word is None else word or 'nothing'}" for who, word in views.items()]
        return ", ".join(text) + (f" ({self.sentence})" if self.sentence else "")


class Views:
    """All views of one user's sessions; works while parts of the site are down."""

    def __init__(self, site: DemoSite, user: str) -> None:
        self._site = site
        self._user = user
        self._visitor: Visitor | None = None
        self._observer: subprocess.Popen[str] | None = None

    def close(self) -> None:
        """Close the browser and the program on the head."""
        if self._visitor:
            self._visitor.http.close()
            self._visitor = None
        if self._observer and self._observer.stdin:
            with contextlib.suppress(OSError):
                self._observer.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._observer.wait(10)
            self._observer = None

    @property
    def visitor(self) -> Visitor:
        """A browser of the user, logged in."""
        if self._visitor is None:
            self._visitor = self._site.visitor(self._user)
        return self._visitor

    def observe(self, names: list[str]) -> dict[str, View]:
        """All views of the sessions now."""
        message = self._observe()
        slurm, broker, hub = (message.get(who) for who in ("slurm", "broker", "hub"))
        views = {}
        for name in names:
            state, sentence = (broker or {}).get(name, ("", ""))
            views[name] = View(
                None if slurm is None else slurm.get(name, ""),
                None if broker is None else state,
                None if hub is None else hub.get(name, "").replace("none", ""),
                self._portal(name),
                sentence,
            )
        return views

    def servers(self) -> set[str]:
        """The names of the user's servers in the hub."""
        return set(self._observe().get("hub") or {})

    def jobs(self) -> dict[str, str]:
        """The user's session jobs in Slurm's queue."""
        return self._observe().get("slurm") or {}

    def _portal(self, name: str) -> str | None:
        try:
            return self.visitor.session(name).state
        except (CarmeError, httpx.HTTPError):
            # The portal is down, or its login of this user has ended.
            with contextlib.suppress(CarmeError, httpx.HTTPError):
                if self._visitor:
                    self._visitor.login(self._user, self._site.passwords[self._user])
            return None

    def _observe(self) -> dict[str, dict[str, str] | None]:
        with contextlib.suppress(OSError, ValueError):
            process = self._observer
            if process is None or process.poll() is not None:
                process = self._observer = self._begin()
            assert process.stdin and process.stdout
            process.stdin.write("\n")
            return json.loads(process.stdout.readline())
        self._observer = None
        return {}

    def _begin(self) -> subprocess.Popen[str]:
        code = (Path(__file__).parent / "observer.py").read_text()
        with contextlib.suppress(AssertionError, subprocess.SubprocessError):  # the head itself may be down
            self._site.run("head", "tee", OBSERVER, data=code, timeout=HANG)
        address = "http://127.0.0.1:8000/jupyter/hub/api"
        return self._site.begin("head", "/opt/carme/venv/bin/python", OBSERVER, self._user, address)
