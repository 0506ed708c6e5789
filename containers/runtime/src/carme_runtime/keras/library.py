"""Keras itself. Type checkers take `import keras` in this folder for this very package."""

from importlib import import_module
from typing import Any

keras: Any = import_module("keras")
