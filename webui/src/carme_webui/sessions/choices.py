"""Hardware and time of forms as choices: a card or a span of time instead of numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, time, timedelta
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from carme.config import Settings
from carme.jobs import Cluster
from carme.jobs.checks import CPUS_WITHOUT_GPU, MEMORY_MB_WITHOUT_GPU
from carme_webui.clocks import minutes_words, reader_zone
from carme_webui.cluster import Supply
from carme_webui.sessions.models import Preset
from carme_webui.sizes import memory_words

__all__ = ["CUSTOM", "EVENING", "OF_PRESET", "Card", "cards", "evening_minutes", "matching", "times"]

#: The choice of somebody who fills in the numbers.
CUSTOM = "custom"
#: The choice that ends with the working day, and when that is by the site's clocks.
EVENING = "evening"
EVENING_HOUR = 18
HOURS = (1, 4)
#: A session that would end sooner than this is not worth its start.
SHORTEST_MINUTES = 15
MOST_TYPES = 2
#: So many presets add their hardware.
MOST_PRESETS = 3
#: What the keys of these cards begin with.
OF_PRESET = "preset-"


@dataclass(frozen=True)
class Card:
    """Hardware to choose with one click.

    Attributes:
        key: Its value in the form.
        title: What users call it.
        detail: What comes with it.
        values: The fields that it fills in.
    """

    key: str
    title: str
    detail: str
    values: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.title}, {self.detail}" if self.detail else self.title


def cards(
    site: Settings, cluster: Cluster | None, kinds: Sequence[Supply], presets: Sequence[Preset] = ()
) -> list[Card]:
    """The site's list, then the hardware of presets where that is on no card yet.

    A site without a list offers a processor, one GPU and a whole node of each type.

    Args:
        kinds: The GPUs of the cluster.
    """
    if cluster is None:
        return []
    found = _of_site(site, cluster, kinds)
    offered = len(found)
    for preset in presets:
        options = preset.options
        if len(found) < offered + MOST_PRESETS and matching(found, options) == CUSTOM:
            sizes = options.get("gpus_per_node") or 0, options.get("nodes") or 1
            card = _card(cluster, *sizes, options.get("gpu_type") or "", preset.name)
            found.append(replace(card, key=OF_PRESET + card.key))
    return found


def _of_site(site: Settings, cluster: Cluster, kinds: Sequence[Supply]) -> list[Card]:
    if site.sessions.hardware:
        return [
            _card(cluster, each.gpus_per_node, each.nodes, each.gpu_type, each.title, each.partition)
            for each in site.sessions.hardware
        ]
    kinds = sorted(kinds, key=lambda kind: -kind.total)[:MOST_TYPES]
    found = [_card(cluster, 0)]
    for kind in kinds:
        named = kind.kind if len(kinds) > 1 else ""
        found.append(_card(cluster, 1, 1, named))
        if kind.per_node > 1:
            found.append(_card(cluster, kind.per_node, 1, named))
    if len(kinds) == 1 and kinds[0].total > kinds[0].per_node:
        found.append(_card(cluster, kinds[0].per_node, 2))
    return found


def _card(
    cluster: Cluster, gpus: int, nodes: int = 1, gpu_type: str = "", title: str = "", partition: str = ""
) -> Card:
    values: dict[str, Any] = {"gpus_per_node": gpus, "nodes": nodes, "gpu_type": gpu_type}
    if partition:
        values["partition"] = partition
    amount = ngettext("%d GPU", "%d GPUs", gpus) % gpus if gpus else _("No GPU")
    if nodes > 1:
        amount = _("%(nodes)d nodes, %(amount)s each") % {"nodes": nodes, "amount": amount}
    if gpu_type:
        amount += f" ({gpu_type})"
    detail = ", ".join(filter(None, [amount if title else "", _share(cluster, gpus, gpu_type)]))
    return Card(f"{gpus}-{nodes}-{gpu_type}-{partition}", title or amount, detail, values)


def _share(cluster: Cluster, gpus: int, gpu_type: str) -> str:
    """The processors and the memory that come with so many GPUs of a node."""
    for node in cluster.nodes:
        total = node.gpus.get(gpu_type, 0) if gpu_type else sum(node.gpus.values())
        if gpus and total >= gpus:
            return _share_words(max(1, node.cpus * gpus // total), node.memory_mb * gpus // total)
    return "" if gpus else _share_words(CPUS_WITHOUT_GPU, MEMORY_MB_WITHOUT_GPU)


def _share_words(cpus: int, memory_mb: int) -> str:
    words = ngettext("%(cpus)d CPU, %(memory)s", "%(cpus)d CPUs, %(memory)s", cpus)
    return words % {"cpus": cpus, "memory": memory_words(memory_mb)}


def matching(found: list[Card], values: Mapping[str, Any]) -> str:
    """The card that says what these values say, else the choice of own numbers."""
    for card in found:
        if all(str(values.get(name) or 0) == str(wanted or 0) for name, wanted in card.values.items()):
            return card.key
    return CUSTOM


def times(
    default: int, most: int, now: datetime, hours: Sequence[int] = HOURS, evening: bool = True
) -> list[tuple[str, str]]:
    """The spans of time that are allowed, and the rest of the working day.

    Args:
        default: So many minutes are offered in any case.
        most: More minutes are not allowed.
        hours: Those that are offered.
        evening: Whether the rest of the working day is offered; not for what may have to wait.
    """
    found = [(str(60 * count), _("%d h") % count) for count in hours if 60 * count <= most]
    if evening and SHORTEST_MINUTES <= evening_minutes(now) <= most:
        found.append((EVENING, _("until %d:00") % EVENING_HOUR))
    if str(default) not in dict(found):
        found.insert(0, (str(default), minutes_words(default)))
    return found


def evening_minutes(now: datetime) -> int:
    """Minutes until the end of the working day, today's or tomorrow's."""
    local = now.astimezone(reader_zone())
    end = datetime.combine(local.date(), time(EVENING_HOUR), local.tzinfo)
    if end <= local:
        end += timedelta(days=1)
    return int((end - local).total_seconds() // 60)
