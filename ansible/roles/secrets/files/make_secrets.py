"""Make the secrets of a site that do not exist yet, and give all of them their owners and modes.

Usage: make_secrets.py DIRECTORY TABLE, where TABLE is JSON: [{"name", "kind": "hex" | "rsa", "group"}, ...].
Prints {"changed": [NAMES]}: names only, never a value. Run again, it changes nothing.
"""

import grp
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

OWNER = 0


def new_value(kind: str) -> bytes:
    """A fresh secret: 64 hex digits, or an RSA key in PEM."""
    if kind == "hex":
        return secrets.token_hex(32).encode() + b"\n"
    command = ["openssl", "genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:3072"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout


def keep(path: Path, *, mode: int, group: str) -> bool:
    """Give a path to root and the group with the mode; True when it was otherwise."""
    wanted = (OWNER, grp.getgrnam(group).gr_gid, mode)
    now = path.stat()
    if (now.st_uid, now.st_gid, now.st_mode & 0o7777) == wanted:
        return False
    os.chown(path, wanted[0], wanted[1])
    path.chmod(mode)
    return True


def main(directory: Path, table: list[dict[str, str]]) -> list[str]:
    """Make what is missing; the names of all secrets that were made or whose mode was wrong."""
    changed = []
    if not directory.is_dir():
        directory.mkdir(mode=0o750)
    if keep(directory, mode=0o750, group="carme"):
        changed.append(str(directory))
    for entry in table:
        path = directory / entry["name"]
        is_new = not path.exists()
        if is_new:
            new = path.with_name(f".{path.name}.new")
            new.unlink(missing_ok=True)
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(new_value(entry["kind"]))
                os.fsync(file.fileno())
            keep(new, mode=0o640, group=entry["group"])
            new.rename(path)
        if keep(path, mode=0o640, group=entry["group"]) or is_new:
            changed.append(entry["name"])
    return changed


if __name__ == "__main__":
    print(json.dumps({"changed": main(Path(sys.argv[1]), json.loads(sys.argv[2]))}))
