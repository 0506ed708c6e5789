"""Whether a site's rules allow a booking, and what to book instead. Pure functions over times in UTC."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from carme.bookings.clock import moment_text, span_text
from carme.bookings.models import Wish
from carme.bookings.slots import Board, Claim, Need
from carme.config import BookingSettings
from carme.errors import InvalidRequest
from carme.jobs import Cluster, minutes_text
from carme.wording import listing, number

__all__ = [
    "STEP",
    "Standing",
    "board_of",
    "check_rules",
    "choose_nodes",
    "nearest_starts",
    "needs_approval",
    "window",
]

#: Nearest free slots begin at a multiple of this.
STEP = timedelta(minutes=5)


@dataclass(frozen=True)
class Standing:
    """What a user has booked already, apart from the booking that is asked for or changed.

    Attributes:
        open: How many bookings in the partition are not over.
        gpu_hours: What they and those of the budget's last days cost; given back is not counted.
        ahead: The start of a booking that is changed, for which notice was given; else None.
        project: The project whose bookings these are, if its own rules count them; else the user's.
    """

    open: int = 0
    gpu_hours: float = 0.0
    ahead: datetime | None = None
    project: str = ""


def check_rules(
    wish: Wish, policy: BookingSettings, standing: Standing, now: datetime, zone: ZoneInfo
) -> None:
    """Refuse what the site's rules forbid, whatever is free.

    Args:
        zone: That of times in the answer.

    Raises:
        InvalidRequest: With the field, what is allowed, and what to ask for.
    """
    if not policy.enabled:
        raise InvalidRequest(
            f"GPUs of partition {wish.partition!r} cannot be booked.",
            "Start a session without a booking, or ask an administrator.",
            field="partition",
        )
    if wish.minutes > policy.longest_minutes:
        raise InvalidRequest(
            f"A booking lasts at most {minutes_text(policy.longest_minutes)}, not "
            f"{minutes_text(wish.minutes)}.",
            f"Ask for at most {minutes_text(policy.longest_minutes)}.",
            field="minutes",
        )
    if wish.start != standing.ahead:
        earliest, latest = window(policy, now)
        if wish.start < earliest:
            notice = policy.notice_minutes
            raise InvalidRequest(
                f"A booking must be made at least {minutes_text(notice)} before it begins."
                if wish.start >= now and notice
                else "A booking cannot begin in the past.",
                f"The earliest start now is {moment_text(earliest, zone)}.",
                field="start",
            )
        if wish.start > latest:
            raise InvalidRequest(
                f"A booking can begin at most {number(policy.horizon_days, 'day')} ahead.",
                f"The latest start now is {moment_text(latest, zone)}.",
                field="start",
            )
    if standing.open >= policy.at_a_time:
        whose = f"The project {standing.project!r} has" if standing.project else "You have"
        raise InvalidRequest(
            f"{whose} {number(standing.open, 'booking')} in partition {wish.partition!r} that "
            f"{'is' if standing.open == 1 else 'are'} not over; {policy.at_a_time} "
            f"{'is' if policy.at_a_time == 1 else 'are'} allowed.",
            "Delete one that you do not need, or wait until one is over.",
        )
    if policy.gpu_hours and standing.gpu_hours + wish.gpu_hours > policy.gpu_hours:
        left = max(0.0, policy.gpu_hours - standing.gpu_hours)
        whose, has = (f"the project {wish.project!r}", "it has") if wish.project else ("you", "you have")
        raise InvalidRequest(
            f"The booking costs {_hours(wish.gpu_hours)} GPU-hours; of the {policy.gpu_hours} that {whose} "
            f"may book in {number(policy.budget_days, 'day')} {has} {_hours(left)} left.",
            "Book fewer GPUs or less time.",
            field="minutes",
        )


def window(policy: BookingSettings, now: datetime) -> tuple[datetime, datetime]:
    """The earliest and the latest start that may be asked for now; the present minute counts as a whole."""
    minute = now.replace(second=0, microsecond=0)
    return minute + timedelta(minutes=policy.notice_minutes), now + timedelta(days=policy.horizon_days)


def needs_approval(wish: Wish, policy: BookingSettings) -> bool:
    """Whether a manager must approve it."""
    return bool(policy.approval_gpu_hours) and wish.gpu_hours > policy.approval_gpu_hours


def board_of(
    partition: str,
    gpu_type: str,
    gpus_per_node: int,
    cluster: Cluster,
    claims: Iterable[Claim],
    policy: BookingSettings,
    own: Iterable[Claim] = (),
    own_percent: int | None = None,
) -> Board:
    """The nodes of one kind in a partition, and who has them when.

    Args:
        own, own_percent: What the project has booked for which is booked now, and how many of the GPUs it may
            have booked at a time; None: any number.

    Nodes that take no jobs now are left out: nobody knows when they come back.

    Raises:
        InvalidRequest: There is no such partition, or it has no such nodes.
    """
    members = {one.name: one.node_names for one in cluster.partitions}
    if partition not in members:
        raise InvalidRequest(
            f"There is no partition {partition!r}; there are: {listing(members)}.",
            "Choose one of these.",
            field="partition",
        )
    nodes = [node for node in cluster.nodes if node.name in members[partition]]
    kinds = sorted({(kind, count) for node in nodes for kind, count in node.gpus.items() if count})
    if (gpu_type, gpus_per_node) not in kinds:
        has = listing(f"{count} of type {kind}" for kind, count in kinds)
        raise InvalidRequest(
            f"Nodes are booked whole, and partition {partition!r} has no node with "
            f"{number(gpus_per_node, 'GPU')} of type {gpu_type}; its nodes have: {has}.",
            "Choose one of these." if kinds else "Choose another partition.",
            field="gpus_per_node",
        )
    of_type = [node for node in nodes if gpu_type in node.gpus]
    total = sum(node.gpus[gpu_type] for node in of_type)
    names = {node.name for node in of_type}
    return Board(
        [node.name for node in of_type if node.available and node.gpus[gpu_type] == gpus_per_node],
        [claim for claim in claims if claim.node in names],
        most_booked=total * policy.share_percent // 100,
        own=[claim for claim in own if claim.node in names],
        own_most=None if own_percent is None else total * own_percent // 100,
    )


def choose_nodes(
    wish: Wish,
    board: Board,
    policy: BookingSettings,
    now: datetime,
    zone: ZoneInfo,
    prefer: Iterable[str] = (),
) -> list[str]:
    """The nodes that the booking gets.

    Args:
        prefer: Nodes to keep where possible; those of a booking that is changed.

    Raises:
        InvalidRequest: Why it gets none, and when it could.
    """
    need = _need(wish)
    _check_size(wish, board, policy)
    _check_named(wish, board)
    nodes = board.place(need, wish.start, prefer)
    if nodes is not None:
        return nodes
    free = len(board.free(wish.start, wish.end))
    when = span_text(wish.start, wish.end, zone)
    kind = f"with {number(wish.gpus_per_node, 'GPU')} of type {wish.gpu_type}"
    taken = sorted(need.named.difference(board.free(wish.start, wish.end)))
    if not taken and free >= wish.nodes and board.is_own_limit(wish.start, wish.end, wish.gpus):
        message = (
            f"At most {board.own_most} GPUs of type {wish.gpu_type} in partition {wish.partition!r} may be "
            f"booked at a time for the project {wish.project!r}; {when}, "
            f"{board.bookable(wish.start, wish.end)} more can be, and {wish.gpus} were asked for."
        )
    elif not taken and free >= wish.nodes:
        message = (
            f"At most {policy.share_percent} % of the GPUs of type {wish.gpu_type} in partition "
            f"{wish.partition!r} may be booked at a time; {when}, {board.bookable(wish.start, wish.end)} "
            f"more can be, and {wish.gpus} were asked for."
        )
    elif taken:
        message = (
            f"{listing(taken)} {'is' if len(taken) == 1 else 'are'} not free for the whole time, {when}."
        )
    elif wish.nodes == 1:
        message = f"No node {kind} is free for the whole time, {when}."
    else:
        message = (
            f"Of the {wish.nodes} nodes {kind} that were asked for, {free} "
            f"{'is' if free == 1 else 'are'} free for the whole time, {when}."
        )
    earliest, latest = window(policy, now)
    slots = board.nearest(need, wish.start, earliest, latest, STEP)
    if slots:
        remedy = f"Free are: {listing(span_text(slot, slot + need.length, zone) for slot in slots)}."
    else:
        remedy = (
            f"There is no such time in the next {number(policy.horizon_days, 'day')}: ask for fewer nodes or "
            "less time."
        )
    raise InvalidRequest(message, remedy, field="start")


def nearest_starts(wish: Wish, board: Board, policy: BookingSettings, now: datetime) -> list[datetime]:
    """The nearest starts at which the booking could be had."""
    need = _need(wish)
    return board.nearest(need, wish.start, *window(policy, now), STEP)


def _need(wish: Wish) -> Need:
    length = timedelta(minutes=wish.minutes)
    return Need(wish.nodes, wish.gpus_per_node, length, frozenset(wish.node_names))


def _check_named(wish: Wish, board: Board) -> None:
    """See that the nodes that are named can be had at all."""
    if len(set(wish.node_names)) > wish.nodes:
        raise InvalidRequest(
            f"{number(len(set(wish.node_names)), 'node')} are named, and {wish.nodes} asked for.",
            "Ask for as many nodes as you name, or name fewer.",
            field="nodes",
        )
    if unknown := sorted(set(wish.node_names).difference(board.nodes)):
        raise InvalidRequest(
            f"Partition {wish.partition!r} has no node {listing(unknown)} with "
            f"{number(wish.gpus_per_node, 'GPU')} of type {wish.gpu_type} that takes jobs; it has: "
            f"{listing(board.nodes) or 'none'}.",
            "Name one of these, or none.",
            field="node_names",
        )


def _check_size(wish: Wish, board: Board, policy: BookingSettings) -> None:
    """See that it could be had on an empty system."""
    count = len(board.nodes)
    if wish.nodes > count:
        raise InvalidRequest(
            f"{number(count, 'node')} of partition {wish.partition!r} with "
            f"{number(wish.gpus_per_node, 'GPU')} of type {wish.gpu_type} "
            f"{'takes' if count == 1 else 'take'} jobs; {wish.nodes} were asked for.",
            f"Ask for {count} or fewer." if count else "Try again later, or ask an administrator.",
            field="nodes",
        )
    if board.own_most is not None and wish.gpus > board.own_most:
        nodes = board.own_most // wish.gpus_per_node
        raise InvalidRequest(
            f"At most {board.own_most} GPUs of type {wish.gpu_type} in partition {wish.partition!r} may be "
            f"booked at a time for the project {wish.project!r}; {wish.gpus} were asked for.",
            f"Ask for {number(nodes, 'node')} or fewer."
            if nodes
            else "Start a session without a booking, or ask an administrator.",
            field="nodes",
        )
    if board.most_booked is not None and wish.gpus > board.most_booked:
        nodes = board.most_booked // wish.gpus_per_node
        raise InvalidRequest(
            f"At most {policy.share_percent} % of the GPUs of type {wish.gpu_type} in partition "
            f"{wish.partition!r} may be booked at a time, that is {board.most_booked}; {wish.gpus} were "
            "asked for.",
            f"Ask for {number(nodes, 'node')} or fewer."
            if nodes
            else "Start a session without a booking, or ask an administrator.",
            field="nodes",
        )


def _hours(hours: float) -> str:
    return f"{hours:.1f}".removesuffix(".0")
