"""What `carme-run` knows of a run before it starts: what backends make variables and programs from."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from carme_runtime.launcher.dask_pages import Pages, pages_of
from carme_runtime.launcher.placement import Place


@dataclass(frozen=True)
class Setup:
    """What the variables of a run are made from.

    Args:
        places: Of all ranks.
        ports: Free ones, in the order of the backend's `ports`; a dry run has 0 for each.
        caller: The environment that ranks get from the process that starts them.
        devices_per_rank: What the option of that name says.
        no_gpu: What the option of that name says.
        secrets: By name, those variables of the run that nobody else may know; a dry run has others for them.
    """

    places: list[Place]
    ports: list[int]
    caller: Mapping[str, str] = field(default_factory=dict)
    devices_per_rank: int | None = None
    no_gpu: bool = False
    secrets: Mapping[str, str] = field(default_factory=dict)

    @functools.cached_property
    def pages(self) -> Pages | None:
        """Where a run of Dask shows its pages: this run's own as long as there is this setup."""
        return pages_of(self.caller, self.places[0].member.host)
