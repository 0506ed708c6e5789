"""Types of values in the configuration, with their checks."""

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, Field

__all__ = ["AbsolutePath", "BasePath", "Listen", "ServerAddress", "TimeZone", "Url", "Word"]


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError(f"must be an absolute path, not '{path}'")
    return path


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or text.endswith("/"):
        raise ValueError(f"must be like 'https://host:port' without a trailing slash, not {text!r}")
    return text


def _server_address(text: str) -> str:
    if text.startswith("/") and len(text) > 1:
        return text
    parts = urlsplit(text)
    try:
        has_port = parts.port is not None or parts.scheme == "https"
    except ValueError:
        has_port = False
    if parts.scheme not in ("http", "https") or not parts.hostname or not has_port or parts.path:
        raise ValueError(
            f"must be the path of a socket, or like 'http://host:6820' without a trailing slash, not {text!r}"
        )
    return text


def _base_path(text: str) -> str:
    if not (text.startswith("/") and text.endswith("/")):
        raise ValueError(f"must begin and end with a slash, not {text!r}")
    return text


def _listen(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"must be like '127.0.0.1:8100', not {text!r}")
    return text


def _zone(name: str) -> str:
    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise ValueError(f"must be a time zone like 'Europe/Berlin' or 'UTC', not {name!r}") from None
    return name


AbsolutePath = Annotated[Path, AfterValidator(_absolute)]
Url = Annotated[str, AfterValidator(_url)]
ServerAddress = Annotated[str, AfterValidator(_server_address)]
BasePath = Annotated[str, AfterValidator(_base_path)]
Listen = Annotated[str, AfterValidator(_listen)]
TimeZone = Annotated[str, AfterValidator(_zone)]
Word = Annotated[str, Field(min_length=1)]
