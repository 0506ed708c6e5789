"""The command line, `carme`."""

from carme.cli.main import main, program

__all__ = ["main", "program"]
