"""Files of tasks: written anew under their names, in folders that their owner alone can write into."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from carme_runtime.onnx.errors import OnnxError

_ELSEWHERE = "Free some space there, or set TMPDIR to a folder of yours."


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which gets its name when all of it is there.

    What had the name before, a link too, is left as it is, and goes.

    Args:
        path: The name.
    """
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # nobody else can open it
    draft = Path(name)
    try:
        with os.fdopen(number, "wb") as file:
            yield file
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def temporary(where: Path | None = None, remedy: str = _ELSEWHERE) -> Iterator[Path]:
    """A folder that is removed at the end.

    Args:
        where: In which folder; None: that for temporary files.
        remedy: What to do where it cannot be made.

    Raises:
        OnnxError: It cannot be made.
    """
    try:
        temporary = tempfile.TemporaryDirectory(prefix="carme-onnx-", dir=where)
    except OSError as error:
        raise unwritable(str(where or "the folder for temporary files"), error, remedy) from error
    with temporary as folder:
        yield Path(folder)


def unwritable(folder: str, error: OSError, remedy: str) -> OnnxError:
    """What to say where tasks cannot be written.

    Args:
        folder: Where.
        error: Why.
        remedy: What to do.
    """
    return OnnxError(f"Tasks cannot be written to {folder}: {error.strerror or error}.", remedy)
