"""What programs of a job note in its folder, for its page. The owner could have written it otherwise."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["JobFacts", "NetPicture"]


class JobFacts(BaseModel):
    """Where a job began: its image's digest, the Git repository of its working folder, failing login files.

    What is not known is empty.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    image: Annotated[str, Field(max_length=100)] = ""
    digest: Annotated[str, Field(max_length=100)] = ""
    repository: Annotated[str, Field(max_length=4096)] = ""
    branch: Annotated[str, Field(max_length=500)] = ""
    revision: Annotated[str, Field(max_length=64)] = ""
    login: Annotated[str, Field(max_length=2000)] = ""


class NetPicture(BaseModel):
    """The Petri net that a job runs or has run, as its program drew it last; of several, the latest.

    `svg` must not be made a part of a page. `state` is empty where the job has no net, else running, resting
    (nothing can start) or failed. `at` is a time in seconds since 1970; `running`, `ended` and `tokens` are
    sums over the net. A net too large has no `svg`.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: Annotated[str, Field(max_length=200)] = ""
    state: Literal["", "running", "resting", "failed"] = ""
    error: Annotated[str, Field(max_length=2000)] = ""
    at: Annotated[float, Field(ge=0, le=1e11)] = 0.0
    running: Annotated[int, Field(ge=0)] = 0
    ended: Annotated[int, Field(ge=0)] = 0
    tokens: Annotated[int, Field(ge=0)] = 0
    svg: Annotated[str, Field(max_length=262_144)] = ""
