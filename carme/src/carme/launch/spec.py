"""The specification of a job: what the broker decides and `carme-job` reads on the compute nodes.

It travels as `spec.json` in the job's folder. Sessions wait for `carme-job`, so this imports no more than
named tuples need.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

__all__ = ["JobSpec", "StageSpec", "StagingPlaces"]


class StageSpec(NamedTuple):
    """A folder or file that is copied for the job.

    Attributes:
        source: Where it lies, on all nodes.
        target: Where the copy goes: `local`, `scratch`, `ram` or `beeond`.
        name: What the job finds it under, in the folder that `CARME_DATA` names.
        version: The digest of a dataset's version; empty: what lies there now.
        key: What distinguishes the copy from others in the cache.
    """

    source: str
    target: str
    name: str
    version: str
    key: str


class StagingPlaces(NamedTuple):
    """Where the site has room for copies: of `[staging]`, what `carme-job` needs. Empty: nowhere."""

    cache: str = ""
    cache_gb: int = 0
    scratch: str = ""
    beeond: str = ""


class JobSpec(NamedTuple):
    """What a job does on its nodes.

    Attributes:
        command: The program and its arguments; none: the job ends when its data is there.
        name, kind: The job's name, and whether it is a session or a batch job.
        image, image_name: The image's file and name; None: the command runs on the host itself.
        digest: What the image has, or, if it is a user's own (`own_image`), must have.
        nodes, cpus, gpus, gpu_type: How many nodes, and what it has on each.
        workdir: Where the command begins; None: in the home directory.
        binds: Folders of the host that the container sees.
        stage, results: What is copied before, and where results go afterwards.
        array: Whether this is an array, whose tasks make a specification each.
        staging: Where copies go.
        log: The task's log; empty: the job's `output.log`.
        help: The address of the portal's help; empty: programs of the job name none.
    """

    command: Sequence[str] = ()
    name: str = ""
    kind: str = "batch"
    image: str | None = None
    image_name: str | None = None
    digest: str = ""
    own_image: bool = False
    nodes: int = 1
    cpus: int = 1
    gpus: int = 0
    gpu_type: str | None = None
    workdir: str | None = None
    binds: Sequence[str] = ()
    stage: Sequence[StageSpec] = ()
    results: str | None = None
    array: bool = False
    staging: StagingPlaces = StagingPlaces()
    log: str = ""
    help: str = ""

    @property
    def wants_data(self) -> bool:
        """Whether data is copied to the job, or its results from it."""
        return bool(self.stage or self.results)

    @classmethod
    def load(cls, values: dict[str, Any]) -> Self:
        """The specification that `dump` wrote, also by another version: unknown fields are left out.

        Raises:
            ValueError: It is damaged.
        """
        try:
            spec = cls(**_known_fields(cls, values))
            return spec._replace(
                stage=[StageSpec(**_known_fields(StageSpec, stage)) for stage in values.get("stage") or ()],
                staging=StagingPlaces(**_known_fields(StagingPlaces, values.get("staging") or {})),
            )
        except (AttributeError, TypeError) as error:
            raise ValueError(f"no specification of a job: {error}") from error

    def dump(self) -> dict[str, Any]:
        """It as plain values."""
        return self._asdict() | {
            "stage": [stage._asdict() for stage in self.stage],
            "staging": self.staging._asdict(),
        }


def _known_fields(kind: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in kind._fields}
