"""The definition files, and which of them derive from which."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .errors import BuildError

HERE = Path(__file__).resolve().parents[1]
#: Libraries that change seldom; images derive from them and add what this project brings. No user sees them.
LAYERS = HERE / "layers"
REPOSITORY = HERE.parent.parent
SUITE = "bookworm"
#: Where a definition finds them in `%post`: /mnt/src/NAME.
SOURCES = {
    "runtime": REPOSITORY / "containers/runtime",
    "carme": REPOSITORY / "carme",
    "spawner": REPOSITORY / "spawner",
    "examples": HERE / "examples",
    "apps": HERE / "apps",
    "compiler": HERE / "compiler",
    "finish": HERE / "finish",
    "horovod": HERE / "horovod",
    "native": HERE / "native",
    "platform": HERE / "platform",
}
#: Apps of the single-user server itself; any other needs a program `/opt/carme/apps/NAME` in the image.
OWN_APPS = ("lab", "terminal")


@dataclass(frozen=True)
class Definition:
    """One image or layer: its definition file and what that names."""

    file: Path
    text: str

    @property
    def name(self) -> str:
        """The name of the file without its ending."""
        return self.file.stem

    @property
    def is_layer(self) -> bool:
        """Whether other images are made from it and nobody starts it."""
        return self.file.parent == LAYERS

    @property
    def parent(self) -> str | None:
        """The image it derives from (`From: {{ NAME }}`), None for one that starts from Debian."""
        found = re.search(r"^From:\s*\{\{\s*(\w+)\s*\}\}", self.text, re.MULTILINE)
        return found[1] if found else None

    @property
    def arguments(self) -> set[str]:
        """The names in double braces."""
        code = "\n".join(line for line in self.text.splitlines() if not line.lstrip().startswith("#"))
        return set(re.findall(r"\{\{\s*([\w-]+)\s*\}\}", code))

    @property
    def sources(self) -> list[str]:
        """The folders of this project that it copies from /mnt/src."""
        return sorted(name for name in SOURCES if f"/mnt/src/{name}" in self.text)

    @property
    def labels(self) -> dict[str, str]:
        """Its `%labels` that begin with `carme.`, without that prefix."""
        return dict(re.findall(r"^\s+carme\.(\S+)\s+(.+?)\s*$", self.text, re.MULTILINE))

    @property
    def entry_points(self) -> dict[str, str]:
        """The apps that it offers, with their titles."""
        prefix = "entry-point."
        return {k.removeprefix(prefix): v for k, v in self.labels.items() if k.startswith(prefix)}

    def manifest(self, digest: str, built: str) -> dict[str, object]:
        """What the catalogue of images reads, but for the packages, which are looked up in the image."""
        labels = self.labels
        return {
            "name": self.name,
            "title": labels.get("title", self.name),
            "description": labels.get("description", ""),
            "digest": digest,
            "built": built,
            "entry_points": self.entry_points,
        }


def definitions() -> dict[str, Definition]:
    """All images and layers by name."""
    files = [*sorted(HERE.glob("*.def")), *sorted(LAYERS.glob("*.def"))]
    return {file.stem: Definition(file, file.read_text()) for file in files}


def image_names(known: dict[str, Definition]) -> list[str]:
    """The names of what users can start: all but the layers."""
    return [name for name, definition in known.items() if not definition.is_layer]


def in_order(names: list[str], known: dict[str, Definition]) -> list[Definition]:
    """The named images, each after the one it derives from."""
    ordered: list[Definition] = []

    def add(name: str, below: tuple[str, ...] = ()) -> None:
        if name not in known:
            wanted_by = f" (which '{below[-1]}' derives from)" if below else ""
            raise BuildError(
                f"There is no image called '{name}'{wanted_by}. "
                f"Choose from {', '.join(image_names(known))}, or add {name}.def."
            )
        if name in below:
            raise BuildError(f"The image '{name}' derives from itself. Correct the From: line of {name}.def.")
        definition = known[name]
        if definition.parent:
            add(definition.parent, (*below, name))
        if definition not in ordered:
            ordered.append(definition)

    for name in names:
        add(name)
    return ordered


def debian_packages() -> list[str]:
    """The Debian packages that every image holds."""
    lines = (HERE / "debian-packages.txt").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]
