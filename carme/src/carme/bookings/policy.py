"""Whether a site's rules allow a booking, and what to book instead. Pure functions over times in UTC."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from carme.bookings.clock import moment_text, span_text
from carme.bookings.models import BookingRequest
from carme.bookings.slots import Board, Claim, Need
from carme.config import BookingSettings
from carme.errors import InvalidRequest
from carme.jobs import Cluster, minutes_text
from carme.translation import message as _
from carme.translation import plural
from carme.wording import decimal, listing, number

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
    """What a user has booked already, apart from the booking that is requested or changed.

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
    proposed: BookingRequest, policy: BookingSettings, standing: Standing, now: datetime, zone: ZoneInfo
) -> None:
    """Refuse what the site's rules forbid, whatever is free.

    Args:
        zone: That of times in the answer.

    Raises:
        InvalidRequest: With the field, what is allowed, and what to ask for.
    """
    if not policy.enabled:
        raise InvalidRequest(
            _("GPUs of partition {partition!r} cannot be booked.", partition=proposed.partition),
            _("Start a session without a booking, or ask an administrator."),
            field="partition",
        )
    if proposed.minutes > policy.longest_minutes:
        raise InvalidRequest(
            _(
                "A booking lasts at most {longest_minutes}, not {minutes}.",
                longest_minutes=minutes_text(policy.longest_minutes),
                minutes=minutes_text(proposed.minutes),
            ),
            _("Ask for at most {longest_minutes}.", longest_minutes=minutes_text(policy.longest_minutes)),
            field="minutes",
        )
    if proposed.start != standing.ahead:
        _check_start(proposed, policy, now, zone)
    _check_open(proposed, policy, standing)
    _check_budget(proposed, policy, standing)


def _check_start(proposed: BookingRequest, policy: BookingSettings, now: datetime, zone: ZoneInfo) -> None:
    """Refuse a start that is too early or too late."""
    earliest, latest = window(policy, now)
    if proposed.start < earliest:
        notice = policy.notice_minutes
        raise InvalidRequest(
            _("A booking must be made at least {notice} before it begins.", notice=minutes_text(notice))
            if proposed.start >= now and notice
            else _("A booking cannot begin in the past."),
            _("The earliest start now is {earliest}.", earliest=moment_text(earliest, zone)),
            field="start",
        )
    if proposed.start > latest:
        raise InvalidRequest(
            _("A booking can begin at most {days} ahead.", days=number(policy.horizon_days, "day")),
            _("The latest start now is {latest}.", latest=moment_text(latest, zone)),
            field="start",
        )


def _check_open(proposed: BookingRequest, policy: BookingSettings, standing: Standing) -> None:
    """Refuse more bookings at a time than are allowed."""
    if standing.open < policy.at_a_time:
        return
    allowed = plural("{count} is allowed", "{count} are allowed", policy.at_a_time)
    if standing.project:
        message = plural(
            "The project {project!r} has {count} booking in partition {partition!r} that is not over; "
            "{allowed}.",
            "The project {project!r} has {count} bookings in partition {partition!r} that are not over; "
            "{allowed}.",
            standing.open,
            project=standing.project,
            partition=proposed.partition,
            allowed=allowed,
        )
    else:
        message = plural(
            "You have {count} booking in partition {partition!r} that is not over; {allowed}.",
            "You have {count} bookings in partition {partition!r} that are not over; {allowed}.",
            standing.open,
            partition=proposed.partition,
            allowed=allowed,
        )
    raise InvalidRequest(
        message,
        _("Delete one that you do not need, or wait until one is over."),
    )


def _check_budget(proposed: BookingRequest, policy: BookingSettings, standing: Standing) -> None:
    """Refuse more GPU-hours than are left."""
    if not policy.gpu_hours or standing.gpu_hours + proposed.gpu_hours <= policy.gpu_hours:
        return
    left = max(0.0, policy.gpu_hours - standing.gpu_hours)
    costs = {"cost": decimal(proposed.gpu_hours), "most": policy.gpu_hours, "left": decimal(left)}
    days = number(policy.budget_days, "day")
    if proposed.project:
        message = _(
            "The booking costs {cost} GPU-hours, but the project {project!r} has only {left} "
            "left of the {most} that it may book in {days}.",
            project=proposed.project,
            days=days,
            **costs,
        )
    else:
        message = _(
            "The booking costs {cost} GPU-hours, but you have only {left} left of the {most} "
            "that you may book in {days}.",
            days=days,
            **costs,
        )
    raise InvalidRequest(
        message,
        _("Book fewer GPUs or less time."),
        field="minutes",
    )


