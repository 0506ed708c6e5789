"""Run programs on hosts of tests; report a failure with what the program printed."""

import subprocess
from collections.abc import Mapping

#: Where podman and its helpers are, whatever the caller's own PATH.
PROGRAMS = "/usr/sbin:/usr/bin:/sbin:/bin"


def run_on(
    host: str,
    command: list[str],
    *,
    environment: Mapping[str, str],
    data: str | None,
    check: bool,
    timeout: float,
) -> subprocess.CompletedProcess[str]:
    """Run a program; `command` brings it to the host.

    Raises:
        AssertionError: It did not end with 0, and `check` is set.
    """
    done = subprocess.run(
        command,
        env={"PATH": PROGRAMS, **environment},
        input=data if data is not None else "",
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return checked(done, host) if check else done


def checked(done: subprocess.CompletedProcess[str], host: str) -> subprocess.CompletedProcess[str]:
    """The program that ended on a host.

    Raises:
        AssertionError: It did not end with 0.
    """
    if done.returncode:
        message = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        raise AssertionError(f"{done.args} on {host} ended with {done.returncode}:\n{message}")
    return done
