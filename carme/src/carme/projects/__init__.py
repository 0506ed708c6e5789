"""Projects: people who share an account of Slurm, and what it may use."""

from carme.projects.models import ACCOUNT_PATTERN, NAME_PATTERN, Grant, ProjectAccount, Use, account_of
from carme.projects.reconcile import Change, changes

__all__ = [
    "ACCOUNT_PATTERN",
    "NAME_PATTERN",
    "Change",
    "Grant",
    "ProjectAccount",
    "Use",
    "account_of",
    "changes",
]