def window(policy: BookingSettings, now: datetime) -> tuple[datetime, datetime]:
    """The earliest and the latest start that may be requested now; the present minute counts as a whole."""
    minute = now.replace(second=0, microsecond=0)
    return minute + timedelta(minutes=policy.notice_minutes), now + timedelta(days=policy.horizon_days)


def needs_approval(proposed: BookingRequest, policy: BookingSettings) -> bool:
    """Whether a manager must approve it."""
    return bool(policy.approval_gpu_hours) and proposed.gpu_hours > policy.approval_gpu_hours


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
    members = {each.name: each.node_names for each in cluster.partitions}
    if partition not in members:
        raise InvalidRequest(
            _(
                "There is no partition {partition!r}; there are: {members}.",
                partition=partition,
                members=listing(members),
            ),
            _("Choose one of these."),
            field="partition",
        )
    nodes = [node for node in cluster.nodes if node.name in members[partition]]
    kinds = sorted({(kind, count) for node in nodes for kind, count in node.gpus.items() if count})
    if (gpu_type, gpus_per_node) not in kinds:
        has = listing(_("{count} of type {kind}", count=count, kind=kind) for kind, count in kinds)
        raise InvalidRequest(
            _(
                "Nodes are booked whole, and partition {partition!r} has no node with {gpus} of type "
                "{gpu_type}; its nodes have: {has}.",
                partition=partition,
                gpus=number(gpus_per_node, "GPU"),
                gpu_type=gpu_type,
                has=has,
            ),
            _("Choose one of these.") if kinds else _("Choose another partition."),
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
    proposed: BookingRequest,
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
    need = _need_of(proposed)
    _check_size(proposed, board, policy)
    _check_named(proposed, board)
    nodes = board.place(need, proposed.start, prefer)
    if nodes is not None:
        return nodes
    earliest, latest = window(policy, now)
    slots = board.nearest(need, proposed.start, earliest, latest, STEP)
    if slots:
        remedy = _(
            "Free times: {slots}.", slots=listing(span_text(slot, slot + need.length, zone) for slot in slots)
        )
    else:
        remedy = _(
            "There is no such time in the next {days}: ask for fewer nodes or less time.",
            days=number(policy.horizon_days, "day"),
        )
    raise InvalidRequest(_why_none(proposed, board, policy, need, zone), remedy, field="start")


def _why_none(
    proposed: BookingRequest, board: Board, policy: BookingSettings, need: Need, zone: ZoneInfo
) -> str:
    """What is in the way of a booking at its time."""
    start, end = proposed.start, proposed.end
    free = len(board.free(start, end))
    when = span_text(start, end, zone)
    taken = sorted(need.named.difference(board.free(start, end)))
    are_free = not taken and free >= proposed.nodes
    if are_free and board.is_own_limit(start, end, proposed.gpus):
        return _(
            "At most {own_most} GPUs of type {gpu_type} in partition {partition!r} may be booked at "
            "a time for the project {project!r}; {when}, {bookable} more can be booked, and "
            "{gpus} were requested.",
            own_most=board.own_most,
            gpu_type=proposed.gpu_type,
            partition=proposed.partition,
            project=proposed.project,
            when=when,
            bookable=board.bookable(start, end),
            gpus=proposed.gpus,
        )
    if are_free:
        return _(
            "At most {share_percent} % of the GPUs of type {gpu_type} in partition {partition!r} "
            "may be booked at a time; {when}, {bookable} more can be booked, and {gpus} were requested.",
            share_percent=policy.share_percent,
            gpu_type=proposed.gpu_type,
            partition=proposed.partition,
            when=when,
            bookable=board.bookable(start, end),
            gpus=proposed.gpus,
        )
    if taken:
        return plural(
            "{taken} is not free for the whole time, {when}.",
            "{taken} are not free for the whole time, {when}.",
            len(taken),
            taken=listing(taken),
            when=when,
        )
    if proposed.nodes == 1:
        return _(
            "No node with {gpus} of type {gpu_type} is free for the whole time, {when}.",
            gpus=number(proposed.gpus_per_node, "GPU"),
            gpu_type=proposed.gpu_type,
            when=when,
        )
    return plural(
        "{count} of the {nodes} requested nodes with {gpus} of type {gpu_type} is free for the whole "
        "time, {when}.",
        "{count} of the {nodes} requested nodes with {gpus} of type {gpu_type} are free for the whole "
        "time, {when}.",
        free,
        nodes=proposed.nodes,
        gpus=number(proposed.gpus_per_node, "GPU"),
        gpu_type=proposed.gpu_type,
        when=when,
    )


def nearest_starts(
    proposed: BookingRequest, board: Board, policy: BookingSettings, now: datetime
) -> list[datetime]:
    """The nearest starts at which the booking could be had."""
    need = _need_of(proposed)
    return board.nearest(need, proposed.start, *window(policy, now), STEP)


def _need_of(proposed: BookingRequest) -> Need:
    length = timedelta(minutes=proposed.minutes)
    return Need(proposed.nodes, proposed.gpus_per_node, length, frozenset(proposed.node_names))


def _check_named(proposed: BookingRequest, board: Board) -> None:
    """See that the nodes that are named can be had at all."""
    if len(set(proposed.node_names)) > proposed.nodes:
        raise InvalidRequest(
            _(
                "You named {named} but requested {nodes}.",
                named=number(len(set(proposed.node_names)), "node"),
                nodes=proposed.nodes,
            ),
            _("Ask for as many nodes as you name, or name fewer."),
            field="nodes",
        )
    if unknown := sorted(set(proposed.node_names).difference(board.nodes)):
        raise InvalidRequest(
            _(
                "Partition {partition!r} has no node {unknown} with {gpus} of type {gpu_type} that "
                "takes jobs; it has: {nodes}.",
                partition=proposed.partition,
                unknown=listing(unknown),
                gpus=number(proposed.gpus_per_node, "GPU"),
                gpu_type=proposed.gpu_type,
                nodes=listing(board.nodes),
            ),
            _("Name one of these, or none."),
            field="node_names",
        )


def _check_size(proposed: BookingRequest, board: Board, policy: BookingSettings) -> None:
    """See that it could be had on an empty system."""
    count = len(board.nodes)
    if proposed.nodes > count:
        raise InvalidRequest(
            plural(
                "{count} node of partition {partition!r} with {gpus} of type {gpu_type} takes jobs; {nodes} "
                "were requested.",
                "{count} nodes of partition {partition!r} with {gpus} of type {gpu_type} take jobs; {nodes} "
                "were requested.",
                count,
                partition=proposed.partition,
                gpus=number(proposed.gpus_per_node, "GPU"),
                gpu_type=proposed.gpu_type,
                nodes=proposed.nodes,
            ),
            _("Ask for {count} or fewer.", count=count)
            if count
            else _("Try again later, or ask an administrator."),
            field="nodes",
        )
    if board.own_most is not None:
        message = _(
            "At most {own_most} GPUs of type {gpu_type} in partition {partition!r} may be booked at "
            "a time for the project {project!r}; {gpus} were requested.",
            own_most=board.own_most,
            gpu_type=proposed.gpu_type,
            partition=proposed.partition,
            project=proposed.project,
            gpus=proposed.gpus,
        )
        _check_limit(proposed, board.own_most, message)
    if board.most_booked is not None:
        message = _(
            "At most {share_percent} % of the GPUs of type {gpu_type} in partition {partition!r} "
            "may be booked at a time, that is {most_booked}; {gpus} were requested.",
            share_percent=policy.share_percent,
            gpu_type=proposed.gpu_type,
            partition=proposed.partition,
            most_booked=board.most_booked,
            gpus=proposed.gpus,
        )
        _check_limit(proposed, board.most_booked, message)


def _check_limit(proposed: BookingRequest, limit: int, message: str) -> None:
    """Refuse more GPUs than the limit with this message, and say how many nodes are possible."""
    if proposed.gpus <= limit:
        return
    nodes = limit // proposed.gpus_per_node
    remedy = (
        _("Ask for {nodes} or fewer.", nodes=number(nodes, "node"))
        if nodes
        else _("Start a session without a booking, or ask an administrator.")
    )
    raise InvalidRequest(message, remedy, field="nodes")
