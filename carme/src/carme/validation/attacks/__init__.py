"""Attacks of one user on another, really carried out on a running site.

Run as root on the head: `python -m carme.validation.attacks --help`. Needs the extra `carme[validation]`.
"""

from carme.validation.attacks.case import Attack
from carme.validation.attacks.cases import ATTACKS
from carme.validation.attacks.fixture import Fixture
from carme.validation.attacks.report import Result, markdown, verdict

__all__ = ["ATTACKS", "Attack", "Fixture", "Result", "markdown", "verdict"]
