"""Executors: where actions are made, as whom."""

import json
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

from carme.errors import CarmeError
from carme.validation.attacks import actions
from carme.validation.attacks.actions import Outcome

_SOURCE = Path(actions.__file__)


class Executor:
    """A Python interpreter of one user at one place, which makes actions; a context manager.

    Args:
        user: Whose processes these are. The caller must be root.
        home: That user's home.
        prefix: Program and arguments that bring the interpreter to its place, such as those of srun.
    """

    def __init__(self, user: str, home: str, prefix: list[str] | None = None) -> None:
        self.user = user
        self._arguments = [
            *["runuser", "--user", user, "--", "env", "--ignore-environment", "--chdir=/"],
            *[f"HOME={home}", f"USER={user}", f"LOGNAME={user}", "LANG=C.UTF-8"],
            *["PATH=/usr/local/bin:/usr/bin:/bin:/opt/slurm/bin:/opt/carme/venv/bin"],
            *(prefix or []),
            # The source goes along as an argument: the place need not be able to read our files.
            *["/usr/bin/python3", "-c", _SOURCE.read_text()],
        ]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Executor":
        self._process = subprocess.Popen(
            self._arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process and self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, action: str, **arguments: Any) -> Any:
        """What a function of `actions` returns there. Raises CarmeError when it could not be called."""
        assert self._process and self._process.stdin and self._process.stdout and self._process.stderr
        try:
            self._process.stdin.write(json.dumps({"action": action, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait(15)
            raise CarmeError(
                f"Nothing can be run as {self.user}: {self._process.stderr.read().strip()[-300:]}",
                "See that this account may run jobs.",
            )
        answer = json.loads(line)
        if "error" in answer:
            raise CarmeError(f"The action {action} failed as {self.user}: {answer['error']}")
        return answer["result"]

    def run(self, action: str, **arguments: Any) -> Outcome:
        """Run an action; whether it reached what it was after, and the output."""
        reached, message = self.ask(action, **arguments)
        return bool(reached), str(message)
