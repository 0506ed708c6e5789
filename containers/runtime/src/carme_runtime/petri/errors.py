"""What goes wrong with nets and their runs."""

from carme_runtime.errors import CarmeRuntimeError


class PetriError(CarmeRuntimeError):
    """A net or a run that cannot go on, in one sentence, and what to do."""
