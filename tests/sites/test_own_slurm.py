"""A site with a Slurm of its own gets Carme as docs/admins/install.md says, and loses it.

Each site has a class, whose name follows from the site's: `suites.plan.target_of_site`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import install_page

from . import existing_22_05, existing_26_05
from .existing_slurm import NODES, USERS, ExistingSlurm
from .own_slurm_example import findings
from .own_slurm_steps import AGAIN, PROJECT, Booking, Visit
from .site_run import changed_hosts

#: What docs/admins/install.md lists of the site's files: Apptainer's configuration as its package brought it.
WRITTEN_BY_CARME = {"/etc/apptainer/apptainer.conf"}
#: What the administrators change themselves, on the nodes, as docs/admins/security.md says.
FSTAB = "/etc/fstab"
#: What is named after Carme and stays: what makes a host of a container, and where images are mounted.
OF_TESTS = {
    "/etc/carme-demo",
    "/etc/systemd/system/carme-demo-node.service",
    "/etc/systemd/system/sysinit.target.wants/carme-demo-node.service",
    "/etc/ssl/carme",
    "/etc/ssl/private/carme.pem",
    "/srv/carme",
    "/usr/local/sbin/carme-demo-node",
}


class OwnSlurm:
    """The tests of each site; `SITE` says which it is."""

    SITE: ClassVar[ExistingSlurm]

    def test_the_first_look_says_what_to_set_and_changes_nothing(self, prechecked: Visit) -> None:
        precheck_run = prechecked.runs["first precheck"]
        assert precheck_run.returncode == 2
        shown = findings(precheck_run.stdout)
        assert "Set carme_homes to the folders below which all homes lie" in shown
        assert "Prolog does not call /usr/libexec/carme/prolog" in shown
        for name in NODES:
            assert f"{name}.example.org, processes of others: /proc is mounted without hidepid" in shown
        assert all(counts["changed"] == 0 for counts in changed_hosts(precheck_run.stdout).values())
        assert prechecked.changed("untouched", "first precheck") == {
            name: set() for name in prechecked.site.machines
        }

    def test_after_what_it_says_nothing_stands_in_the_way(self, prechecked: Visit) -> None:
        precheck_run = prechecked.runs["second precheck"]
        assert precheck_run.returncode == 0, precheck_run.stdout[-4000:]
        assert "Prolog does not call" not in precheck_run.stdout and "hidepid" not in precheck_run.stdout
        assert all(counts["changed"] == 0 for counts in changed_hosts(precheck_run.stdout).values())

    def test_the_site_keeps_what_belongs_to_it(self, installed: Visit) -> None:
        changed = installed.changed("before", "after")
        assert {name: paths - WRITTEN_BY_CARME for name, paths in changed.items()} == {
            name: set() for name in changed
        }
        assert {"/etc/slurm/slurm.conf", "/etc/slurm/prolog", "/etc/munge/munge.key"} <= set(
            installed.sums["before"]["ctl"]
        )
        assert "/etc/nginx/nginx.conf" in installed.sums["before"]["portal"]
        page = installed.site.run(
            "portal", "curl", "--silent", "--header", "Host: intranet.example.org", "http://127.0.0.1:8080/"
        )
        assert page.stdout == "The site's own page.\n"

    def test_the_sites_own_slurm_is_what_runs(self, installed: Visit) -> None:
        assert installed.record.versions["slurm"].startswith(installed.kind.slurm)
        shown = installed.site.run(
            "portal", "sinfo", "--noheader", "--Node", "--partition=gpu", "--format=%N %t"
        ).stdout
        assert [line.split()[0] for line in shown.splitlines()] == list(NODES)
        assert "drain" not in shown and "down" not in shown

    def test_users_of_a_node_see_their_own_processes_and_the_exporter_sees_all(
        self, installed: Visit
    ) -> None:
        for name in NODES:
            # As at the next boot: with the options of /etc/fstab alone.
            installed.site.run(name, "mount", "-o", "remount", "/proc")
            for user, sees in {"alan": False, "carme-exporter": True}.items():
                words = ("runuser", "-u", user, "--", "test", "-e", "/proc/1/cmdline")
                seen = installed.site.run(name, *words, check=False).returncode == 0
                assert seen == sees, (name, user)

    def test_a_user_trains_a_model_over_two_nodes_from_the_browser(self, main_job: dict[str, Any]) -> None:
        assert main_job["ok"], [check for check in main_job["checks"] if not check["ok"]]
        assert len(main_job["training"]["hosts"]) == 2
        assert main_job["training"]["accuracy"] > 0.95

    def test_a_booking_is_a_reservation_of_its_owner(self, booking: Booking) -> None:
        assert "Users=grace " in booking.reservation
        assert booking.job.split("|") == ["COMPLETED", "research", "gpu"]

    def test_a_batch_job_runs_on_two_nodes(self, batch_job: str) -> None:
        assert batch_job.split("|") == ["COMPLETED", "research", "gpu"]

    def test_the_portal_offers_the_sites_own_partitions(self, picture: list[str]) -> None:
        assert {"batch", "gpu"} <= set(picture)

    def test_the_sites_own_check_passes(self, validated: Visit) -> None:
        done = validated.runs["validate.yml"]
        verdict = validated.record.results["validation"]
        assert verdict["ok"], [check for check in verdict["checks"] if not check["ok"]]
        assert done.returncode == 0, done.stdout[-4000:]

    def test_a_second_run_changes_nothing(self, again: Visit) -> None:
        for step in AGAIN:
            done = again.runs[step]
            assert done.returncode == 0, done.stdout[-4000:]
            assert {counts["changed"] for counts in changed_hosts(done.stdout).values()} == {0}, step

    def test_removal_stops_before_a_boot_would_show_processes_again(self, removed: Visit) -> None:
        refused = removed.runs["remove.yml refuses"]
        assert refused.returncode == 2
        assert "Nothing has been removed. /etc/fstab" in findings(refused.stdout)
        assert all(counts["changed"] == 0 for counts in changed_hosts(refused.stdout).values())

    def test_removal_leaves_the_site_as_it_was(self, removed: Visit) -> None:
        done = removed.runs["remove.yml"]
        assert done.returncode == 0, done.stdout[-4000:]
        for name in removed.site.machines:
            assert not removed.site.left_of_services(name)
        changed = removed.changed("before", "removed")
        assert {name: paths - {FSTAB} for name, paths in changed.items()} == {name: set() for name in changed}
        for name in NODES:
            removed.site.run(name, "mount", "-o", "remount", "/proc")  # as at the next boot
            words = ("runuser", "-u", "alan", "--", "test", "-e", "/proc/1/cmdline")
            assert removed.site.run(name, *words, check=False).returncode != 0, name
        mounted = {"portal": {"/var/cache/carme"}}
        assert {name: left - OF_TESTS - mounted.get(name, set()) for name, left in removed.named.items()} == {
            name: set() for name in removed.site.machines
        }

    def test_the_site_works_without_carme(self, removed: Visit) -> None:
        words = ("srun", *PROJECT, "--nodes=2", "--gres=gpu:1", "hostname")
        assert sorted(removed.site.run("portal", *words, user="grace").stdout.split()) == sorted(NODES)

    def test_all_commands_of_the_example_are_run(self, removed: Visit) -> None:
        known = [*removed.example.commands("site.yml"), *removed.example.commands("validate.yml")]
        assert len(known) == len(install_page.commands("own-slurm"))


class TestExisting2205(OwnSlurm):
    """Debian 12 with its Slurm 22.05, and users of a directory."""

    SITE = existing_22_05.SITE

    def test_users_are_those_of_the_directory(self, removed: Visit) -> None:
        """The last one: they were before Carme came, and are after it went."""
        for host in removed.site.machines:
            own = ("grep", "--extended-regexp", f"^({'|'.join(USERS)}):", "/etc/passwd")
            assert removed.site.run(host, *own, check=False).stdout == "", host
            for name, uid in USERS.items():
                assert removed.site.run(host, "id", "--user", name).stdout.strip() == str(uid), host


class TestExisting2605(OwnSlurm):
    """Debian 13 with the Slurm 26.05 of Debian testing."""

    SITE = existing_26_05.SITE
