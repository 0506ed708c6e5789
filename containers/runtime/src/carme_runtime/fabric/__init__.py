"""The job fabric: one agent per node, all connected to the first node's agent, and clients of them.

Nothing is imported here: an agent starts its job's command before it imports most of this package.
"""
