"""Scripts that jobs run: which program runs them, and those that travel with the request."""

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath

from carme.errors import InvalidRequest
from carme.jobs.contents import to_bytes
from carme.translation import message as _

__all__ = ["MAXIMUM_BYTES", "SCRIPT", "check_start", "interpreter", "name_of", "sent", "sent_script"]

MAXIMUM_BYTES = 256 * 1024
BOM = b"\xef\xbb\xbf"
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
#: The file of a request that holds a script which travels with it.
SCRIPT = "script"
#: Arguments: what runs the script, its one argument or nothing, and the script's arguments. The text is
#: always the same: nothing that a user writes is read as shell commands here.
_RUN = 'p=$1 a=$2; shift 2; exec "$p" ${a:+"$a"} "$CARME_JOB_FOLDER/files/script" "$@"'


def interpreter(first_line: bytes) -> list[str]:
    """What runs a script that is not executable: its first line says it, else the shell."""
    first = first_line.removeprefix(BOM).partition(b"\n")[0]
    words = first[2:].decode(errors="replace").split(maxsplit=1) if first.startswith(b"#!") else []
    return [word.strip() for word in words] or ["/bin/sh"]


def check_start(name: str, start: bytes) -> None:
    """Refuse a script that a shell cannot read where it lies, though it looks right in an editor.

    Args:
        name: How its owner calls it.
        start: Its first bytes.

    Raises:
        InvalidRequest: Which says how to put it right.
    """
    quoted = shlex.quote(name)
    if start.startswith(UTF_16):
        raise InvalidRequest(
            _("The script {name!r} is text in UTF-16, which nothing can run.", name=name),
            _("Save it as UTF-8, or use: iconv -f UTF-16 -t UTF-8 {quoted} > NEW", quoted=quoted),
            field="script",
        )
    words = [word for part in interpreter(start) for word in part.split() if not word.startswith("-")]
    programs = [PurePosixPath(word).name for word in words or ["sh"]]
    program = programs[1] if programs[0] == "env" and len(programs) > 1 else programs[0]
    if not re.fullmatch(r"(ba|da|z|k|mk|c|tc|fi)?sh", program):
        return  # others read both
    if start.startswith(BOM):
        raise InvalidRequest(
            _(
                "The script {name!r} begins with a byte order mark (BOM), which {program} takes for a "
                "command.",
                name=name,
                program=program,
            ),
            _("Remove it with: sed -i '1s/^\\xEF\\xBB\\xBF//' {quoted}", quoted=quoted),
            field="script",
        )
    if b"\r\n" in start:
        raise InvalidRequest(
            _(
                "The script {name!r} has the line ends of Windows (CR LF), which {program} cannot read.",
                name=name,
                program=program,
            ),
            _("Convert it with: sed -i 's/\\r$//' {quoted}", quoted=quoted),
            field="script",
        )


def name_of(program: str) -> str:
    """A name for a job that runs this."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", PurePosixPath(program).name)[:64] or "job"


def sent(text: str, arguments: Sequence[str] = ()) -> tuple[list[str], dict[str, str]]:
    """Command and files of a request whose script travels with it.

    Args:
        text: The script (`carme.jobs.contents`); its bytes stay as they are, but for line ends of Windows.
        arguments: Its arguments.

    Raises:
        InvalidRequest: It is empty, too large, or holds what no script can hold.
    """
    check_text(text)
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    program, *argument = interpreter(to_bytes(text[:256]))
    return ["/bin/sh", "-c", _RUN, "sh", program, *(argument or [""]), *arguments], {SCRIPT: text}


def sent_script(command: Sequence[str], files: dict[str, str]) -> tuple[str, list[str]] | None:
    """The script and its arguments, if the request was made by `sent`."""
    if list(command[:3]) != ["/bin/sh", "-c", _RUN] or SCRIPT not in files:
        return None
    return files[SCRIPT], list(command[6:])


def check_text(text: str) -> None:
    """See that this can be a script. Raises InvalidRequest."""
    if not text.strip():
        raise InvalidRequest(_("The script is empty."), _("Write at least one command."), field="script")
    data = to_bytes(text)
    if (size := len(data)) > MAXIMUM_BYTES:
        raise InvalidRequest(
            _(
                "The script has {size} bytes; at most {maximum_bytes} are allowed.",
                size=size,
                maximum_bytes=MAXIMUM_BYTES,
            ),
            _("Put data into a file of your home, and have the script read it."),
            field="script",
        )
    if data.startswith(UTF_16):
        raise InvalidRequest(
            _("The script is text in UTF-16, which nothing can run."), _("Save it as UTF-8."), field="script"
        )
    if "\0" in text:
        raise InvalidRequest(
            _("The script holds a NUL character, so it is not text."),
            _("Name a script. To start a program, give a command."),
            field="script",
        )
