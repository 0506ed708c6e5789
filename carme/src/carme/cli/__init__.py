"""The command line, `carme`."""

from carme.cli.main import main

__all__ = ["main"]
