"""Which variables belong to a notebook's server, not to the programs that its user starts."""

from collections.abc import Mapping

# JupyterHub's: the server's own token, and where and as whom it may use it.
PREFIXES = ("JUPYTERHUB_", "JPY_")


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without them."""
    return {name: value for name, value in environment.items() if not name.startswith(PREFIXES)}
