"""Build what is compiled of this part; compile.py [OUTPUT]: the library. Exits with 3 without a C compiler.

Needs nothing but Python, so that hosts, the machine that installs them and the tests build it alike.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
#: What copies. Where it belongs, seen from the part's folder: beside the module that loads it.
LIBRARY = f"src/carme/staging/copying-{platform.machine()}.so"
#: The command `carme`, which is installed among the scripts; it is here only in sources packed for hosts.
PROGRAM = f"native/carme-{platform.machine()}"
#: They may be run on other hosts than this one, so they are made for the architecture's oldest processors.
FLAGS = ("-O2", "-std=gnu17", "-Wall", "-Wextra", "-pthread", "-Wl,--build-id=none", "-s")
#: What copies, by the files of its parts: both have it.
COPYING = ("copying.c", "folders.c", "compare.c", "walk.c", "ranges.c")
#: The program brings the C library along, as that of a host may be older: Python has to be started there too.
BUILD_OPTIONS = {LIBRARY: ("-fPIC", "-shared", *COPYING), PROGRAM: ("-static", "carme.c", *COPYING)}


def digest() -> str:
    """What distinguishes what was built of this source from others."""
    parts = [source.read_bytes() for source in sorted(FOLDER.glob("*.[ch]"))]
    flags = (*FLAGS, *BUILD_OPTIONS[LIBRARY], *BUILD_OPTIONS[PROGRAM], platform.machine())
    return hashlib.sha256(b"\0".join([*parts, " ".join(flags).encode()])).hexdigest()[:16]


def build(what: str, output: Path, *more: str) -> bool:
    """Make the library or the program, completely or not at all.

    Args:
        what: LIBRARY or PROGRAM.
        output: Its file.
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
    # A library by its name, too, so that anyone who packs the tree meanwhile leaves it out.
    building = output.with_name(f".{os.getpid()}-{output.name}")
    try:
        # By their names alone: nothing of this machine's paths is to be in the library.
        command = [*compiler.split(), *FLAGS, *more, "-o", str(building), *BUILD_OPTIONS[what]]
        subprocess.run(command, check=True, cwd=FOLDER)
        building.replace(output)
    finally:
        building.unlink(missing_ok=True)
    return True


if __name__ == "__main__":
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER.parent / LIBRARY
    sys.exit(0 if build(LIBRARY, output.resolve()) else 3)
