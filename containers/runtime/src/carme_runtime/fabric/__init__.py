"""The job fabric: one agent per node, all connected to the first node's agent, and clients of them."""

from carme_runtime.fabric.client import AgentConnection, Fabric, LocalFabric, connect
from carme_runtime.fabric.members import Member, Members

__all__ = ["AgentConnection", "Fabric", "LocalFabric", "Member", "Members", "connect"]
