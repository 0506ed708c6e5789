"""What can go wrong with a model, in words for its user."""

from carme_runtime.errors import CarmeRuntimeError


class OnnxError(CarmeRuntimeError):
    """A model, or what it was given, that cannot be used."""
