"""Simulated driver libraries for GPUs that this machine lacks: they show a file, see simulated_nvml.c."""

import base64
import subprocess
from pathlib import Path

from demo_site import DemoSite

SOURCE = Path(__file__).with_name("simulated_nvml.c")
LIBRARY = "libnvidia-ml.so.1"
AMD_SOURCE = Path(__file__).with_name("simulated_amdsmi.c")
AMD_LIBRARY = "libamd_smi.so"


def build(folder: Path, shown: str | None = None, *, unchanging: bool = False) -> Path:
    """Compile NVIDIA's library into a folder.

    Args:
        folder: Where to.
        shown: The file that it shows; None: the one that `$SIMULATED_NVML` names.
        unchanging: Whether it reads that once; else at every call, which takes its time.
    """
    more = [f'-DSHOWN="{shown}"'] if shown else []
    more += ["-DUNCHANGING"] if unchanging else []
    return _compile(SOURCE, folder / LIBRARY, more)


def build_amd(folder: Path) -> Path:
    """Compile AMD's library into a folder; it shows the file that `$SIMULATED_AMDSMI` names."""
    return _compile(AMD_SOURCE, folder / AMD_LIBRARY, [])


def _compile(source: Path, library: Path, more: list[str]) -> Path:
    arguments = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", *more]
    subprocess.run([*arguments, f"-Wl,-soname,{library.name}", "-o", library, source], check=True)
    return library


def put(demo: DemoSite, node: str, library: Path, folder: str) -> None:
    """Copy the library to a folder of one of the demo's hosts."""
    demo.run(node, "mkdir", "-p", folder)
    content = base64.encodebytes(library.read_bytes()).decode()
    demo.run(node, "sh", "-c", f"base64 -d >{folder}/{LIBRARY}", data=content)
