"""What can go wrong, in words for the person who typed the command."""


class CarmeRuntimeError(RuntimeError):
    """An error that the user or the site can fix.

    A RuntimeError, because that is what scripts catch from collectives of PyTorch.
    `message` is one sentence that says what was wrong, `remedy` one that says what to do.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message, remedy)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".rstrip()
