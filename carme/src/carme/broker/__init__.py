"""The broker, which alone acts in Slurm for users, and its clients."""

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
