"""What can go wrong between ranks."""

from carme_runtime.errors import CarmeRuntimeError


class GaspiError(CarmeRuntimeError):
    """The base of all errors of the transport and the collectives."""


class InvalidCall(GaspiError):
    """The call itself is wrong: a rank, a segment, an offset or a type that does not exist."""


class Timeout(GaspiError):
    """The time that was allowed is over."""


class PeerLost(GaspiError):
    """A rank ended, or can no longer be reached."""


class Mismatch(GaspiError):
    """Ranks called different collectives, or with different shapes or types."""


class OutOfResources(GaspiError):
    """The system refused memory or another resource."""


class WrongKey(GaspiError):
    """A peer does not hold the key of this job."""


class CoreMissing(GaspiError):
    """carme_runtime was installed without its native core."""
