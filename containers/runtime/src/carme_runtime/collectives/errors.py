"""What can go wrong between ranks."""

from carme_runtime.errors import CarmeRuntimeError


class GaspiError(CarmeRuntimeError):
    """The base of all errors of the transport and the collectives."""


class InvalidCall(GaspiError, ValueError):
    """The call itself is wrong: a rank, a segment, an offset or a type that does not exist."""


class OperationFailed(GaspiError):
    """An operation that was begun could not be brought to its end."""


class Timeout(OperationFailed):
    """The time that was allowed is over."""


class PeerLost(OperationFailed):
    """A rank ended, or can no longer be reached."""


class Mismatch(OperationFailed):
    """Ranks called different collectives, or with different shapes or types."""


class OutOfResources(OperationFailed):
    """The system refused memory or another resource."""


class WrongKey(GaspiError):
    """A peer does not hold the key of this job."""


class CoreMissing(GaspiError):
    """carme_runtime was installed without its native core."""
