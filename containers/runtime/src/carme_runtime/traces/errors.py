"""What can go wrong with traces."""

from carme_runtime.errors import CarmeRuntimeError


class TraceError(CarmeRuntimeError):
    """A trace cannot be made, or a recording cannot be read."""
