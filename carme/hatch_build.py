"""Builds the compiled part of copying and the command `carme` into the wheel, where there is a C compiler.

Without them the rest does the same, slower. A source that was packed for hosts of one architecture may
bring them along: then no compiler is needed.
"""

from __future__ import annotations

import platform
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CopyingHook(BuildHookInterface[Any]):
    """Called by hatchling for each wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the library and the command, and say which hosts the wheel is for."""
        root, scripts = Path(self.root), build_data["shared_scripts"]
        if version == "editable" or sys.platform != "linux":
            scripts[str(root / "native/carme.py")] = "carme"
            return
        native = runpy.run_path(str(root / "native/compile.py"))
        library, program = (self._built(native["build"], native[what]) for what in ("LIBRARY", "PROGRAM"))
        if library and library != root / native["LIBRARY"]:
            build_data["force_include"][str(library)] = native["LIBRARY"].removeprefix("src/")
        scripts[str(program or root / "native/carme.py")] = "carme"
        if library or program:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-linux_{platform.machine()}"

    def _built(self, build: Callable[[str, Path], bool], what: str) -> Path | None:
        """What was built, else what the source brought along, if it did."""
        shipped = Path(self.root) / what
        built = Path(self.directory) / shipped.name
        try:
            if build(what, built):
                return built
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"carme: {shipped.name} is not compiled: {error}", file=sys.stderr)
        return shipped if shipped.exists() else None
