"""Where the commands begin: what a user sets for Python is for the user's programs, not for these.

With a `json.py` in PYTHONPATH they would not start. Job images start them isolated (`python -I`), which
spares them PYTHONHOME as well; wherever else they are installed, this is what can be done.
"""

import os
import site
import sys
from pathlib import Path

__all__ = ["agent", "remote", "run"]


def run(announces: bool = False) -> None:
    """`carme-run`; `announces`: it says what it starts."""
    _ours_first()
    from carme_runtime.launcher.command import main

    main(announces)


def agent() -> None:
    """`carme-agent`."""
    _ours_first()
    from carme_runtime.fabric.command import main

    main()


def remote() -> None:
    """`carme-remote`."""
    _ours_first()
    from carme_runtime.launcher.remote import main

    main()


def _ours_first() -> None:
    """Look for modules in the folders of PYTHONPATH last, and in those that only the user's Python knows.

    They are not left out, as the launcher looks whether a program's module is there at all.
    """
    user_folders = [
        Path(folder).absolute() for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder
    ]
    if sys.flags.isolated:
        user_folders.append(Path(site.getusersitepackages()))
    own = [folder for folder in sys.path if Path(folder).absolute() not in user_folders]
    sys.path[:] = [*own, *map(str, user_folders)]
