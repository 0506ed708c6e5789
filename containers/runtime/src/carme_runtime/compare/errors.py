"""What can go wrong in a comparison."""

from carme_runtime.errors import CarmeRuntimeError


class CompareError(CarmeRuntimeError):
    """An option, a result or a machine that a comparison cannot use."""
