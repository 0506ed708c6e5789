"""Carme's monitoring: exporters of what GPUs, nodes and jobs do."""
