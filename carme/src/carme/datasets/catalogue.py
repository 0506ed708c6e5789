"""One JSON file a dataset: the site's in a shared folder, users' own in their homes."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from carme.datasets.models import Dataset, Version
from carme.errors import CarmeError, InvalidRequest, NotFound
from carme.jobs import Node, Stage
from carme.translation import message as _
from carme.wording import listing

__all__ = ["OWN", "Datasets", "copies", "digest_of"]

#: Where in a home its owner's own datasets are entered.
OWN = ".local/share/carme/datasets"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


class Datasets:
    """All datasets that somebody sees.

    Args:
        site: The site's folder, `settings.staging.datasets`.
        own: A user's own folder, whose datasets come before the site's of the same name; or None.
    """

    def __init__(self, site: Path, own: Path | None = None) -> None:
        self.site, self.own = site, own

    def names(self) -> list[str]:
        """The names, in order."""
        return sorted(
            {
                file.stem
                for folder in self._folders()
                for file in folder.glob("*.json")
                if _NAME.fullmatch(file.stem)
            }
        )

    def all(self) -> list[Dataset]:
        """Every dataset that can be read."""
        found = []
        for name in self.names():
            try:
                found.append(self.get(name))
            except CarmeError:
                continue
        return found

    def get(self, name: str) -> Dataset:
        """The dataset called `name`.

        Raises:
            NotFound: There is none; the message lists those that there are.
            CarmeError: Its file cannot be read.
        """
        for folder in self._folders() if _NAME.fullmatch(name) else ():
            file = folder / f"{name}.json"
            try:
                values = json.loads(file.read_text(encoding="utf-8"))
                return Dataset.model_validate({**values, "name": name, "site": folder == self.site})
            except FileNotFoundError:
                continue
            except (OSError, ValueError, TypeError) as error:
                raise CarmeError(
                    _(
                        "The file {file} of the dataset {name!r} cannot be read: {error}.",
                        file=file,
                        name=name,
                        error=error,
                    ),
                    _("Add the dataset again."),
                ) from None
        raise NotFound(
            _("There is no dataset {name!r}; there are: {names}.", name=name, names=listing(self.names())),
            _("Name one of these or an absolute path, or add one: carme datasets add NAME FOLDER"),
        )

    def add(
        self, name: str, path: str, *, site: bool = False, title: str = "", licence: str = "",
        digest: Callable[[str], tuple[str, int, int]] | None = None,
    ) -> tuple[Dataset, bool]:  # fmt: skip
        """Enter a folder as the newest version of a dataset; whether it is a version that was not there.

        Args:
            name: The dataset, made if it is not there.
            path: The folder.
            site: In the site's catalogue, not in one's own.
            title, licence: What it is and under which terms it may be used; empty: as it was.
            digest: Gives a folder's digest, files and bytes.

        Raises:
            CarmeError: The name or the folder cannot be used, or the catalogue cannot be written.
        """
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                _("{name!r} is not a valid name of a dataset.", name=name),
                _("Use 1 to 64 letters, digits, dots, underscores or hyphens."),
                field="name",
            )
        path = os.path.realpath(path)
        if not os.path.isdir(path):  # noqa: PTH112
            raise NotFound(
                _("There is no folder {path}.", path=path), _("Name the folder that holds the data.")
            )
        text, files, size = (digest or digest_of)(path)
        folder = self._folder(site)
        try:
            before = Datasets(folder).get(name)
        except NotFound:
            before = None
        versions = [
            version
            for version in (before.versions if before else [])
            if (version.digest, version.path) != (text, path)
        ]
        new = before is None or len(versions) == len(before.versions)
        versions.append(
            Version(
                digest=text, path=path, files=files, size=size, added=datetime.now(UTC).replace(microsecond=0)
            )
        )
        dataset = Dataset(
            name=name,
            title=title or (before.title if before else ""),
            licence=licence or (before.licence if before else ""),
            versions=versions,
            site=site,
        )
        self._write(folder, dataset)
        return dataset, new

    def remove(self, name: str, *, site: bool = False) -> None:
        """Take a dataset out of the catalogue; its data stays. Raises CarmeError."""
        file = self._folder(site) / f"{name}.json"
        try:
            if not _NAME.fullmatch(name):
                raise FileNotFoundError
            file.unlink()
        except FileNotFoundError:
            raise NotFound(
                _("There is no dataset {name!r} in the site catalogue.", name=name)
                if site
                else _("There is no dataset {name!r} in the own catalogue.", name=name),
                _("See 'carme datasets list'."),
            ) from None
        except OSError as error:
            raise CarmeError(
                _("{file} cannot be removed: {why}.", file=file, why=error.strerror),
                _("Only administrators change the site's catalogue."),
            ) from None

    def _folders(self) -> list[Path]:
        return [folder for folder in (self.own, self.site) if folder is not None]

    def _folder(self, site: bool) -> Path:
        folder = self.site if site else self.own
        if folder is None:
            raise InvalidRequest(
                _("There is no catalogue of your own here."), _("Name the site's with --site.")
            )
        return folder

    def _write(self, folder: Path, dataset: Dataset) -> None:
        file = folder / f"{dataset.name}.json"
        writing = folder / f".{dataset.name}.{os.getpid()}"
        try:
            folder.mkdir(mode=0o755 if dataset.site else 0o700, parents=True, exist_ok=True)
            values: dict[str, Any] = dataset.model_dump(mode="json", exclude={"site"})
            writing.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
            writing.chmod(0o644)
            writing.rename(file)
        except OSError as error:
            raise CarmeError(
                _("{file} cannot be written: {why}.", file=file, why=error.strerror),
                _("Only administrators change the site's catalogue; leave out --site for your own.")
                if dataset.site
                else _("Check that your home directory has space left."),
            ) from None


def digest_of(path: str) -> tuple[str, int, int]:
    """A folder's digest, the number of its files and their bytes.

    The digest is over the paths, sizes and strong digests of all regular files in the order of their paths:
    two folders with the same files have the same one, wherever they lie.

    Raises:
        CarmeError: Something in it cannot be read.
    """
    from carme.staging.comparing import compare
    from carme.staging.engine import worker_count
    from carme.staging.options import Options

    found: list[tuple[bytes, int, str]] = []

    def index(name: str, size: int, digest: str) -> None:
        found.append((os.fsencode(name), size, digest))

    options = Options()
    result = compare(path, path, options, index, notify=None, workers=worker_count(options, path))
    if not result.ok:
        first = result.problems[0]
        raise CarmeError(
            _(
                "{path} cannot be read in full: {first}: {reason}.",
                path=path,
                first=first.path,
                reason=first.reason,
            ),
            _("Get permission for it, or remove it."),
        )
    if not found:
        raise InvalidRequest(
            _("There are no files in {path}.", path=path),
            _("Name the folder that holds the data."),
            field="path",
        )
    whole = hashlib.blake2b(digest_size=32)
    for name, size, digest in sorted(found):
        whole.update(b"%d:%s%d:%s;" % (len(name), name, size, digest.encode()))
    return f"{result.hash}:{whole.hexdigest()}", len(found), sum(size for _, size, _ in found)


def copies(dataset: Dataset, nodes: Iterable[Node], uid: int) -> dict[str, list[str]]:
    """The nodes that hold a user's copies of each version, by digest."""
    known = list(nodes)
    found = {}
    for version in dataset.versions:
        feature = Stage(source=version.path, version=version.digest).feature(uid)
        found[version.digest] = [node.name for node in known if feature in node.features]
    return found
