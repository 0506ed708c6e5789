"""Unix accounts, and what it takes to run a command as one of them."""

import contextlib
import grp
import os
import pwd
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from carme.errors import NotFound
from carme.translation import message as _

# Where the programs of the system and of Slurm lie; administrators add more to the service's own PATH.
PATH = "/usr/local/bin:/usr/bin:/bin:/opt/slurm/bin"


@dataclass(frozen=True)
class UnixAccount:
    """One account of the system."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str = "/bin/sh"

    @staticmethod
    def named(name: str) -> "UnixAccount":
        """The account called `name`; raises NotFound."""
        if name in _pretended:
            return _pretended[name]
        try:
            return _from_entry(pwd.getpwnam(name))
        except (KeyError, ValueError):
            raise NotFound(
                _("There is no account {name!r} on this host.", name=name),
                _("Ask an administrator to create it."),
            ) from None

    @staticmethod
    def numbered(uid: int) -> "UnixAccount":
        """The account with this number; raises NotFound."""
        try:
            return _from_entry(pwd.getpwuid(uid))
        except KeyError:
            raise NotFound(
                _("There is no account with number {uid} on this host.", uid=uid),
                _("Ask an administrator to create it."),
            ) from None

    def environment(self) -> dict[str, str]:
        """A clean environment: nothing of the caller's but where Slurm's programs and configuration are."""
        values = {
            "HOME": self.home,
            "USER": self.name,
            "LOGNAME": self.name,
            "PATH": os.environ.get("PATH", PATH),
            "LANG": "C.UTF-8",
            "LC_ALL": "C",
        }
        if conf := os.environ.get("SLURM_CONF"):
            values["SLURM_CONF"] = conf
        return values

    def groups(self) -> list[str]:
        """The names of its Unix groups."""
        found = set[str]()
        for number in os.getgrouplist(self.name, self.gid):
            with contextlib.suppress(KeyError):
                found.add(grp.getgrgid(number).gr_name)
        return sorted(found)

    def identity(self) -> dict[str, Any]:
        """Arguments of `subprocess` that make a child this account; none when we are it already."""
        if os.geteuid() != 0 and os.getuid() == self.uid:
            return {}
        groups = os.getgrouplist(self.name, self.gid)
        return {"user": self.uid, "group": self.gid, "extra_groups": groups}


#: Accounts that the system does not know, by name. Only the sandbox has some (`carme.sandbox`).
_pretended: dict[str, UnixAccount] = {}


def pretend_accounts(accounts: Iterable[UnixAccount]) -> None:
    """From now on this process finds these accounts besides those of the system, and no earlier ones."""
    _pretended.clear()
    _pretended.update({account.name: account for account in accounts})


def _from_entry(entry: "pwd.struct_passwd") -> UnixAccount:
    return UnixAccount(entry.pw_name, entry.pw_uid, entry.pw_gid, entry.pw_dir, entry.pw_shell or "/bin/sh")
