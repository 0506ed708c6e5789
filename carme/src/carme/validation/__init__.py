"""Validation of an installed site: what a user does, done by a program, with a verdict.

Needs the extra `carme[validation]` (httpx, websockets, beautifulsoup4).
"""

from carme.validation.checks import Account, Check, Validation
from carme.validation.notebook import CellResult, NotebookKernel
from carme.validation.visitor import Visitor

__all__ = ["Account", "CellResult", "Check", "NotebookKernel", "Validation", "Visitor"]
