"""Who is at the other end of the socket, and whom they may act for."""

import asyncio
import socket
import struct
from dataclasses import dataclass

from carme.config import Settings
from carme.errors import Denied, InvalidRequest
from carme.slurm import UnixAccount

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


@dataclass(frozen=True)
class Peer:
    """A process that has connected; `trusted`: root, or a service that may act for users."""

    pid: int
    account: UnixAccount
    trusted: bool


async def identify(connection: socket.socket, settings: Settings) -> Peer:
    """The peer, as the kernel says. Raises NotFound for a number without an account."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    account = await asyncio.to_thread(UnixAccount.numbered, uid)  # may ask a directory server
    return Peer(pid, account, trusted=uid == 0 or account.name in settings.broker.services)


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
            f"{peer.account.name} may not act for {user!r}.", "Leave the user out to act for yourself."
        )
    if account.uid < settings.broker.minimum_uid:
        raise Denied(
            f"The account {account.name} is a system account (its number is below "
            f"{settings.broker.minimum_uid}) and may have no jobs.",
            "Sign in as an ordinary user.",
        )
    return account


async def owner_of_job(peer: Peer, user: str | None, settings: Settings) -> UnixAccount:
    """The account that a new job belongs to."""
    account = await acting_for(peer, user, settings)
    if account is None:
        raise InvalidRequest(
            f"{peer.account.name} may have no jobs of its own.",
            "Name the user that the job is for.",
            field="user",
        )
    return account
