"""The small program that makes a job's private folder and submits the job, run as the job's owner.

A session's user waits for it, so it imports next to nothing. It reads one dictionary from standard input, in
Python's own form (marshal): `folder`, `arguments` (of sbatch), `script`, and `files` (name to text; in the
folder, or in `files/` in it).
"""

import errno
import marshal
import os
import sys

NO_FOLDER = 75  # exit code: the folder could not be made; standard error says why


def main() -> int:
    """Submit; prints what sbatch prints and returns its exit code."""
    order = marshal.load(sys.stdin.buffer)
    folder, files = order["folder"], order["files"]
    try:
        home = os.environ["HOME"]
        if not os.path.isdir(home):  # noqa: PTH112 - pathlib takes longer to import than this program to run
            raise FileNotFoundError(errno.ENOENT, "there is no home directory", home)
        if not os.access(home, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "the home directory cannot be written", home)
        os.makedirs(os.path.dirname(folder), mode=0o700, exist_ok=True)  # noqa: PTH103, PTH120
        for part in (folder, f"{folder}/files"):
            os.mkdir(part, mode=0o700)  # noqa: PTH102
        for name, text in files.items():
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with os.fdopen(os.open(f"{folder}/{name}", flags, 0o600), "wb") as file:
                file.write(text.encode("utf-8", "surrogateescape"))
    except OSError as error:
        print(f"{error.filename or folder}: {error.strerror}", file=sys.stderr)
        _remove(folder, files)
        return NO_FOLDER
    script = os.memfd_create("script")
    os.write(script, order["script"].encode())
    os.lseek(script, 0, os.SEEK_SET)
    os.dup2(script, 0)
    arguments = order["arguments"]
    child = os.posix_spawnp(arguments[0], arguments, os.environ)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != 0:
        _remove(folder, files)
    return code if code >= 0 else 1


def _remove(folder: str, names: dict[str, str]) -> None:
    files = [(os.unlink, f"{folder}/{name}") for name in names]
    for remove, path in [*files, (os.rmdir, f"{folder}/files"), (os.rmdir, folder)]:
        try:
            remove(path)
        except OSError:
            continue  # what was never made


if __name__ == "__main__":
    sys.exit(main())
