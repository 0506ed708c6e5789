"""A simulated driver library for GPUs that cannot be here: what it shows is a file, see simulated_nvml.c."""

import base64
import subprocess
from pathlib import Path

from demo_site import DemoSite

SOURCE = Path(__file__).with_name("simulated_nvml.c")
LIBRARY = "libnvidia-ml.so.1"


def build(folder: Path, shown: str | None = None, *, unchanging: bool = False) -> Path:
    """Compile the library into a folder.

    Args:
        folder: Where to.
        shown: The file that it shows; None: the one that `$SIMULATED_NVML` names.
        unchanging: Whether it reads that once; else at every call, which takes its time.
    """
    library = folder / LIBRARY
    more = [f'-DSHOWN="{shown}"'] if shown else []
    more += ["-DUNCHANGING"] if unchanging else []
    arguments = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", *more]
    subprocess.run([*arguments, f"-Wl,-soname,{LIBRARY}", "-o", library, SOURCE], check=True)
    return library


def put(demo: DemoSite, node: str, library: Path, folder: str) -> None:
    """Copy the library to a folder of one of the demo's hosts."""
    demo.run(node, "mkdir", "-p", folder)
    content = base64.encodebytes(library.read_bytes()).decode()
    demo.run(node, "sh", "-c", f"base64 -d >{folder}/{LIBRARY}", data=content)
