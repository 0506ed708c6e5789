"""Stands in for squeue, scontrol and sinfo; prints what those of 24.11 did (slurm_24_11.json) beside pyslurm.

`fails` beside it is what they write to standard error where they fail; each call is a line of `calls`.
"""

import json
import os
import sys
from pathlib import Path

folder = Path(__file__).absolute().parent
recorded = json.loads((folder / "slurm_24_11.json").read_text())
name = Path(sys.argv[0]).name
options = {key: value for key, _, value in (word.removeprefix("--").partition("=") for word in sys.argv[1:])}
with (folder / "calls").open("a") as calls:
    calls.write(f"{name} {sys.argv[-1]}\n")
if (folder / "fails").exists():
    sys.exit((folder / "fails").read_text())
commands, separator = recorded["commands"], ""
if name == "sinfo":
    text = commands["version"]
elif "helpFormat" in options:
    text = commands["help"]
elif form := os.environ.get("SQUEUE_FORMAT2"):
    text, separator = commands["long"], form.split(":")[1].split(",")[0]
elif form := os.environ.get("SQUEUE_FORMAT"):
    text, separator = commands["short"], form.split("%")[1][1:]
else:
    text = commands.get(sys.argv[-1], commands["long"])
sys.stdout.write(text.replace(recorded["separator"], separator) if separator else text)
