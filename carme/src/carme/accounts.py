"""The one table of rules for the names of accounts.

An account's name is the same everywhere: Unix, Slurm, portal, JupyterHub. So it may be what all of them take:

| who | takes |
|---|---|
| Linux | up to 255 bytes, no `:` and no `/`; names of digits alone are numbers to `chown` |
| directories, by SSSD | also `anna.maria`, `x@lab.org`, capitals; backslashes only where SSSD is set up so |
| Slurm | all of that but commas, quotation marks and spaces; it makes names small unless set up not to |
| JupyterHub | no `/`, no space at either end, nothing percent-encoded |
| the reverse proxy (role reverse_proxy) | at most eight `+`, which JupyterHub quotes in addresses |
"""

import re

from carme.translation import message as _

__all__ = ["ACCOUNT_PATTERN", "ACCOUNT_RULE", "MAXIMUM_LENGTH", "is_account_name"]

MAXIMUM_LENGTH = 64
#: A regular expression, to be matched as a whole or where a name begins.
ACCOUNT_PATTERN = rf"(?![0-9]+(?![A-Za-z0-9_.@+-]))[A-Za-z0-9_][A-Za-z0-9_.@+-]{{0,{MAXIMUM_LENGTH - 1}}}"
ACCOUNT_RULE = _(
    "A user name is that of the Unix account: letters from A to Z, digits and _ . @ + -, at most "
    "64. It begins with a letter, a digit or _, and is not a number."
)

_NAME = re.compile(ACCOUNT_PATTERN, re.ASCII)


def is_account_name(text: str) -> bool:
    """Whether this may be the name of an account."""
    return _NAME.fullmatch(text) is not None
