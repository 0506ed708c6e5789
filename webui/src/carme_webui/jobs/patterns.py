"""Scripts to begin with."""

from typing import TYPE_CHECKING, NamedTuple

from django.utils.translation import gettext_lazy as _

from carme.jobs.templates import TEMPLATES

if TYPE_CHECKING:
    from django.utils.functional import _StrPromise as StrPromise

__all__ = ["PATTERNS", "Pattern"]


class Pattern(NamedTuple):
    """A script, and what its job asks for."""

    title: "StrPromise | str"
    script: str
    gpus_per_node: int = 0
    nodes: int = 1
    minutes: int = 60
    in_image: bool = False
    cpus_per_node: int | None = None
    memory_mb_per_node: int | None = None


PATTERNS = {
    "shell": Pattern(
        _("A few commands"),
        '#!/bin/bash\nset -eu\n\necho "This is $(hostname)"\nnproc\nfree -h\n',
        minutes=10,
    ),
    "python": Pattern(
        _("A Python program on one GPU"),
        "#!/bin/bash\nset -eu\n\ncd ~/my-project\npython train.py --epochs 3\n",
        gpus_per_node=1,
        in_image=True,
    ),
    "distributed": Pattern(
        _("Training over several nodes"),
        "#!/bin/bash\nset -eu\n\ncd ~/my-project\n# One rank for each GPU of each node\ncarme-run train.py\n",
        gpus_per_node=1,
        nodes=2,
        in_image=True,
    ),
    "compare": Pattern(
        _("A comparison of frameworks"),
        "#!/bin/bash\nset -eu\n\n"
        "# Trains the same networks with every framework of the image, on one rank and on two.\n"
        "# Take whole nodes. The report is ~/comparison/compare.html.\n"
        "carme-run compare --output ~/comparison\n",
        nodes=2,
        in_image=True,
        # All contestants of a network are in memory at once, each with a process for each rank.
        cpus_per_node=8,
        memory_mb_per_node=12_000,
    ),
} | {
    name: Pattern(
        template.title,
        template.script,
        gpus_per_node=template.gpus_per_node,
        nodes=template.nodes,
        minutes=template.minutes,
        in_image=True,
    )
    for name, template in TEMPLATES.items()
}
