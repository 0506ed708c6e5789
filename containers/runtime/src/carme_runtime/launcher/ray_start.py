"""Ray's own command, with agents that may be slow: `python -m carme_runtime.launcher.ray_start`.

Ray's raylet ends after 15 s if the agent of its dashboard has not written down its port by then, though the
port was given. A busy machine needs longer, so here the port is written down before the raylet starts.
"""

# pyright: reportMissingImports=false

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any


def with_port_written(
    start: Callable[..., Any], write: Callable[[str, str, int], None]
) -> Callable[..., Any]:
    """Ray's function that starts a raylet, which finds the port of the dashboard's agent.

    Args:
        start: It names the session's folder, the node's id and the port as Ray 2.60 does; else nothing is
            written.
        write: Gets these three.
    """

    @functools.wraps(start)
    def started(*args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(start).bind(*args, **kwargs).arguments
        folder, node, port = map(arguments.get, ("session_dir", "node_id", "dashboard_agent_listen_port"))
        if folder and node and port:
            write(str(folder), str(node), int(port))
        return start(*args, **kwargs)

    return started


def main() -> None:
    """Be `ray`."""
    from ray._private import services
    from ray.scripts.scripts import main as ray

    with contextlib.suppress(ImportError):  # an older Ray, whose raylet waits for no file
        from ray._raylet import (
            DASHBOARD_AGENT_LISTEN_PORT_NAME,  # pyright: ignore[reportAttributeAccessIssue] - in no stub
            persist_port,  # pyright: ignore[reportAttributeAccessIssue]
        )

        def write(folder: str, node: str, port: int) -> None:
            persist_port(folder, node, DASHBOARD_AGENT_LISTEN_PORT_NAME, port)

        services.start_raylet = with_port_written(services.start_raylet, write)
    ray()


if __name__ == "__main__":
    main()
