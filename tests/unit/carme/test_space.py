"""How much room a user has. Quotas of the kernel are simulated: test machines' kernels keep none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import simulated_quota

from carme.storage import Limits, Space, space_of
from carme.storage import space as module

ROOT = Path(__file__).parents[3]
GIB = 1 << 30
MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
30 22 0:30 / /home rw - nfs4 server:/export/home rw,vers=4.2
31 22 8:1 / /scratch\\040space rw - xfs /dev/sdb1 rw,usrquota
32 30 0:32 / /home/old rw - tmpfs tmpfs rw
33 30 8:2 / /home/old rw - ext4 /dev/sdc1 rw
nonsense
"""


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/var/lib", ("/", "ext4", "/dev/vda1")),
        ("/home", ("/home", "nfs4", "server:/export/home")),
        ("/homes", ("/", "ext4", "/dev/vda1")),
        ("/home/ada", ("/home", "nfs4", "server:/export/home")),
        ("/scratch space/x", ("/scratch space", "xfs", "/dev/sdb1")),
        ("/home/old/x", ("/home/old", "ext4", "/dev/sdc1")),  # the later one hides the other
    ],
)
def test_a_folder_lies_on_the_innermost_mount(path: str, mount: tuple[str, str, str]) -> None:
    found = module._mount_of(path, MOUNTS)
    assert found and (found.path, found.kind, found.source) == mount


@pytest.mark.parametrize(
    ("free", "quota", "level"),
    [
        (100 * GIB, None, ""),
        (GIB - 1, None, "near"),
        (1000, None, "full"),
        (100 * GIB, Limits(89, limit=100), ""),
        (100 * GIB, Limits(90, limit=100), "near"),
        (100 * GIB, Limits(100, limit=100), "full"),
        (100 * GIB, Limits(90, soft=100, limit=200), "near"),
        (100 * GIB, Limits(150, soft=100, limit=200), "near"),  # the days of grace
        (100 * GIB, Limits(0, files=99, files_limit=100), "near"),
        (100 * GIB, Limits(0, files=100, files_limit=100), "full"),
        (100 * GIB, Limits(5), ""),
    ],
)
def test_a_quota_or_disk_is_near_its_end_or_full(free: int, quota: Limits | None, level: str) -> None:
    assert Space("/home/ada", 1000 * GIB, free, quota).level == level


def test_the_output_of_quota_is_parsed() -> None:
    output = """\
Disk quotas for user ada (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
server:/export/home    1200*   1000    2000  1763799999      10       0       0       0
"""
    assert module.parse_quota(output) == Limits(1200 << 10, 1000 << 10, 2000 << 10, 10)
    assert module.parse_quota("Disk quotas for user ada (uid 1000): none\n") is None
    assert module.parse_quota("quota: error while getting quota from server:/home for ada\n") is None
    assert module.parse_quota("") is None


def ask(folder: Path, quota: str, tmp_path: Path, **more: str) -> Space:
    """What a process finds in which quotactl answers so."""
    library = simulated_quota.build(tmp_path)
    program = """
import dataclasses, json, sys
from carme.storage import space
space._mount_of = lambda path: space._Mount("/", "ext4", "/dev/vda1")
print(json.dumps(dataclasses.asdict(space.space_of(sys.argv[1]))))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, folder],
        env={"LD_PRELOAD": str(library), "SIMULATED_QUOTA": quota, "PYTHONPATH": str(ROOT / "carme/src")}
        | more,
        capture_output=True,
        text=True,
        check=True,
    )
    reported = json.loads(done.stdout)
    return Space(**reported | {"quota": Limits(**reported["quota"]) if reported["quota"] else None})


def test_the_kernels_quota_is_read(tmp_path: Path) -> None:
    own = os.getuid()
    found = ask(tmp_path, f"{own} 2000 1000 1500000 0 0 7", tmp_path)
    assert found.quota == Limits(1_500_000, 1000 << 10, 2000 << 10, 7)
    assert found.level == "near"
    old = ask(tmp_path, f"{own} 2000 1000 1500000 0 0 7", tmp_path, SIMULATED_OLD="1")
    assert old.quota == found.quota
    assert ask(tmp_path, f"{own} 1000 0 1024000 0 0 7", tmp_path).level == "full"
    assert ask(tmp_path, f"{own + 1} 1000 0 1024000 0 0 7", tmp_path).quota is None
    assert found.size > 0


def give(tmp_path: Path, quota: str, *places: str, **more: str) -> subprocess.CompletedProcess[str]:
    """What `carme-quota` does for root where quotactl answers so."""
    site = tmp_path / "carme.toml"
    tables = [f'[quotas."{place}"]\nlimit_gb = 100\nsoft_gb = 90\nfiles = 5\n' for place in places]
    site.write_text(
        '[site]\nname = "x"\nurl = "https://x.example"\n[slurm]\ncluster = "x"\n' + "".join(tables)
    )
    variables = {"LD_PRELOAD": str(simulated_quota.build(tmp_path)), "SIMULATED_QUOTA": quota, **more}
    variables |= {"SIMULATED_QUOTA_SET": str(tmp_path / "set"), "PYTHONPATH": str(ROOT / "carme/src")}
    program = "import sys; from carme.storage.quotas import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, "--config", str(site), "root"],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_new_user_gets_quotas_and_those_that_are_there_stay(tmp_path: Path) -> None:
    given = give(tmp_path, "0 0 0 700 0 0 3", str(tmp_path))
    assert (given.returncode, given.stdout, given.stderr) == (0, f"{tmp_path}: 100 GiB\n", "")
    assert (tmp_path / "set").read_text() == f"0 {100 << 20} {90 << 20} 5\n"  # blocks of 1 KiB
    again = give(tmp_path, "0 2000 0 700 0 0 3", str(tmp_path))
    assert again.stdout == f"{tmp_path}: the limits that were there stay\n"
    assert len((tmp_path / "set").read_text().splitlines()) == 1


def test_quotas_are_set_although_one_file_system_has_none(tmp_path: Path) -> None:
    done = give(tmp_path, "0 0 0 0 0 0 0", "/nothing-there", str(tmp_path))
    assert done.returncode == 1 and f"{tmp_path}: 100 GiB" in done.stdout
    assert "/nothing-there" in done.stderr and len(done.stderr.splitlines()) == 1
    none = give(tmp_path, "1 0 0 0 0 0 0", str(tmp_path))  # the kernel knows of no such account
    assert none.returncode == 1 and "keeps no quotas here" in none.stderr and "usrquota" in none.stderr
    assert len((tmp_path / "set").read_text().splitlines()) == 1


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        space_of(str(tmp_path / "none"))


def test_the_space_of_a_folder_is_that_of_its_file_system(tmp_path: Path) -> None:
    found = space_of(str(tmp_path))
    status = os.statvfs(tmp_path)
    assert found.size == status.f_blocks * status.f_frsize
    assert asdict(found)["path"] == str(tmp_path)
