"""Probes' results among a user's files, read as that user."""

import hashlib
from typing import NamedTuple

from django.core.cache import cache

from carme.broker import BrokerClient
from carme.errors import BrokerTimeout, BrokerUnavailable, CarmeError
from carme.files.client import Entry, Files
from carme.scaling import MOST_BYTES, Curve, Prediction, read_curve, too_large
from carme_webui.accounts.models import User
from carme_webui.files.places import checked_path, places_of

__all__ = ["Probe", "curve_of", "is_named_like_result", "probe_files"]

#: Seconds for which a result is remembered: the form asks again at each change of a number.
REMEMBERED = 15
#: Files that the form proposes.
MOST_FILES = 50
_WORD, _END = "scal", ".json"


class Probe(NamedTuple):
    """What a form says of a prediction.

    Attributes:
        path: Of the result, absolute or from the user's home.
        steps: Of the whole training; None: unknown.
        reason: Why so many GPUs are requested.
    """

    path: str
    steps: int | None = None
    reason: str = ""

    def prediction(self, user: User, broker: BrokerClient, nodes: int, gpus_per_node: int) -> Prediction:
        """What a job of this size keeps. Raises CarmeError."""
        return curve_of(self.path, user, broker).prediction(nodes, gpus_per_node, self.steps, self.reason)


def curve_of(path: str, user: User, broker: BrokerClient) -> Curve:
    """The table of a result.

    Args:
        path: Absolute, or from the user's home.

    Raises:
        InvalidRequest: It is not a result that can be used, or not in a folder that the portal shows.
        CarmeError: The file cannot be read as this user, or the broker does not answer.
    """
    key = f"probe:{user.pk}:{hashlib.sha256(path.encode(errors='surrogatepass')).hexdigest()}"
    if (known := cache.get(key)) is not None:
        return known
    files = Files(broker, user.username)
    try:
        places = places_of(files)
        whole = checked_path(path if path.startswith("/") else f"{places[0].path.rstrip('/')}/{path}", places)
        with files.read(whole) as part:
            if part.size > MOST_BYTES:
                raise too_large(whole)
            data = b"".join(part)
    except (BrokerUnavailable, BrokerTimeout):
        raise
    except CarmeError as error:
        error.field = "scaling"
        raise
    curve = read_curve(data, whole)
    cache.set(key, curve, REMEMBERED)
    return curve


def is_named_like_result(entry: Entry) -> bool:
    """Whether a file may be a result, by its name."""
    return entry.kind == "file" and _WORD in entry.name.lower() and entry.name.endswith(_END)


def probe_files(user: User, broker: BrokerClient) -> list[str]:
    """Names of files in the user's home that look like results. Raises CarmeError."""
    files = Files(broker, user.username)
    entries = files.show(files.home()).entries
    found = [entry for entry in entries if is_named_like_result(entry)]
    found.sort(key=lambda entry: -entry.changed)
    return [entry.name for entry in found if entry.name.isprintable()][:MOST_FILES]
