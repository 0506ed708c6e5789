"""Who is at the other end of the socket, and whom they may act for."""

import asyncio
import socket
import struct
from dataclasses import dataclass

from carme.broker.operations import Rights
from carme.config import Settings
from carme.errors import Denied, InvalidRequest
from carme.slurm import UnixAccount
from carme.translation import message as _

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

# Numbers that stand for no person: nobody, and those that systemd gives to services for as long as they run
# (https://systemd.io/UIDS-GIDS/).
_NOBODY = (65534, 65535, 2**32 - 2, 2**32 - 1)
_PASSING = range(61184, 65520)
_CLOSED_SHELLS = ("nologin", "false")


@dataclass(frozen=True)
class Peer:
    """A process that has connected.

    Attributes:
        trusted: Root, or a service that may act for users.
        observer: It may ask for the overview.
    """

    pid: int
    account: UnixAccount
    trusted: bool
    observer: bool = False


async def identify(connection: socket.socket, settings: Settings) -> Peer:
    """The peer, as the kernel says. Raises NotFound for a number without an account."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    account = await asyncio.to_thread(UnixAccount.numbered, uid)  # may ask a directory server
    trusted = uid == 0 or await _is_listed(account, settings.broker.services)
    return Peer(pid, account, trusted, trusted or await _is_listed(account, settings.broker.observers))


def require_rights(peer: Peer, rights: Rights) -> None:
    """See that a peer may request an operation that is declared with these rights. Raises Denied."""
    allowed = {"everyone": True, "services": peer.trusted, "observers": peer.observer}[rights.group]
    if not allowed:
        raise Denied(
            _("{account_name} {message}", account_name=peer.account.name, message=rights.message),
            rights.remedy,
        )


async def _is_listed(account: UnixAccount, names: list[str]) -> bool:
    """Whether the account is one of the configured ones, and not another number under the same name."""
    if account.name not in names:
        return False
    return (await asyncio.to_thread(UnixAccount.named, account.name)).uid == account.uid


async def acting_for(peer: Peer, user: str | None, settings: Settings) -> UnixAccount | None:
    """The account that a request concerns; None: a trusted peer that named nobody.

    Raises:
        Denied: An ordinary peer named somebody else, or the account may not use Carme.
    """
    if user is None and peer.trusted:
        return None
    if user is None or user == peer.account.name:
        account = peer.account
    elif peer.trusted:
        account = await asyncio.to_thread(UnixAccount.named, user)
    else:
        raise Denied(
            _("{account_name} may not act for {user!r}.", account_name=peer.account.name, user=user),
            _("Leave the user out to act for yourself."),
        )
    require_person(account, settings)
    return account


def require_person(account: UnixAccount, settings: Settings) -> None:
    """See that the account is a person's.

    Raises:
        Denied: It is a system account, nobody, or one that nobody may log in to.
    """
    if account.uid < settings.broker.minimum_uid:
        raise Denied(
            _(
                "The account {account_name} is a system account (its number is below {minimum_uid}) "
                "and may not run jobs.",
                account_name=account.name,
                minimum_uid=settings.broker.minimum_uid,
            ),
            _("Sign in as an ordinary user."),
        )
    if account.uid in _NOBODY or account.uid in _PASSING:
        raise Denied(
            _(
                "The account {account_name} (number {uid}) belongs to no person, so it may not run jobs.",
                account_name=account.name,
                uid=account.uid,
            ),
            _("Sign in as an ordinary user."),
        )
    if account.shell.rpartition("/")[2] in _CLOSED_SHELLS:
        raise Denied(
            _(
                "The account {account_name} is closed: its shell is {shell}, so it may not run jobs.",
                account_name=account.name,
                shell=account.shell,
            ),
            _("Ask an administrator; people's accounts have a shell that one can log in with."),
        )


async def owner_of_job(peer: Peer, user: str | None, settings: Settings) -> UnixAccount:
    """The account that a new job belongs to."""
    account = await acting_for(peer, user, settings)
    if account is None:
        raise InvalidRequest(
            _("{account_name} may not run jobs of its own.", account_name=peer.account.name),
            _("Name the user that the job is for."),
            field="user",
        )
    return account
