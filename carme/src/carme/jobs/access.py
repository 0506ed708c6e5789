"""What Slurm lets a user use: associations of its database, Unix groups and limits. Pure functions.

By default Slurm takes a job that its partition may never start, and lets it wait for ever. So what can be
known is checked before a job is submitted, and forms offer only what passes the same check.
"""

from collections.abc import Collection, Iterable

from pydantic import BaseModel, ConfigDict

from carme.errors import InvalidRequest
from carme.jobs.cluster import Cluster, Partition
from carme.jobs.limits import Limits, limits_of
from carme.jobs.requests import JobRequest, SessionOptions
from carme.jobs.times import minutes_text
from carme.translation import message as _
from carme.translation import noop
from carme.wording import listing, number

__all__ = ["Access", "Association", "check_limits", "partition_refusal", "usable", "usable_partitions"]

#: What jobs have where nothing else is named, unless the association has one quality alone.
ORDINARY_QOS = "normal"


class Association(BaseModel):
    """That a user may run jobs in an account.

    Attributes:
        partition: The one in which they may; empty: all.
        qos, default_qos: The qualities of service that jobs may have, and have when they name none.
        default: Whether it is the user's default account.
        stopped: Whether Slurm takes no new jobs.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    account: str
    partition: str = ""
    qos: list[str] = []
    default_qos: str = ""
    default: bool = False
    stopped: bool = False


class Access(BaseModel):
    """What is known of a user.

    Attributes:
        groups: Names of the user's Unix groups; empty: not known.
        associations: Empty: there is no accounting, or it does not answer.
        enforced: What of the accounting Slurm enforces (`AccountingStorageEnforce`).
        limits: Those of the user, of the accounts above, and of qualities of service.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    user: str
    groups: list[str] = []
    associations: list[Association] = []
    enforced: list[str] = []
    limits: list[Limits] = []

    @property
    def accounts(self) -> list[str]:
        """The accounts that may pay for new jobs, the default one first."""
        able = [association for association in self.associations if not association.stopped]
        return list(
            dict.fromkeys(
                each.account for each in sorted(able, key=lambda association: not association.default)
            )
        )

    @property
    def default_account(self) -> str | None:
        """The account that pays for jobs that name none."""
        return next((association.account for association in self.associations if association.default), None)

    @property
    def qos(self) -> list[str]:
        """All qualities of service that the user may name."""
        return sorted({name for association in self.associations for name in association.qos})

    def association(self, account: str | None, partition: str) -> Association | None:
        """The association that counts for an account in a partition; one for this partition comes first."""
        found = [
            each
            for each in self.associations
            if each.account == account and each.partition in ("", partition)
        ]
        return max(found, key=lambda association: bool(association.partition), default=None)

    def longest_minutes(self, account: str | None, partition: str, requested_qos: str | None) -> int | None:
        """How long the accounting lets a job run; None: as long as the partition does.

        The arguments are those of `quality`, but without an account the default one counts.
        """
        if "limits" not in self.enforced:
            return None
        account = account or self.default_account or ""
        qos = self.quality(account, partition, requested_qos)
        found = limits_of(self.user, account, qos, self.limits)
        return next((limit.minutes for limit in found if limit.minutes is not None), None)

    def quality(self, account: str | None, partition: str, requested: str | None) -> str:
        """The quality of service that a job gets; empty: not known."""
        association = self.association(account, partition)
        if requested or association is None:
            return requested or ""
        if association.default_qos or not association.qos:
            return association.default_qos
        return association.qos[0] if len(association.qos) == 1 else ORDINARY_QOS


def usable(cluster: Cluster, access: Access, accounts: Collection[str] = ()) -> Cluster:
    """The cluster as far as somebody may use it: the partitions that take the user's jobs, and their nodes.

    Slurm hides a partition from all that do not ask for it. Here it shows to those whom it is limited to.

    Args:
        accounts: Others that may pay besides those of the associations, as of projects just joined.
    """
    return cluster.limited_to(usable_partitions(cluster, access, accounts))


def usable_partitions(cluster: Cluster, access: Access, accounts: Collection[str] = ()) -> list[Partition]:
    """The partitions of the cluster that take a user's jobs; the arguments are those of `usable`."""
    return [partition for partition in cluster.partitions if _is_usable(partition, access, accounts)]


def _is_usable(partition: Partition, access: Access, accounts: Collection[str]) -> bool:
    if partition.hidden and not partition.is_limited:
        return False
    choices: set[tuple[str | None, str | None]] = {(account, None) for account in accounts}
    for association in access.associations:
        if not association.stopped and association.partition in ("", partition.name):
            choices |= {(association.account, None), *((association.account, qos) for qos in association.qos)}
    if not choices and access.associations and access.enforced:
        return False
    if not choices:
        # Of a hidden partition it must be known that it is this user's.
        return not partition.hidden and partition_refusal(partition, access, None, None) is None
    return any(partition_refusal(partition, access, *choice) is None for choice in choices)


