"""`python -m carme.sandbox FOLDER`: the broker over a sandbox, in a folder that `make_site` has made."""

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from carme.broker.daemon import serve
from carme.config import load
from carme.errors import CarmeError
from carme.sandbox.accounts import accounts_in
from carme.sandbox.gateway import SandboxSlurm
from carme.sandbox.site import Places
from carme.slurm.account import pretend_accounts


def main() -> int:
    """Run the broker until SIGTERM or SIGINT; its exit code."""
    parser = argparse.ArgumentParser(
        prog="carme-sandbox", description="The broker over a cluster without Slurm."
    )
    parser.add_argument("folder", type=Path, help="the sandbox's folder")
    parser.add_argument("--nodes", type=int, default=2, help="how many nodes are pretended (default: 2)")
    parser.add_argument("--gpus", type=int, default=4, help="how many GPUs each has (default: 4)")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    places = Places(options.folder.resolve())
    try:
        pretend_accounts(accounts_in(places.homes))
        slurm = SandboxSlurm(places.slurm, nodes=options.nodes, gpus=options.gpus, kill_wait=5.0)
        asyncio.run(serve(load(places.configuration), slurm.opened()))
    except CarmeError as error:
        print(f"carme-sandbox: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
