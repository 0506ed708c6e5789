"""`python -s -m carme_spawner.singleuser.bundling`: write the bundle, at the end of an image's build."""

import os

from carme_spawner.singleuser import bundle, imports


def main() -> None:
    """Import what a start imports, and bundle it."""
    bundle.FILE.unlink(missing_ok=True)
    imports.prepare()
    # Only now: it imports what `prepare` has made ready.
    from carme_spawner.singleuser.server import SessionServer

    os.environ.setdefault("JUPYTERHUB_SERVICE_URL", "http://127.0.0.1:1")
    os.environ.setdefault("JUPYTERHUB_API_URL", "http://127.0.0.1:1")
    os.environ.setdefault("JUPYTERHUB_API_TOKEN", "none")
    os.environ.setdefault("JUPYTERHUB_CLIENT_ID", "none")
    os.environ.setdefault("JUPYTERHUB_HOST", "")
    SessionServer.initialize_server(argv=["--allow-root"])
    print(f"{bundle.FILE}: {bundle.write()} modules")


if __name__ == "__main__":
    main()
