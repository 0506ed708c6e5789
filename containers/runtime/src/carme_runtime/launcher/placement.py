"""Which rank runs where, and the variables that say so."""

from collections.abc import Mapping
from dataclasses import dataclass

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.fabric.members import Member, Members


@dataclass(frozen=True)
class Place:
    """Where one rank runs."""

    rank: int
    member: Member
    node_rank: int
    local_rank: int
    local_size: int


def place(
    members: Members,
    *,
    ranks: int | None = None,
    nodes: int | None = None,
    per_node: int | None = None,
    devices_per_rank: int | None = None,
    slots: list[int] | None = None,
) -> list[Place]:
    """Spread a run evenly over nodes, in blocks: the first ranks on the first node, and so on.

    Args:
        members: the nodes that are there.
        ranks: how many in all; None: `per_node` on each node.
        nodes: use the first so many nodes; None: all.
        per_node: at most so many on a node; None: one per device, and without devices one (or
            as many as `ranks` needs).
        devices_per_rank: how many devices a rank has for itself; None: one, where they limit the ranks.
        slots: at most so many on each node; 0: not given. `per_node` counts instead where both are given.

    Raises:
        CarmeRuntimeError: there is no room for it.
    """
    used = members.present[:nodes]
    each = devices_per_rank or 1
    if devices_per_rank and any(member.devices < each * (per_node or 1) for member in used):
        raise _too_few_devices(each, per_node or 1, used)
    if per_node is not None:
        room = [per_node] * len(used)
    elif slots and all(slots):
        room = slots[:nodes]
    elif any(member.devices for member in used):
        room = [member.devices // each for member in used]
    else:
        room = [1 if ranks is None else ranks] * len(used)
    if ranks is None:
        counts = room
    elif ranks > sum(room):
        raise _no_room(ranks, used, per_node, room)
    else:
        counts = [0] * len(used)
        for _ in range(ranks):
            free = [index for index in range(len(used)) if counts[index] < room[index]]
            counts[min(free, key=counts.__getitem__)] += 1
    places: list[Place] = []
    filled = [(member, count) for member, count in zip(used, counts, strict=True) if count]
    for node_rank, (member, count) in enumerate(filled):
        places += [Place(len(places) + local, member, node_rank, local, count) for local in range(count)]
    return places


def is_spread(places: list[Place]) -> bool:
    """Whether these ranks are on several nodes."""
    return places[-1].node_rank > 0


def rank_environment(
    place: Place, places: list[Place], master_port: int, caller: Mapping[str, str]
) -> dict[str, str]:
    """The variables that the rank at `place`, one of `places`, gets on top of the caller's."""
    spans_nodes = is_spread(places)
    variables = {
        "RANK": place.rank,
        "WORLD_SIZE": len(places),
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_size,
        "NODE_RANK": place.node_rank,
        "GROUP_RANK": place.node_rank,
        "MASTER_ADDR": places[0].member.address if spans_nodes else "127.0.0.1",
        "MASTER_PORT": master_port,
        "PYTHONUNBUFFERED": 1,
    }
    if "OMP_NUM_THREADS" not in caller:
        variables["OMP_NUM_THREADS"] = max(1, place.member.cpus // place.local_size)
    if spans_nodes and place.member.interface:
        # Gloo would take the address that the host's own name has, which on many hosts is a loopback one.
        variables["GLOO_SOCKET_IFNAME"] = caller.get("GLOO_SOCKET_IFNAME", place.member.interface)
    if spans_nodes:
        # For carme_runtime.gaspi: where this rank is reached, and the key by which ranks know each other.
        variables["CARME_ADDRESS"] = place.member.address
        variables["CARME_KEY_FILE"] = place.member.key_file
    return {name: str(value) for name, value in variables.items()}


def _too_few_devices(each: int, per_node: int, used: tuple[Member, ...]) -> CarmeRuntimeError:
    listed = ", ".join(f"{member.host}: {member.devices}" for member in used)
    return CarmeRuntimeError(
        f"--devices-per-rank {each} was requested, with at least {per_node} rank{'s' * (per_node > 1)} on "
        f"each node, but the job has these GPUs: {listed}.",
        "Ask for fewer, or start a job with more GPUs.",
    )


def _no_room(
    ranks: int, used: tuple[Member, ...], per_node: int | None, room: list[int]
) -> CarmeRuntimeError:
    if per_node is not None:
        most = per_node * len(used)
        return CarmeRuntimeError(
            f"{ranks} ranks were requested, but --devices-per-node {per_node} leaves room for {most} "
            f"(nodes: {len(used)}).",
            f"Use -n {most} or less, or a larger --devices-per-node.",
        )
    most = sum(room)
    listed = ", ".join(f"{member.host}: {count}" for member, count in zip(used, room, strict=True))
    per_gpu = "one per GPU " if room == [member.devices for member in used] else ""
    return CarmeRuntimeError(
        f"{ranks} ranks were requested, but the job has room for {most}, {per_gpu}({listed}).",
        f"Use -n {most} or less, or --devices-per-node K for K ranks on each node whatever GPUs it has.",
    )
