"""The configuration of a head that is this host, for tests of two heads."""

import json
import os
import socket
import sys
from pathlib import Path

#: Programs find this source as the tests do.
SOURCE = os.pathsep.join(filter(None, sys.path))


def configured(folder: Path, server: str) -> Path:
    """The configuration of a head that is this host."""
    (folder / "portal").mkdir(parents=True)
    file = folder / "carme.toml"
    file.write_text(
        f"""
[site]
url = "https://carme.example.org"
[slurm]
cluster = "c"
[broker]
state_directory = "{folder}/broker"
[hub]
database = "{server}"
state_directory = "{folder}/hub"
[portal]
database = "{server}"
state_directory = "{folder}/portal"
[secrets]
directory = "{folder}/secrets"
[heads]
names = [{json.dumps(socket.gethostname())}, "other"]
lease_seconds = 600
"""
    )
    return file
