"""The exit codes by which `carme-job` says why it could not run a job."""

from enum import IntEnum

from carme.errors import CarmeError

#: How lines about a job's data begin in its log; the node and a colon follow.
DATA_LINE = "carme-job: data on "


class Exit(IntEnum):
    """An exit code of `carme-job` itself; programs of users hardly ever end with one of these."""

    FAILED = 230
    IMAGE_MISSING = 231
    HOME_NOT_WRITABLE = 232
    NO_APPTAINER = 233
    NO_COMMAND = 234
    NO_WORKDIR = 235
    BEGUN_BEFORE = 236
    NOT_STAGED = 237
    IMAGE_CHANGED = 238


class LaunchError(CarmeError):
    """A job could not be launched on its nodes."""

    default_code = "launch"

    def __init__(self, exit_code: Exit, message: str, remedy: str) -> None:
        super().__init__(message, remedy)
        self.exit_code = exit_code
