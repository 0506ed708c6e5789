"""The exporter that runs on each compute node."""

from carme_monitoring.node.collector import NodeCollector

__all__ = ["NodeCollector"]
