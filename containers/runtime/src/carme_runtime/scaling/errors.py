"""What can go wrong between a probe and a prediction."""

from carme_runtime.errors import CarmeRuntimeError


class ScalingError(CarmeRuntimeError):
    """A probe, a result or a description of a network that cannot be used."""
