"""What belongs to a backup of a head, by the site's configuration."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from carme.config import Settings

__all__ = ["Contents", "contents"]

#: Endings of the names of SQLite's databases.
SQLITE = (".sqlite", ".sqlite3")
#: What SQLite keeps beside a database in use; a copy of the database holds it.
BESIDE_DATABASE = ("-wal", "-shm", "-journal")
#: How a database of SQLite begins (https://www.sqlite.org/fileformat.html).
_MAGIC = b"SQLite format 3\0"


@dataclass(frozen=True)
class Contents:
    """What is copied.

    Attributes:
        files: Files, links and folders, each folder before what is in it.
        sqlite: Databases of SQLite that services need, which are copied as of one moment.
        optional: Other files that look like such databases: copied like them if that works, else as files.
        postgresql: Addresses of databases on a server, by what they are called in the backup.
    """

    files: list[Path]
    sqlite: list[Path]
    optional: list[Path]
    postgresql: dict[str, str]


def contents(settings: Settings, config: Path, also: list[Path], images: bool) -> Contents:
    """What belongs to a site's backup and is there.

    Args:
        config: The site's configuration file; all of its folder belongs to it.
        also: Further files and folders.
        images: The files of images, too, not their manifests alone.
    """
    databases = {"hub": settings.database("hub"), "portal": settings.database("portal")}
    sqlite = {
        Path(address.removeprefix("sqlite:///"))
        for address in databases.values()
        if address.startswith("sqlite:///")
    }
    sqlite = {path for path in sqlite if path.exists()}
    roots = [
        *(config.parent, settings.secrets.directory, settings.broker.state_directory),
        *(settings.hub.state_directory, settings.portal.state_directory, settings.staging.datasets),
        *(settings.monitoring.certificates, settings.monitoring.portal_certificates),
        *also,
    ]
    log = settings.broker.audit_log
    # It is rotated; the older ones lie beside it.
    records = sorted(log.parent.glob(f"{log.name}*")) if log.parent.is_dir() else []
    folder = settings.images.directory
    pictures = sorted(path for path in folder.glob("*") if images or path.suffix == ".json")
    found = [*(each for root in roots for each in _walk(root)), *records, *pictures]
    present = {path for path in found if _is_database(path)}
    # The broker has databases of its own.
    sqlite |= {path for path in present if path.parent == settings.broker.state_directory}
    skipped = sqlite | present
    skipped |= {Path(f"{path}{end}") for path in skipped for end in BESIDE_DATABASE}
    files = [path for path in dict.fromkeys(found) if path not in skipped]
    servers = {name: database for name, database in databases.items() if database.startswith("postgresql:")}
    return Contents(files, sorted(sqlite), sorted(present - sqlite), servers)


def _is_database(path: Path) -> bool:
    if path.suffix not in SQLITE or path.is_symlink() or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except FileNotFoundError:
        return False  # it has gone meanwhile


def _walk(path: Path) -> Iterator[Path]:
    """A file or link, or a folder with all that is in it; sockets and the like are not kept."""
    if path.is_symlink() or path.is_file():
        yield path
    elif path.is_dir():
        yield path
        for each in sorted(path.iterdir()):
            yield from _walk(each)
