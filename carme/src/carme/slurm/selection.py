"""Which adapter the broker uses on this host, and why."""

import contextlib
import importlib.util
import json
import logging
import re
import sys
from collections.abc import AsyncIterator
from typing import Literal, NamedTuple

from carme.config import Settings
from carme.config.settings import SlurmSettings
from carme.errors import CarmeError
from carme.slurm.commands import SlurmCommands
from carme.slurm.library import SlurmLibrary, worker
from carme.slurm.programs import Finished, run
from carme.slurm.rest import RestServer, SlurmRest

_log = logging.getLogger("carme.slurm")


class Choice(NamedTuple):
    """The adapter that is used, one sentence about it, and whether that is other than the site wants."""

    adapter: Literal["commands", "pyslurm", "rest"]
    sentence: str
    unwanted: bool = False


async def choose(settings: Settings, interpreter: str = sys.executable) -> Choice:
    """The adapter for `slurm.adapter`; pyslurm only where it is made for the Slurm of this host.

    Args:
        settings: The site's.
        interpreter: The Python that is to have pyslurm.
    """
    wanted = settings.slurm.adapter
    if wanted == "rest":
        return await _rest_choice(_server(settings.slurm))
    if wanted == "commands":
        return Choice("commands", "Slurm is read through its commands, as slurm.adapter says.")
    if interpreter == sys.executable and importlib.util.find_spec("pyslurm") is None:
        reason = "pyslurm is not installed"
    else:
        reason = await _why_not_pyslurm(interpreter)
    if not reason:
        return Choice("pyslurm", "Slurm is read through pyslurm, which matches this host's Slurm.")
    return Choice("commands", f"Slurm is read through its commands: {reason}.", wanted == "pyslurm")


@contextlib.asynccontextmanager
async def opened(settings: Settings, interpreter: str = sys.executable) -> AsyncIterator[SlurmCommands]:
    """The site's Slurm through the adapter that fits, which the log names; arguments as for `choose`."""
    choice = await choose(settings, interpreter)
    _log.log(logging.WARNING if choice.unwanted else logging.INFO, "%s", choice.sentence)
    cluster = settings.slurm.cluster
    if choice.adapter == "rest":
        default = settings.slurm.default_partition or ""
        rest = SlurmRest(_server(settings.slurm), cluster=cluster, default_partition=default)
        try:
            yield rest
        finally:
            rest.close()
    elif choice.adapter == "commands":
        yield SlurmCommands(cluster=cluster)
    else:
        slurm = SlurmLibrary(cluster=cluster, interpreter=interpreter)
        try:
            yield slurm
        finally:
            await slurm.close()


def _server(slurm: SlurmSettings) -> RestServer:
    assert slurm.rest_address  # which the settings see to
    return RestServer(slurm.rest_address, slurm.rest_token_file)


async def _rest_choice(server: RestServer) -> Choice:
    """slurmrestd in any case: the site may have nothing else, and it may be back in a moment.

    It closes `server`.
    """
    try:
        version = await server.version()
    except CarmeError as error:
        sentence = f"Slurm is to be read through slurmrestd, but: {error.message}"
        return Choice("rest", sentence, unwanted=True)
    finally:
        server.close()
    how = "and changed as users with a token" if server.acts_for_users else "and changed through its commands"
    return Choice("rest", f"Slurm is read through slurmrestd at {server.address} ({version}), {how}.")


async def _why_not_pyslurm(interpreter: str) -> str:
    """Why pyslurm cannot be used, empty where it can."""
    try:
        # In a child: its import ends the process where Slurm's configuration is missing or wrong.
        probe = await run(
            *[interpreter, "-I", str(worker.__file__), "--probe"],
        )
        version = await run("sinfo", "--version")
    except CarmeError as error:
        return f"pyslurm cannot be tried ({error.message.rstrip('.')})"
    try:
        reported = json.loads(probe.output.splitlines()[-1])
    except (ValueError, IndexError):
        return f"pyslurm cannot be loaded ({_last_line(probe)})"
    site = re.search(rb"(\d+\.\d+)\.\d+", version.output)
    if site is None:
        return "sinfo does not report Slurm's version"
    release = ".".join(reported["version"].split(".")[:2])
    for name, linked in (("pyslurm", release), ("pyslurm's library", reported["linked"])):
        if linked != site[1].decode():
            return f"{name} is for Slurm {linked}, but this host has Slurm {site[1].decode()}"
    if reported["missing"]:
        return f"pyslurm {reported['version']} has no {', '.join(reported['missing'])}, which are needed"
    return ""


def _last_line(done: Finished) -> str:
    lines = [line.strip() for line in done.errors.splitlines() if line.strip()]
    return lines[-1].rstrip(".")[:200] if lines else f"its process ended with {done.code}"
