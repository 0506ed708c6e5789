"""Find what calls Carme's prolog or epilog and would fail without them. Usage: find_callers.py FOLDER ...

Looks at the files below the folders, at those beside the slurm.conf that Slurm uses, and at the programs that
Slurm runs around jobs, wherever they lie. A line that first looks whether Carme's is there does nothing
afterwards, and does not count. Prints {"callers": [PATH, ...]}. Runs with Python 3.8, too.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

FOLDER = "/usr/libexec/carme/"
CALL = re.compile(rf"^(?![ \t]*#)(?!.*-x {FOLDER}).*{FOLDER}", re.MULTILINE)
#: As `scontrol show config` writes them, with a number where there are several.
PROGRAM = re.compile(r"^((?:Task|Srun)?(?:Prolog|Epilog)(?:Slurmctld)?)(?:\[\d+\])?\s*=(.*)$", re.MULTILINE)
CONFIGURATION = re.compile(r"^SLURM_CONF\s*=\s*(/\S+)", re.MULTILINE)


def configuration():
    """What Slurm says of its settings; empty where it does not answer."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "config"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def programs(text):
    """The programs around jobs: paths, which may be patterns of names."""
    for _setting, value in PROGRAM.findall(text):
        for word in re.split(r"[,\s]+", value):
            path = Path(word)
            if path.is_absolute() and path.name:
                yield from sorted(path.parent.glob(path.name)) or [path]


def calls(path):
    """Whether a file calls Carme's, or is a link to it."""
    real = os.path.realpath(str(path))
    if real.startswith(FOLDER) or str(path).startswith(FOLDER):
        return True
    try:
        return Path(real).is_file() and bool(CALL.search(Path(real).read_text(errors="replace")))
    except OSError:
        return False


def main(folders):
    """Name the callers."""
    text = configuration()
    files = [each for folder in folders for each in sorted(Path(folder).rglob("*"))]
    files += [each for path in CONFIGURATION.findall(text) for each in sorted(Path(path).parent.glob("*"))]
    files += programs(text)
    print(json.dumps({"callers": [str(file) for file in dict.fromkeys(files) if calls(file)]}))


if __name__ == "__main__":
    main(sys.argv[1:])
