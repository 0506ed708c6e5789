"""Changes what administrators decide: reservations, projects, nodes, accounts. Slurm keeps it."""

import asyncio
from collections.abc import Iterable

from carme.broker import protocol
from carme.broker.bookings import Bookings
from carme.broker.context import Context
from carme.broker.dispatch import handles
from carme.broker.enrolment import enrol
from carme.broker.peers import Peer, require_person
from carme.broker.projects import Projects
from carme.errors import InvalidRequest
from carme.jobs import Reservation
from carme.projects import ProjectAccount
from carme.slurm import UnixAccount
from carme.translation import message as _
from carme.wording import nearest


class Administration:
    """Changes Slurm's reservations, accounts and nodes."""

    def __init__(self, context: Context, bookings: Bookings) -> None:
        self._context = context
        self._bookings = bookings
        self._projects = Projects(context.slurm)

    @handles(protocol.GetReservations)
    async def reservations(self, peer: Peer, _: protocol.GetReservations) -> list[Reservation]:
        found = await self._bookings.reservations()
        if peer.trusted:
            return found
        return [reservation for reservation in found if peer.account.name in reservation.users]

    @handles(protocol.Reserve)
    async def reserve(self, peer: Peer, request: protocol.Reserve) -> Reservation:
        context = self._context
        with context.audit.audited(peer, request, request.user):
            await self._require_persons({request.user, *request.hold.users})
            return await self._bookings.reserve(request.hold, context.watch.cluster())

    @handles(protocol.Maintain)
    async def maintain(self, peer: Peer, request: protocol.Maintain) -> Reservation:
        context = self._context
        with context.audit.audited(peer, request, request.user):
            return await self._bookings.maintain(request.window, context.watch.cluster())

    @handles(protocol.Release)
    async def release(self, peer: Peer, request: protocol.Release) -> None:
        with self._context.audit.audited(peer, request, request.user):
            await self._bookings.release(request.name)
        self._context.watch.poll_soon()

    @handles(protocol.GetProjects)
    async def projects(self, peer: Peer, _: protocol.GetProjects) -> list[ProjectAccount]:
        return await self._projects.accounts()

    @handles(protocol.PutGrant)
    async def grant(self, peer: Peer, request: protocol.PutGrant) -> ProjectAccount:
        context = self._context
        with context.audit.audited(peer, request, request.user):
            await self._require_persons(request.grant.members)
            account = await self._projects.grant(request.grant, context.watch.cluster())
            context.accesses.forget()
        return account

    @handles(protocol.SetNode)
    async def set_node(self, peer: Peer, request: protocol.SetNode) -> None:
        context = self._context
        with context.audit.audited(peer, request, request.user):
            known = {node.name for node in context.watch.cluster().nodes}
            if request.name not in known:
                raise InvalidRequest(
                    _("There is no node {request_name!r}.", request_name=request.name),
                    nearest(request.name, known),
                    field="name",
                )
            if request.drain and not request.reason:
                raise InvalidRequest(
                    _("Draining a node needs a reason."),
                    _("Give one, so that others know it."),
                    field="reason",
                )
            if request.drain:
                await context.slurm.drain_node(request.name, request.reason)
            else:
                await context.slurm.resume_node(request.name)
        context.watch.poll_soon()

    @handles(protocol.Enrol)
    async def enrol(self, peer: Peer, request: protocol.Enrol) -> list[str]:
        context = self._context
        with context.audit.audited(peer, request, request.user) as entry:
            account = await asyncio.to_thread(UnixAccount.named, request.name)
            require_person(account, context.settings)
            done = await enrol(account, context.slurm, context.settings)
            context.accesses.forget()
            entry.add(done=done)
        return done

    async def _require_persons(self, names: Iterable[str]) -> None:
        """See that all of them are people's accounts. Raises NotFound, Denied."""
        for name in names:
            require_person(await asyncio.to_thread(UnixAccount.named, name), self._context.settings)
