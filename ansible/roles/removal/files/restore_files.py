"""Give files back what they held before Ansible changed them first. Usage: restore_files.py PATH ...

Ansible leaves a backup PATH.PID.DATE@TIME~ of each state that it replaced. The oldest one is put back, and
all of them are removed. A file without a backup stays. Prints {"restored": [PATH, ...]}. Runs with Python
3.8, too.
"""

import json
import re
import sys
from pathlib import Path

BACKUP_SUFFIX = re.compile(r"\.\d+\.(\d{4}-\d\d-\d\d@\d\d:\d\d:\d\d)~")


def backups(path):
    """The backups of a file, the oldest one first."""
    found = []
    for each in path.parent.glob("*~") if path.parent.is_dir() else []:
        match = (
            BACKUP_SUFFIX.fullmatch(each.name[len(path.name) :]) if each.name.startswith(path.name) else None
        )
        if match:
            found.append((match.group(1), each))
    return [backup for _time, backup in sorted(found)]


def main(paths):
    """Restore them."""
    restored = []
    for path in map(Path, paths):
        older = backups(path)
        if not older:
            continue
        older[0].replace(path)  # owner and mode are those that it had
        for each in older[1:]:
            each.unlink()
        restored.append(str(path))
    print(json.dumps({"restored": restored}))


if __name__ == "__main__":
    main(sys.argv[1:])