def partition_refusal(
    partition: Partition,
    access: Access,
    account: str | None,
    qos: str | None,
    alternatives: Iterable[Partition] = (),
) -> InvalidRequest | None:
    """Why a partition takes no job of a user with this account and quality of service; None: it does.

    Args:
        account: The one that pays; None: the user's default one.
        qos: The one that is requested; None: what follows from the account.
        alternatives: Partitions to advise instead, where one of them takes the job.
    """
    account = account or access.default_account
    refusal = (
        _group_refusal(partition, access)
        or _account_refusal(partition, access, account)
        or _qos_refusal(partition, access, account, qos)
    )
    if refusal is None:
        return None
    sentence, remedy, field = refusal
    better = [
        each.name
        for each in alternatives
        if each != partition and not each.hidden and partition_refusal(each, access, account, qos) is None
    ]
    if better and field == "partition":
        remedy = _(_OR_ANOTHER[remedy], better=listing(better))
    return InvalidRequest(sentence, remedy, field=field)


_ANOTHER_ACCOUNT = _("Choose another account.")
_ANOTHER_PARTITION = _("Choose another partition.")
#: The same advice, with partitions that take the job.
_OR_ANOTHER: dict[str, str] = {
    _ANOTHER_ACCOUNT: noop("Choose another account, or one of these partitions: {better}."),
    _ANOTHER_PARTITION: noop("Choose another partition, or one of these partitions: {better}."),
}

_Refusal = tuple[str, str, str]  # what is wrong, what to do, and the field


def _group_refusal(partition: Partition, access: Access) -> _Refusal | None:
    if not partition.groups or not access.groups or set(partition.groups) & set(access.groups):
        return None
    return (
        _(
            "The partition {partition!r} takes jobs of these Unix groups only: {groups}; you are in none of "
            "them.",
            partition=partition.name,
            groups=listing(partition.groups),
        ),
        _ANOTHER_PARTITION,
        "partition",
    )


def _account_refusal(partition: Partition, access: Access, account: str | None) -> _Refusal | None:
    if account is None:
        return None
    if partition.refuses_account(account):
        return (
            _(
                "The partition {partition!r} does not take jobs of the account {account!r}.",
                partition=partition.name,
                account=account,
            ),
            _ANOTHER_ACCOUNT,
            "partition",
        )
    if not access.associations or not access.enforced:
        return None
    own = [each for each in access.associations if each.account == account]
    if not own:
        return (
            _(
                "You may not use the account {account!r}; yours are: {accounts}.",
                account=account,
                accounts=listing(access.accounts),
            ),
            _("Choose one of these, or ask an administrator."),
            "account",
        )
    association = access.association(account, partition.name)
    if association is None:
        return (
            _(
                "You may use the account {account!r} in {partitions} only, not in {partition!r}.",
                account=account,
                partitions=listing([each.partition for each in own]),
                partition=partition.name,
            ),
            _ANOTHER_ACCOUNT,
            "partition",
        )
    if association.stopped:
        return (
            _("Slurm takes no new jobs of yours in the account {account!r}.", account=account),
            _("Choose another account, or ask an administrator."),
            "account",
        )
    return None


def _qos_refusal(
    partition: Partition, access: Access, account: str | None, requested: str | None
) -> _Refusal | None:
    association = access.association(account, partition.name)
    own = association.qos if association else []
    if requested and own and requested not in own and access.enforced:
        return (
            _(
                "You may not use the quality of service {qos!r} with the account {account!r}; yours are: "
                "{own}.",
                qos=requested,
                account=account,
                own=listing(own),
            ),
            _("Choose one of these."),
            "qos",
        )
    name = access.quality(account, partition.name, requested)
    if not name or not partition.refuses_qos(name):
        return None
    able = [each for each in own if not partition.refuses_qos(each)]
    sentence = _(
        "The partition {partition!r} does not take jobs of the quality of service {qos!r}.",
        partition=partition.name,
        qos=name,
    )
    if able:
        return sentence, _("Choose one of these qualities of service: {able}.", able=listing(able)), "qos"
    return sentence, _ANOTHER_ACCOUNT, "partition"


def check_limits(
    request: JobRequest | SessionOptions, partition: Partition, access: Access, account: str | None
) -> None:
    """Refuse what is more than a limit of the accounting ever lets start.

    Raises:
        InvalidRequest: With the field, the limit, and whose it is.
    """
    if "limits" not in access.enforced:
        return
    account = account or access.default_account or ""
    qos = access.quality(account, partition.name, request.qos)
    gpus = request.nodes * request.gpus_per_node
    requested = {"node": ("nodes", "node", request.nodes), "gres/gpu": ("gpus_per_node", "GPU", gpus)}
    if request.gpu_type:
        requested[f"gres/gpu:{request.gpu_type}"] = ("gpus_per_node", f"{request.gpu_type} GPU", gpus)
    # The first holder that sets a limit is the one whose limit counts.
    known: set[str] = set()
    for each in limits_of(access.user, account, qos, access.limits):
        if each.minutes is not None and "minutes" not in known:
            known.add("minutes")
            if request.minutes > each.minutes:
                raise _too_much(
                    each, _("{minutes} for one job", minutes=minutes_text(each.minutes)), "minutes"
                )
        most = {name: count for name, (count, _used) in each.resources.items()} | each.each
        for name, (field, unit, count) in requested.items():
            if name in most and name not in known:
                known.add(name)
                if count > most[name]:
                    raise _too_much(each, number(most[name], unit), field)


def _too_much(limits: Limits, most: str, field: str) -> InvalidRequest:
    return InvalidRequest(
        _("Slurm's accounting allows {holder} at most {most}.", holder=limits.holder, most=most),
        _("Ask for less, or choose another account or quality of service."),
        field=field,
    )
