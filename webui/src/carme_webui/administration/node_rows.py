"""The list of nodes: what is used of each, and which jobs run there."""

from collections.abc import Iterable
from dataclasses import dataclass

from django.utils.translation import gettext as _

from carme.jobs import Job, Node, Phase
from carme.jobs.nodes import expand
from carme_webui.administration.node_states import state_words
from carme_webui.sizes import memory_words

__all__ = ["Bar", "NodeRow", "jobs_by_node"]

#: So many jobs of a node are named.
MOST_JOBS = 8


@dataclass(frozen=True)
class Bar:
    """What is used of something; `total` is at least 1."""

    title: str
    used: int
    total: int
    words: str


@dataclass(frozen=True)
class NodeRow:
    """A node in the list.

    Attributes:
        state: Its state in words.
        waits: Whether a change of it was sent and is not seen yet.
        bars: What is used of its GPUs, processors and memory.
        jobs: Those that run there, MOST_JOBS at most.
        further: How many more there are.
    """

    node: Node
    state: str
    waits: bool
    bars: list[Bar]
    jobs: list[Job]
    further: int

    @classmethod
    def of(cls, node: Node, jobs: list[Job], waits: bool) -> "NodeRow":
        """The row of a node with the jobs that run there."""
        gpus, gpus_used = sum(node.gpus.values()), sum(node.gpus_used.values())
        kinds = ", ".join(node.gpus)
        bars = [
            Bar(_("GPUs"), gpus_used, gpus, f"{gpus_used} / {gpus} {kinds}"),
            Bar(_("Processors"), node.cpus_used, node.cpus, f"{node.cpus_used} / {node.cpus}"),
            Bar(
                _("Memory"),
                node.memory_used_mb,
                node.memory_mb,
                f"{memory_words(node.memory_used_mb)} / {memory_words(node.memory_mb)}",
            ),
        ]
        shown = [bar for bar in bars if bar.total]
        return cls(node, state_words(node.state), waits, shown, jobs[:MOST_JOBS], len(jobs[MOST_JOBS:]))


def jobs_by_node(jobs: Iterable[Job]) -> dict[str, list[Job]]:
    """The running jobs of each node, by the nodes' names; the newest first."""
    found: dict[str, list[Job]] = {}
    for job in sorted(jobs, key=lambda job: -job.id):
        if job.state.phase is Phase.RUNNING and job.node_list:
            for name in expand(job.node_list):
                found.setdefault(name, []).append(job)
    return found
