"""The broker: the one door to Slurm, and the clients that knock at it."""

from carme.broker.client import AsyncBrokerClient, BrokerClient, LastAnswers
from carme.broker.protocol import EventBatch, LogPart, StartEstimate

__all__ = [
    "AsyncBrokerClient",
    "BrokerClient",
    "EventBatch",
    "LastAnswers",
    "LogPart",
    "StartEstimate",
]
