"""Pack parts of the source tree into archives that are the same, bit for bit, as long as the source is.

Usage: pack_part.py SOURCE DESTINATION PART...
Prints {"PART": {"archive": PATH, "sha256": HEX}} for all parts.

A part with native/compile.py is given what that builds, so that hosts need no compiler. Where there is none
here either, the part does without.
"""

import gzip
import hashlib
import io
import json
import runpy
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

LEFT_OUT = {"__pycache__", ".pytest_cache", ".ruff_cache", ".venv", "node_modules", "dist", "build-cache"}


def compiled(folder: Path, place: Path) -> dict[str, Path]:
    """What is built of a part: its path in the part, and the file."""
    if not (folder / "native/compile.py").exists():
        return {}
    program = runpy.run_path(str(folder / "native/compile.py"))
    found = {}
    for inside in program["BUILD_OPTIONS"]:
        name = Path(inside).name
        try:
            if program["build"](inside, place / name):
                found[inside] = place / name
                continue
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"{folder / inside} is not compiled here: {error}", file=sys.stderr)
        # Anyone who brought the tree here may have built it of this very source.
        if (shipped := folder / "native/built" / program["digest"]() / name).exists():
            found[inside] = shipped
    return found


def _files(folder: Path) -> Iterator[Path]:
    """What lies in a folder, and in the folders of the source tree that links in it lead to."""
    for path in folder.rglob("*"):
        if path.is_symlink() and path.is_dir():
            yield from _files(path)
        elif not path.is_dir():
            yield path


def pack(folder: Path) -> bytes:
    """The folder as a gzipped tar archive without times, owners or left-overs of earlier builds."""
    buffer = io.BytesIO()
    with (
        tempfile.TemporaryDirectory() as place,
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0, compresslevel=6) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.GNU_FORMAT) as archive,
    ):
        built = compiled(folder, Path(place))
        paths = {str(path.relative_to(folder)): path for path in _files(folder)} | built
        for inside, path in sorted(paths.items(), key=lambda pair: Path(pair[0])):
            parts = set(Path(inside).parts)
            if LEFT_OUT & parts or any(part.endswith(".egg-info") for part in parts):
                continue
            if parts >= {"native", "built"}:
                continue
            # What was built in the tree may be of another day or another machine.
            if path.suffix == ".so" and inside not in built:
                continue
            entry = archive.gettarinfo(str(path), arcname=f"{folder.name}/{inside}")
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = "root"
            entry.mtime = 0
            entry.mode = 0o755 if entry.mode & 0o100 else 0o644
            if entry.isreg():
                with path.open("rb") as content:
                    archive.addfile(entry, content)
            else:
                archive.addfile(entry)
    return buffer.getvalue()


def main(source: Path, destination: Path, parts: list[str]) -> int:
    """Write one archive per part; 1 when a part is not there."""
    missing = [part for part in parts if not (source / part).is_dir()]
    if missing:
        print(
            f"{source} has no folder {', '.join(missing)}, but these parts are to be installed. "
            "Point carme_source at a complete source tree of Carme.",
            file=sys.stderr,
        )
        return 1
    destination.mkdir(parents=True, exist_ok=True)
    result = {}
    for part in parts:
        content = pack(source / part)
        archive = destination / f"{part.replace('/', '-')}.tar.gz"
        if not archive.exists() or archive.read_bytes() != content:
            # Another run may read it at this moment.
            with tempfile.NamedTemporaryFile(dir=destination, delete=False) as new:
                new.write(content)
            Path(new.name).replace(archive)
        result[part] = {"archive": str(archive), "sha256": hashlib.sha256(content).hexdigest()}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]).expanduser(), sys.argv[3:]))
