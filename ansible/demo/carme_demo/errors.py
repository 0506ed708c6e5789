"""What the demo says when it cannot go on."""

from pathlib import Path


class DemoError(Exception):
    """A stage failed.

    Args:
        message: one sentence: what was wrong and what was expected.
        remedy: one sentence: what to do.
        log: a file whose last lines show the cause.
    """

    def __init__(self, message: str, remedy: str = "", log: Path | None = None) -> None:
        super().__init__(f"{message} {remedy}".strip())
        self.message = message
        self.remedy = remedy
        self.log = log
