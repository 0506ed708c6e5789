"""GPI-2 itself, and programs for it. It is in no package index: CARME_GPI2 names the folder that has it.

./autogen.sh && ./configure --prefix=FOLDER --with-ethernet --without-fortran && make && make install
"""

import os
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "native/programs/gpi2_step.c"


def compiled(program: Path) -> Path:
    """The program of one step, with GPI-2 inside; the test is skipped where there is no GPI-2.

    Args:
        program: The file that is made.
    """
    library = _installed("libGPI2.a")
    include = library.parents[1] / "include"
    command = ["cc", f"-I{include}", str(SOURCE), str(library), "-lpthread", "-lm", "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def shared_library() -> Path:
    """GPI-2 as a shared library; the test is skipped where there is no GPI-2."""
    return _installed("libGPI2.so")


def _installed(name: str) -> Path:
    folder = os.environ.get("CARME_GPI2")
    if not folder:
        pytest.skip("CARME_GPI2 names no folder in which GPI-2 is installed")
    library = next(Path(folder).glob(f"lib*/{name}"), None)
    if library is None:
        pytest.fail(
            f"CARME_GPI2 names {folder}, which has no lib*/{name}. Name the --prefix of its installation."
        )
    return library
