"""What has passed a check need not be checked again while all that decides about it is the same.

A result counts for a day: what is checked then is checked anew, whether it has changed or not. With
`./test --all` none counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from suites.debian import CACHE

__all__ = ["ALL", "SECONDS", "Passed", "key_of_files", "keys_of_modules"]

#: The variable by which `./test --all` reaches what it starts.
ALL = "CARME_ALL"

#: How long a result counts.
SECONDS = 24 * 3600
#: An import of Python, at any depth: its module and names, or its modules. One that stands in a text adds
#: modules to what is compared, and no more.
_IMPORT = re.compile(
    r"(?:^|[;:])[ \t]*(?:"
    r"from[ \t]+(?P<module>[.\w]+)[ \t]+import[ \t\\\n]+(?P<names>\([^)]*\)|(?:[^\n\\;]|\\\n)+)"
    r"|import[ \t]+(?P<modules>(?:[^\n\\;]|\\\n)+))",
    re.MULTILINE,
)
_NAME = re.compile(r"[.\w]+|\*")
#: A comment could end a list of names too early. What else this finds, in texts, holds no import.
_COMMENT = re.compile(r"#[^\n]*")


class Passed:
    """The keys of what has passed a check on this machine within the last day.

    Args:
        check: The name of the check.
    """

    def __init__(self, check: str) -> None:
        self._file = CACHE / "passed" / f"{check}.json"

    def recent(self) -> dict[str, float]:
        """The keys that count, each with the seconds since 1970 at which it passed."""
        return {} if os.environ.get(ALL) else self._saved()

    def _saved(self) -> dict[str, float]:
        now = time.time()
        try:
            found = json.loads(self._file.read_text())
            return {key: at for key, at in found.items() if now - SECONDS < at <= now}
        except (OSError, ValueError, AttributeError, TypeError):  # none yet, or not ours
            return {}

    def add(self, keys: Iterable[str]) -> None:
        """Note that these have passed just now. Who may not write here checks all again."""
        content = json.dumps(self._saved() | dict.fromkeys(keys, time.time()))
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            draft = self._file.with_suffix(".new")
            draft.write_text(content)
            draft.replace(self._file)


def key_of_files(root: Path, files: Iterable[Path], about: bytes) -> str:
    """One key for files, which changes with their names and what they hold.

    Args:
        root: The folder to which their names refer.
        files: Which.
        about: What decides besides: versions and options.
    """
    digest = hashlib.sha256(about)
    for file in sorted(files):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"\0{file.relative_to(root).as_posix()}\0{content}".encode())
    return digest.hexdigest()[:32]


def keys_of_modules(
    root: Path, files: Iterable[Path], search_paths: Iterable[str], about: bytes
) -> dict[Path, str]:
    """A key for each module of Python, which changes with it and with all that it imports of these files.

    Which file an import means depends on where a reader looks first: all that it may mean count, also of
    modules that these import in turn. So a key changes too often rather than too seldom.

    Args:
        root: The folder that the files are below.
        files: All modules that may be imported.
        search_paths: Folders below it in which modules are searched, besides those that a module is in.
        about: What decides besides: versions and options.
    """
    modules = _Modules(root, files, search_paths)
    return {file: modules.key(file, about) for file in modules.files}


#: Where a file is, or a module is searched: the words of its path below the tree's root, without an ending.
_Place = tuple[str, ...]
#: Begins the name of a module whose place is known.
_HERE = "."


class _Modules:
    """Modules of Python by their places in the tree, with what each of them imports."""

    def __init__(self, root: Path, files: Iterable[Path], search_paths: Iterable[str]) -> None:
        self.files = sorted(files)
        self._by_place: dict[_Place, list[Path]] = {}
        self._by_folder: dict[_Place, list[Path]] = {}
        for file in self.files:
            place = _place_of(file.relative_to(root))
            self._by_place.setdefault(place, []).append(file)
            self._by_folder.setdefault(place[:-1], []).append(file)
        searched = [(), *(PurePosixPath(path).parts for path in search_paths)]
        self._sums: dict[Path, bytes] = {}
        self._imported: dict[Path, set[Path]] = {}
        for file in self.files:
            path, content = file.relative_to(root), file.read_bytes()
            self._sums[file] = f"\0{path.as_posix()}\0{hashlib.sha256(content).hexdigest()}".encode()
            own = path.parent.parts
            folders = {*searched, *(own[:length] for length in range(len(own) + 1))}
            names = _imports(content.decode(errors="replace"), own)
            self._imported[file] = {found for name in names for found in self._found(name, folders)}

    def key(self, file: Path, about: bytes) -> str:
        """The key of a module."""
        reached, left = {file}, [file]
        while left:
            new = self._imported[left.pop()] - reached
            reached |= new
            left += new
        digest = hashlib.sha256(about + self._sums[file])
        for each in sorted(reached):
            digest.update(self._sums[each])
        return digest.hexdigest()[:32]

    def _found(self, name: _Place, folders: Iterable[_Place]) -> Iterator[Path]:
        """The modules of a name in these folders; `*` as its last word stands for all of a package."""
        for place in [name[1:]] if name[0] == _HERE else [(*folder, *name) for folder in folders]:
            if place and place[-1] == "*":
                yield from self._by_folder.get(place[:-1], ())
            else:
                yield from self._by_place.get(place, ())


def _place_of(file: Path) -> _Place:
    """That of a module; a package is where its folder is."""
    return file.parent.parts if file.stem == "__init__" else file.with_suffix("").parts


def _imports(source: str, folder: _Place) -> set[_Place]:
    """The names of modules that a source may import, and of the packages that these are in.

    Args:
        source: Of a module.
        folder: The package that the module is in.
    """
    found: set[_Place] = set()
    for match in _IMPORT.finditer(_COMMENT.sub("", source)):
        if match["module"]:
            base = _absolute(match["module"], folder)
            found |= {(*base, name) for name in _NAME.findall(match["names"]) if "." not in name}
            names = [base]
        else:
            names = [tuple(name.split(".")) for name in _NAME.findall(match["modules"])]
        found |= {name[:length] for name in names for length in range(1, len(name) + 1)}
    return found


def _absolute(module: str, folder: _Place) -> _Place:
    """The name of a module; dots at its beginning lead to its place from that of the module beside it."""
    name = module.lstrip(".")
    words = tuple(name.split(".")) if name else ()
    above = len(module) - len(name)
    return (_HERE, *folder[: len(folder) + 1 - above], *words) if above else words
