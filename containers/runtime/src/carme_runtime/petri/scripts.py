"""Finds the net of a run that is to go on: reads the script that made it."""

import importlib
import os
import runpy
import sys
import types
from pathlib import Path
from typing import TypeVar

from carme_runtime.petri.definition import Definition, nets
from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.frames import header_of

Kind = TypeVar("Kind", bound=Definition)


def net_of(folder: Path, kind: type[Kind]) -> Kind:
    """The net of the run in `folder`.

    Args:
        folder: Of the run.
        kind: The class of nets that is looked for.

    Raises:
        PetriError: Its script is gone, fails, or makes no such net.
    """
    header = header_of(folder / "journal")
    name, (module, file) = header["net"], header["origin"]
    if not file or not Path(file).exists():
        raise PetriError(
            f"The run in {folder} was started by {file or 'a notebook or a prompt'}, which is not to "
            "be found.",
            "Make its net again, and use Net.resume(folder, net=net).",
        )
    before = _nets_of(kind)
    _read_or_refuse(module, file, f", which made net {name},")
    found = [net for net in _nets_of(kind) if net.name == name and net.origin[1] == file]
    for net in found:
        if net not in before or len(found) == 1:
            return net
    raise PetriError(
        f"{file} makes no net {name} when it is read as a module.",
        'Make the net outside of `if __name__ == "__main__":`, or use Net.resume(folder, net=net).',
    )


def net_in(script: Path, kind: type[Kind], name: str = "") -> Kind:
    """The net that a script makes when it is read as a module.

    Args:
        script: A Python file.
        kind: The class of nets that is looked for.
        name: Of the net; needed where the script makes several.

    Raises:
        PetriError: There is no such script or net, or the script fails.
    """
    file = str(script.absolute())
    if not script.is_file():
        raise PetriError(f"There is no script {script}.", "Name a Python file that makes a Net.")
    _read_or_refuse("__main__", file, "")
    found = {net.name: net for net in _nets_of(kind) if net.origin[1] == file}
    if name in found or (len(found) == 1 and not name):
        return found.get(name) or next(iter(found.values()))
    if not found:
        raise PetriError(
            f"{script} makes no net when it is read as a module.",
            'Make the net outside of `if __name__ == "__main__":`.',
        )
    names = ", ".join(sorted(found))
    raise PetriError(f"{script} makes {'no such net' if name else 'several nets'}.", f"Choose from {names}.")


def _nets_of(kind: type[Kind]) -> set[Kind]:
    return {net for net in nets if isinstance(net, kind)}


def _read_or_refuse(module: str, file: str, suffix: str) -> None:
    try:
        _read(module, file)
    except Exception as error:
        raise PetriError(
            f"{file}{suffix} fails: {type(error).__name__}: {error}.",
            "Mend it, or use Net.resume(folder, net=net)." if suffix else "Mend it.",
        ) from error


def _read(module: str, file: str) -> None:
    folder = os.path.dirname(file)  # noqa: PTH120
    sys.path.insert(0, folder)
    try:
        if module in ("__main__", "__carme_main__"):
            _read_main(file)
        else:
            importlib.import_module(module)
    finally:
        sys.path.remove(folder)


def _read_main(file: str) -> None:
    # Classes of tokens were pickled as those of __main__: let them be found there.
    main = types.ModuleType("__carme_main__")
    sys.modules["__carme_main__"] = main
    main.__dict__.update(runpy.run_path(file, run_name="__carme_main__"))
    current = sys.modules["__main__"]
    for name, value in list(main.__dict__.items()):
        if not name.startswith("__") and not hasattr(current, name):
            setattr(current, name, value)
