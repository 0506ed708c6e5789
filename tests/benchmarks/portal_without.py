"""The portal without optimisations of its own: a Django app of `./test bench portal --without` alone.

`CARME_BENCH_WITHOUT` names what is left out: `cache`, so that each page asks the broker itself;
`object-cache`, so that Django's own cache in memory pickles what it holds (`portal_without_settings.py`);
`derived`, so that each page computes what it needs of the snapshots.
"""

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from django.apps import AppConfig

__all__ = ["VARIABLE", "Without", "ask_each_time", "compute_each_time"]

VARIABLE = "CARME_BENCH_WITHOUT"


class Without(AppConfig):
    """The last of the site's apps, as it changes what others have."""

    name = "portal_without"

    def ready(self) -> None:
        names = os.environ.get(VARIABLE, "").split(",")
        if "cache" in names:
            from carme_webui.cluster import ClusterCache

            patch.object(ClusterCache, "_cached", ask_each_time).start()
        if "derived" in names:
            from carme_webui.caches import DerivedValues

            patch.object(DerivedValues, "get", compute_each_time).start()


def ask_each_time(_cluster: Any, _name: str, ask: Callable[[], Any], **_how_long: Any) -> Any:
    """In place of `ClusterCache._cached`: what the broker answers now."""
    return ask()


def compute_each_time(_values: Any, source: Any, _key: Any, make: Callable[[Any], Any]) -> Any:
    """In place of `DerivedValues.get`: what is made of an object now."""
    return make(source)
