"""Dask over the nodes of a job: its scheduler on the first, a worker for each rank, the script once."""

import sys
from typing import TYPE_CHECKING

from carme_runtime.launcher.programs import Process, Program

if TYPE_CHECKING:
    from carme_runtime.launcher.placement import Place
    from carme_runtime.launcher.run_setup import Setup

#: Where the scheduler shows its pages: a Unix socket, as ports are open to every user of the node.
PAGES = "CARME_DASK_PAGES"
_LINK = "DASK_DISTRIBUTED__DASHBOARD__LINK"
#: What the script gets, and all of Dask's processes.
SETS = (
    "DASK_SCHEDULER_ADDRESS",
    "DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION",
    "DASK_DISTRIBUTED__COMM__TLS__*",
    _LINK,
)
SECRETS = (
    "DASK_DISTRIBUTED__COMM__TLS__CA_FILE",
    *(
        f"DASK_DISTRIBUTED__COMM__TLS__{role}__{part}"
        for role in ("CLIENT", "SCHEDULER", "WORKER")
        for part in ("CERT", "KEY")
    ),
)
# Workers answer HTTP without a password. With no routes they answer nothing.
_SILENT = {"DASK_DISTRIBUTED__WORKER__HTTP__ROUTES": "[]"}


def variables(setup: "Setup", host: str) -> dict[str, str]:
    """By which `distributed.Client()` finds the scheduler, and a person its pages.

    Args:
        host: Of the scheduler, as the other nodes call it.
    """
    pages = setup.pages
    base = setup.caller.get("JUPYTERHUB_SERVICE_PREFIX", "")
    return {
        "DASK_SCHEDULER_ADDRESS": f"tls://{host}:{setup.ports[0]}",
        "DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "True",
        _LINK: f"{base}app/{pages.path.stem}/status" if pages else "",
        **setup.secrets,
    }


def programs(setup: "Setup", hosts: dict[int, str]) -> list[Program]:
    """The scheduler on the first node, and a worker for each rank that there would be.

    Args:
        hosts: By a node's number, its address.
    """
    first = setup.places[0].member
    shared = variables(setup, hosts[first.number])
    pages = setup.pages
    scheduler = [sys.executable, "-m", "carme_runtime.launcher.dask_scheduler"]
    scheduler += [hosts[first.number].strip("[]"), str(setup.ports[0])]
    arguments = [
        Program(
            "Dask's scheduler",
            scheduler,
            [Process(first, shared | ({PAGES: str(pages.path)} if pages else {}))],
            "Scheduler at:",
        )
    ]
    groups: dict[tuple[str, int], list[Process]] = {}
    for place in setup.places:
        threads = max(1, place.member.cpus // place.local_size)
        own = hosts[place.member.number].strip("[]")
        groups.setdefault((own, threads), []).append(
            Process(place.member, shared | _SILENT, _own_devices(setup, place))
        )
    for (own, threads), processes in groups.items():
        command = [sys.executable, "-m", "distributed.cli.dask_worker", "--host", own]
        command += ["--nthreads", str(threads), "--no-nanny", "--death-timeout", "120"]
        command += ["--no-dashboard", "--dashboard-address", "127.0.0.1:0", "--protocol", "tls"]
        arguments.append(Program("A worker of Dask", command, processes, "Registered to:"))
    return arguments


def certificate() -> list[str]:
    """A certificate and its key for one run, in the order of SECRETS."""
    from distributed.security import Security  # pyright: ignore[reportMissingImports]

    security = Security.temporary()
    pair = [security.tls_client_cert, security.tls_client_key]
    return [security.tls_ca_file, *pair * 3]


def _own_devices(setup: "Setup", place: "Place") -> tuple[int, int] | None:
    each = setup.devices_per_rank or 1
    if not place.member.devices:
        return None
    begin = place.local_rank * each % place.member.devices
    return begin, begin + each
