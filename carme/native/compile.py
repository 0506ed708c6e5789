"""Build the compiled part of copying: compile.py [OUTPUT]. Exits with 3 where there is no C compiler.

Needs nothing but Python, so that hosts, the machine that installs them and the tests build it alike.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "copying.c"
#: Where it belongs, seen from the part's folder: beside the module that loads it.
LIBRARY = f"src/carme/staging/copying-{platform.machine()}.so"
#: It may be run on other hosts than this one, so it is made for the architecture's oldest processors.
FLAGS = ("-O2", "-std=gnu17", "-Wall", "-Wextra", "-fPIC", "-shared", "-pthread", "-Wl,--build-id=none", "-s")


def digest() -> str:
    """What tells a library that was built of this source from others."""
    parts = (SOURCE.read_bytes(), " ".join(FLAGS).encode(), platform.machine().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def build(output: Path, *more: str) -> bool:
    """Make the library, completely or not at all.

    Args:
        output: The library's file.
        more: Further arguments for the compiler.

    Returns:
        Whether there is a compiler.

    Raises:
        subprocess.CalledProcessError: The compiler refused.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler or sys.platform != "linux":
        return False
    output.parent.mkdir(parents=True, exist_ok=True)
    # A library by its name, too, so that whoever packs the tree meanwhile leaves it out.
    building = output.with_name(f".{os.getpid()}-{output.name}")
    try:
        # By its name alone: nothing of this machine's paths is to be in the library.
        command = [*compiler.split(), *FLAGS, *more, "-o", str(building), SOURCE.name]
        subprocess.run(command, check=True, cwd=SOURCE.parent)
        building.replace(output)
    finally:
        building.unlink(missing_ok=True)
    return True


if __name__ == "__main__":
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE.parents[1] / LIBRARY
    sys.exit(0 if build(output.resolve()) else 3)
