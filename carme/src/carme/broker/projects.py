"""The accounts of Slurm that projects need, and no others."""

import asyncio
import contextlib
import re

from carme.errors import Denied, InvalidRequest, SlurmError
from carme.jobs import Cluster
from carme.projects import ACCOUNT_PATTERN, Change, Grant, ProjectAccount, changes
from carme.slurm import Slurm
from carme.translation import message as _
from carme.wording import listing


class Projects:
    """Makes accounts, their limits and their members what projects are granted, one change at a time."""

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm
        self._turn = asyncio.Lock()

    async def accounts(self) -> list[ProjectAccount]:
        """Carme's accounts, as Slurm's database has them, with their use.

        Raises:
            SlurmError: Slurm or its database is away.
        """
        async with self._turn:
            return list((await self._slurm.project_accounts()).values())

    async def grant(self, grant: Grant, cluster: Cluster) -> ProjectAccount:
        """Make Slurm grant it. What is so already is left as it is.

        A member who has left and has jobs keeps these until they end, and can start no more.

        Raises:
            InvalidRequest: It names something that there is not.
            Denied: An account of this name is not Carme's.
            SlurmError: Slurm refused, or is away.
        """
        _check(grant, cluster)
        async with self._turn:
            there = (await self._slurm.project_accounts()).get(grant.account)
            if there is None and await self._slurm.account_exists(grant.account):
                raise Denied(
                    _("Slurm has an account {account!r} that Carme has not made.", account=grant.account),
                    _("Give the project another name, or remove that account with 'sacctmgr'."),
                )
            for change in changes(grant, there):
                await self._do(grant.account, change)
            saved = (await self._slurm.project_accounts()).get(grant.account)
        if saved is None:
            raise SlurmError(
                _("Slurm created the account {account} but then lost it.", account=grant.account),
                _("Carme creates it again in a moment."),
                code="slurm-away",
            )
        return saved

    async def _do(self, account: str, change: Change) -> None:
        match change.kind:
            case "create":
                await self._slurm.make_account(account)
            case "limit":
                await self._slurm.limit_account(account, dict(change.values))
            case "add":
                await self._slurm.add_member(account, change.user, change.partition)
            case "resume":
                await self._slurm.stop_member(account, change.user, stopped=False)
            case "remove":
                # First, so that none comes in between.
                await self._slurm.stop_member(account, change.user, stopped=True)
                with contextlib.suppress(_Busy):
                    await self._remove(account, change)

    async def _remove(self, account: str, change: Change) -> None:
        try:
            await self._slurm.remove_member(account, change.user, change.partition)
        except SlurmError as error:
            if error.code == "member-has-jobs":
                raise _Busy from None
            raise


class _Busy(Exception):
    pass


def _check(grant: Grant, cluster: Cluster) -> None:
    assert re.fullmatch(ACCOUNT_PATTERN, grant.account)
    known = [partition.name for partition in cluster.partitions]
    if strange := sorted(set(grant.partitions) - set(known)):
        raise InvalidRequest(
            _(
                "There is no partition {strange!r}; there are: {known}.",
                strange=strange[0],
                known=listing(known),
            ),
            _("Choose from these."),
            field="partitions",
        )
    kinds = sorted({kind for node in cluster.nodes for kind in node.gpus})
    if strange := sorted(set(grant.gpu_types) - set(kinds)):
        raise InvalidRequest(
            _(
                "There are no GPUs of type {strange!r}; there are: {kinds}.",
                strange=strange[0],
                kinds=listing(kinds),
            ),
            _("Choose from these."),
            field="gpu_types",
        )
