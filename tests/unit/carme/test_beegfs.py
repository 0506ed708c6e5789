"""BeeGFS without a BeeGFS: what its programs print, from its documentation, and what they are called with."""

import json
import os
import sys
from pathlib import Path

import pytest

from carme.errors import CarmeError
from carme.storage import BeeGFS, Mount, Pattern, mounts, suited
from carme.storage.beegfs import parse_pattern, parse_quota

# doc.beegfs.io, "Deep Inspection" of 7.4.5 and of 8, "Striping" of 8
FILE_7 = """\
Entry type: file
EntryID: 0-5D285750-1
Metadata node: node1.beeg.local [ID: 1]
Stripe pattern details:
+ Type: RAID0
+ Chunksize: 512k
+ Number of storage targets: desired: 2; actual: 2
+ Storage targets:
  + 1 @ node1.beeg.local [ID: 1]
  + 2 @ node2.beeg.local [ID: 2]
Chunk path: u0/0/r/root/0-5EC39809-1
Dentry path: 38/51/root/
"""
FOLDER_8 = """\
Entry type: directory
EntryID: root
ParentID:
Stripe pattern details:
+ Type: RAID0
+ Chunksize: 1M
+ Number of storage targets: desired: 4
+ Storage Pool: 1  (default)
Inlined inode: no
"""
# As BeeGFS 7.4.6 printed it on a cluster, in an issue of github.com/ThinkParQ/beegfs
QUOTA_7 = """\

Quota information for storage pool Default (ID: 1):

      user/group     ||           size          ||    chunk files    
     name     |  id  ||    used    |    hard    ||  used   |  hard   
--------------|------||------------|------------||---------|---------
          root|     0||  601.03 GiB| 1024.00 GiB|| 17688628|unlimited
"""  # noqa: W291
TABLE = r"""
36 35 98:0 / / rw shared:1 - ext4 /dev/vda rw
90 36 0:52 / /mnt/bee\040gfs rw,nosuid shared:2 - beegfs beegfs_nodev rw,cfgFile=/etc/beegfs/home/client.conf
91 36 0:53 / /scratch rw - beegfs beegfs_nodev rw
"""


def test_patterns_of_both_versions() -> None:
    assert parse_pattern(FILE_7) == Pattern("raid0", 512 << 10, 2, None)
    assert parse_pattern(FOLDER_8) == Pattern("raid0", 1 << 20, 4, 1)
    assert parse_pattern(FOLDER_8.replace("RAID0", "Buddy Mirror")).kind == "buddymirror"
    with pytest.raises(CarmeError, match="cannot be read"):
        parse_pattern("Unable to reach the metadata node")


def test_quota() -> None:
    (quota,) = parse_quota(QUOTA_7)
    assert (quota.pool, quota.used, quota.limit) == ("Default", int(601.03 * 2**30), 1 << 40)
    assert (quota.files, quota.files_limit) == (17688628, None)
    assert 0.58 < quota.share < 0.59
    assert parse_quota("nothing of the kind") == []


def test_mounts() -> None:
    assert mounts(TABLE) == [Mount("/mnt/bee gfs", "/etc/beegfs/home/client.conf"), Mount("/scratch")]
    assert mounts("") == []


def test_what_suits_what() -> None:
    assert suited(200_000, 200_000 * 4096, 12) == Pattern("raid0", 64 << 10, 1)
    assert suited(1000, 1000 << 23, 12).targets == 4 and suited(1000, 1000 << 23, 2).targets == 2
    assert suited(20, 20 << 30, 12) == Pattern("raid0", 4 << 20, 12)
    assert suited(20, 20 << 30, 40, pool=2) == Pattern("raid0", 4 << 20, 16, 2)
    assert suited(0, 0, 0).targets == 1


@pytest.mark.parametrize("program", ["beegfs", "beegfs-ctl"])
def test_the_programs_are_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """A stand-in writes down what it is called with; the real ones need a BeeGFS."""
    (tmp_path / program).write_text(
        f"#!{sys.executable}\nimport json, sys\n"
        f"print({FOLDER_8!r}) if 'info' in ' '.join(sys.argv) else None\n"
        f"open({str(tmp_path / 'calls')!r}, 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n"
        "sys.exit('no such folder' if '/gone' in sys.argv else 0)\n"
    )
    (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    file_system = BeeGFS(Mount("/scratch", "/etc/beegfs/client.conf"))
    assert file_system.pattern("/scratch/a").targets == 4
    file_system.set_pattern("/scratch/a; x", Pattern("buddymirror", 1 << 20, 2, 3))
    with pytest.raises(CarmeError, match="no such folder"):
        file_system.set_pattern("/gone", Pattern())
    call = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()][1]
    if program == "beegfs":
        words = ["--num-targets=2", "--chunk-size=1048576", "--pool=storage:3", "--pattern=mirrored"]
        assert call == ["entry", "set", *words, "/scratch/a; x"]
    else:
        words = ["--numtargets=2", "--chunksize=1048576", "--storagepoolid=3", "--pattern=buddymirror"]
        assert call == ["--cfgFile=/etc/beegfs/client.conf", "--setpattern", *words, "/scratch/a; x"]


def test_without_its_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CarmeError, match="Neither beegfs nor beegfs-ctl"):
        BeeGFS(Mount("/scratch"))
    total, free = _here(monkeypatch, tmp_path).space()
    assert total == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize and free <= total


def _here(monkeypatch: pytest.MonkeyPatch, folder: Path) -> BeeGFS:
    (folder / "beegfs").touch(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return BeeGFS(Mount(str(folder)))
