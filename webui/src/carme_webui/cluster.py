"""The cluster as the portal shows it: what is free, and what a session may ask for."""

from dataclasses import dataclass

from django.conf import settings

from carme.broker import BrokerClient
from carme.images import Image, ImageCatalogue
from carme.jobs import Cluster

__all__ = ["Supply", "broker", "entry_points", "images", "supplies"]


@dataclass(frozen=True)
class Supply:
    """The GPUs of one type: free now and in all, and on one node at most."""

    kind: str
    free: int
    total: int
    per_node: int


# What the portal asks, the broker answers from memory or after one look at accounting.
BROKER_TIMEOUT = 10.0


def broker() -> BrokerClient:
    """The broker of this site."""
    return BrokerClient(settings.SITE.broker.socket, timeout=BROKER_TIMEOUT)


def entry_points(image: Image) -> dict[str, str]:
    """What an image can open, with titles; an image that names nothing has JupyterLab."""
    return image.entry_points or {"lab": "JupyterLab"}


def images() -> ImageCatalogue:
    """The images of this site."""
    return ImageCatalogue(settings.SITE.images.directory)


def supplies(cluster: Cluster) -> list[Supply]:
    """The GPUs of the cluster by type. Those of nodes that take no jobs are not free."""
    kinds = sorted({kind for node in cluster.nodes for kind in node.gpus})
    return [
        Supply(
            kind=kind,
            free=sum(
                max(0, node.gpus.get(kind, 0) - node.gpus_used.get(kind, 0))
                for node in cluster.nodes
                if node.available
            ),
            total=sum(node.gpus.get(kind, 0) for node in cluster.nodes),
            per_node=max(node.gpus.get(kind, 0) for node in cluster.nodes),
        )
        for kind in kinds
    ]
