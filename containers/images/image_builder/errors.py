"""What the build reports to people."""


class BuildError(Exception):
    """One sentence on what went wrong and one on what to do."""
