"""Programs for GPI-2: what `gaspi_run` passes to the ranks, without ssh.

Run as a program on each node, this module makes the file of hosts that GPI-2 reads, and becomes the rank.
"""

import os
import sys
from pathlib import Path

from carme_runtime.gaspi.gpi2.variables import variables
from carme_runtime.launcher.placement import Place, is_spread

HOSTS = "CARME_GASPI_HOSTS"


def rank_variables(places: list[Place]) -> dict[int, dict[str, str]]:
    """By rank, what GPI-2 reads on top of every run's variables."""
    spread = is_spread(places)
    hosts = [place.member.address if spread else "127.0.0.1" for place in places]
    return {
        place.rank: variables(place.rank, len(places), hosts, "") | {HOSTS: " ".join(hosts)}
        for place in places
    }


def wrapped(command: list[str]) -> list[str]:
    """The command that becomes `command` once GPI-2's file of hosts is there."""
    return [sys.executable, "-m", __name__, *command]


def main() -> None:
    """Become the program that the arguments name."""
    hosts = os.environ.pop(HOSTS).split()
    # A file that lives as long as the program, and no longer.
    machines = os.memfd_create("gaspi-machines", 0)
    Path(f"/proc/self/fd/{machines}").write_text("".join(f"{host}\n" for host in hosts))
    os.environ["GASPI_MFILE"] = f"/proc/self/fd/{machines}"
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        sys.exit(f"carme-run: {sys.argv[1]} cannot be started: {error.strerror}.")


if __name__ == "__main__":
    main()
