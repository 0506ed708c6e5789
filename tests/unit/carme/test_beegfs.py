"""BeeGFS without a BeeGFS: what its programs print, from its documentation, and what they are called with."""

import json
import os
import sys
from pathlib import Path

import pytest

from carme.errors import CarmeError
from carme.storage import BeeGFS, Mount, Pattern, Target, fit, mounts, suited
from carme.storage import beegfs as module
from carme.storage.beegfs import parse_pattern, parse_quota, parse_quota_8, parse_targets, parse_targets_8

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
# In the form in which `beegfs` 8.3 prints it, by its source (ctl/internal/cmd/quota of ThinkParQ/beegfs-go)
QUOTA_8 = """\
{"name":"ada","id":1001,"type":"user","pool":"storage_pool_default","space":"601030000/1099511627776","inode":"17688/∞"}
{"name":"ada","id":1001,"type":"user","pool":"archive","space":"?/?","inode":"?/?"}
{"name":"lab","id":1001,"type":"group","pool":"archive","space":"1/2","inode":"3/4"}
{"name":"ada","id":1001,"type":"user","pool":"scratch","space":"5/9223372036854775807","inode":"6/100"}
INFO: Quota usage information is fetched every 30s from the server nodes, thus the displayed values might be slightly out of date.
"""  # noqa: E501
# As it was printed on a cluster with --state and --mirrorgroups besides (from a script of its administrators)
TARGETS_7 = """\
MirrorGroupID MGMemberType TargetID     Reachability  Consistency        Total         Free    %      ITotal       IFree    %   NodeID
============= ============ ========     ============  ===========        =====         ====    =      ======       =====    =   ======
           11      primary       21          Offline         Good     662.9GiB     531.7GiB  80%     1327.4M     1064.3M  80%   beegfs-meta node [ID: 21]
           11    secondary       11          Offline         Good     662.9GiB     531.8GiB  80%     1327.4M     1064.3M  80%   beegfs-meta node [ID: 11]
"""  # noqa: E501
TARGETS_8 = """\
{"id":"s:101","alias":"target_1","on node":"n","pool":"p","space":"997409685504","sused":"38404694016 (3.85%)","sfree":"959004991488"}
{"id":"s:201","alias":"target_2","on node":"n","pool":"p","space":"-","sused":"-","sfree":"-"}
"""  # noqa: E501
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


def test_quota_of_release_8() -> None:
    first, second = parse_quota_8(QUOTA_8, 1001)
    assert (first.pool, first.used, first.limit) == ("storage_pool_default", 601_030_000, 1 << 40)
    assert (first.files, first.files_limit) == (17688, None)
    assert (second.pool, second.limit, second.files_limit) == ("scratch", None, 100)
    assert parse_quota_8(QUOTA_8, 1002) == [] == parse_quota_8("[]\nError: no such user", 1001)


def test_free_space_of_targets() -> None:
    gib = 1 << 30
    assert parse_targets(TARGETS_7) == [
        Target("21", int(662.9 * gib), int(531.7 * gib)),
        Target("11", int(662.9 * gib), int(531.8 * gib)),
    ]
    plain = "TargetID        Total         Free    %      ITotal       IFree    %   NodeID\n"
    plain += "     101    1.5TiB     512.0GiB  33%     10M   9M  90%   1\n"
    assert parse_targets(plain) == [Target("101", 1536 * gib, 512 * gib)]
    assert parse_targets("Error") == []
    assert parse_targets_8(TARGETS_8) == [Target("101", 997_409_685_504, 959_004_991_488)]


def test_a_folder_is_striped_by_what_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`beegfs` is a stand-in, which writes down what it is called with."""
    (tmp_path / "beegfs").write_text(
        f"#!{sys.executable}\nimport json, sys\nwords = ' '.join(sys.argv)\n"
        f"open({str(tmp_path / 'calls')!r}, 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n"
        f"print({FOLDER_8!r} if 'info' in words else {TARGETS_8!r} if 'target list' in words else '')\n"
    )
    (tmp_path / "beegfs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not fit(str(tmp_path), 10, 10)  # not on a BeeGFS
    monkeypatch.setattr(module, "mounts", lambda: [Mount("/"), Mount(str(tmp_path))])
    (tmp_path / "data").mkdir()
    assert fit(str(tmp_path / "data"), 200_000, 200_000 * 4096)
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    words = ["--num-targets=1", "--chunk-size=65536", "--pool=storage:1"]
    assert calls[-1] == ["entry", "set", *words, str(tmp_path / "data")]
    # One of the two targets tells its space, so one is what can be used; that is no reason to fail.
    (tmp_path / "beegfs").write_text("#!/bin/sh\nexit 1\n")
    assert not fit(str(tmp_path / "data"), 1, 1)


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
