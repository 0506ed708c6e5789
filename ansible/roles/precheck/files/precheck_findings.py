"""What the parts of the precheck share: the exception of a finding that is not ok, and a program's output."""

import re
import subprocess

#: What begins a file that a role of Carme's has written.
WRITTEN_BY_ANSIBLE = re.compile(r"^# Written by Ansible \(role \w+\)", re.MULTILINE)

#: So many users a finding names.
MOST = 20


class Problem(Exception):
    """What was found instead of what is needed, and what to do."""

    def __init__(self, detail, remedy, stops=True):
        super().__init__(detail)
        self.detail, self.remedy, self.stops = detail, remedy, stops


def output(*command, **options):
    """The output of a command; None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 or options.get("always") else None


def listed(words, separator=", "):
    """Words as a sentence names them; of many the first ones, and how many more there are."""
    more = len(words) - MOST
    return separator.join(words[:MOST]) + (f"{separator}and {more} more" if more > 0 else "")


def version(text):
    """The first two numbers of a version in a text; None without one."""
    match = re.search(r"(\d+)\.(\d+)", text or "")
    return (int(match.group(1)), int(match.group(2))) if match else None
