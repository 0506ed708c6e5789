"""The single-user server inside a job: JupyterLab on the node's cluster address, reported to the hub at once.

Installed in job images without this package's dependencies: it may import JupyterHub's and Jupyter's own
packages, and `carme.translation`, which images have with the command `carme`. Little is imported here,
because all that a session's start imports is paid for at each start.
"""

from carme_spawner.singleuser.process_start import STARTED  # isort: skip  first: it takes the time

import gc
import os
import sys

__all__ = ["STARTED", "main"]


def main() -> None:
    """`carme-singleuser`: run the server; needs the environment that the hub gives to its servers."""
    missing = [n for n in ("JUPYTERHUB_API_URL", "JUPYTERHUB_API_TOKEN") if not os.environ.get(n)]
    if missing:
        sys.exit(
            f"carme-singleuser: {' and '.join(missing)} must be set. "
            "Only the hub starts this program, in the job of a session."
        )
    if not sys.flags.no_user_site:
        # What users install in their home must not keep the server from starting; their kernels still see it.
        # Job images start the program with this flag, so that no second interpreter is needed.
        os.execv(sys.executable, [sys.executable, "-s", "-m", "carme_spawner.singleuser", *sys.argv[1:]])
    # What a start allocates stays: looking through it again and again costs a tenth of the start.
    gc.disable()
    from carme_spawner.singleuser.certificates import Certificates

    try:
        certificates = Certificates.of_job()
    except FileNotFoundError as error:
        sys.exit(f"carme-singleuser: {error}")
    if certificates:
        # Before JupyterHub is imported, which reads the environment then.
        certificates.announce()
    from carme_spawner.singleuser import imports

    imports.prepare()
    from carme_spawner.singleuser.server import run

    run(certificates)
