"""What an administrator's steps leave on the hosts of a site, for the tests to look at."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass, field

from .record import Record, slowest_tasks
from .site_hosts import SiteHosts

Run = subprocess.CompletedProcess[str]
Sums = dict[str, dict[str, str]]

#: What belongs to the site: all of its configuration, and what its own services serve.
SITE = ["/etc", "/srv/intranet", "/opt/apptainer-libc", "/usr/local"]
#: What changes with every package that is installed, and what Carme's own packages bring.
OF_PACKAGES = re.compile(
    r"/etc/(ld\.so\.cache|mailcap|(group|gshadow|passwd|shadow|subuid|subgid)-?|apt/.*|alternatives/.*|systemd/system/[^/]+\.wants/.*)$"
)


@dataclass
class SiteRun:
    """The steps on the hosts of one site.

    Attributes:
        site: the hosts.
        record: takes times and outcomes.
        runs: what Ansible printed, by step.
        sums: checksums of what belongs to the site, by when they were taken and by host.
    """

    site: SiteHosts
    record: Record
    runs: dict[str, Run] = field(default_factory=dict, init=False)
    sums: dict[str, Sums] = field(default_factory=dict, init=False)

    def play(self, step: str, words: list[str], code: int = 0) -> Run:
        """Run a playbook, or read its output when an earlier run has done this step."""
        log = self.site.places.log / f"{step}.log"
        if self.record.is_done(step) and log.exists():
            self.runs[step] = subprocess.CompletedProcess(words, code, log.read_text())
            return self.runs[step]
        with self.record.step(step, code) as noted:
            try:
                done = self.runs[step] = self.site.ansible(*words, log=step)
            finally:
                noted["slowest"] = slowest_tasks(self.site.times_of(step))
            noted["code"] = done.returncode
        return done

    def remember(self, when: str) -> None:
        """Take the checksums of what belongs to the site, or those that an earlier run has taken."""
        file = self.site.places.state / "checksums" / f"{when}.json"
        if self.record.resumed and file.exists():
            self.sums[when] = json.loads(file.read_text())
            return
        self.sums[when] = {name: self.site.checksums(name, SITE) for name in self.site.machines}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(self.sums[when]))

    def changed(self, before: str, after: str) -> dict[str, set[str]]:
        """Files that are not as they were, by host; new ones are not among them."""
        return {
            name: {
                path
                for path, known in sums.items()
                if self.sums[after][name].get(path) != known and not OF_PACKAGES.match(path)
            }
            for name, sums in self.sums[before].items()
        }


def changed_hosts(output: str) -> dict[str, dict[str, int]]:
    """Ansible's counts by host, from the recap at the end of its output."""
    found: dict[str, dict[str, int]] = {}
    for line in output.partition("PLAY RECAP")[2].splitlines()[1:]:
        host, colon, counts = line.partition(":")
        if colon:
            pairs = (word.partition("=") for word in counts.split())
            found[host.strip()] = {name: int(count) for name, _, count in pairs}
    return found
