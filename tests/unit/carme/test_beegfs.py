"""BeeGFS without a BeeGFS: what its programs print, from its documentation, and what they are called with."""

import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from carme.errors import CarmeError
from carme.staging import Options
from carme.staging.options import PART
from carme.staging.spread import Spread
from carme.storage import BeeGFS, Mount, Pattern, Target, balanced, first_targets, fit, mounts, suited
from carme.storage import beegfs as module
from carme.storage.beegfs import (
    parse_first_target,
    parse_first_target_8,
    parse_pattern,
    parse_quota,
    parse_quota_8,
    parse_targets,
    parse_targets_8,
)

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
# The form that mirrored files have, by the source of ThinkParQ/beegfs
FILE_7_MIRRORED = """\
Entry type: file
EntryID: 1-6725E8D9-BE
Metadata buddy group: 2
Current primary metadata node: node10 [ID: 1]
Stripe pattern details:
+ Type: Buddy Mirror
+ Chunksize: 1M
+ Number of storage targets: desired: 3; actual: 3
+ Storage mirror buddy groups:
  + 102
  + 103
  + 101
"""
# The columns of release 8, by its source
FILE_8 = (
    '{"path":"/data/file","entry id":"1-6705972F-1","type":"file","meta node":"node_meta_1 (1)",'
    '"meta mirror":"(unmirrored)","storage pool":"storage_pool_default (1)",'
    '"stripe pattern":"RAID0 (2x512K)","storage targets":"201,101","buddy groups":"(unmirrored)",'
    '"remote targets":"(none)","cool down":"(n/a)"}\n'
)
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
SET_8 = ["--mount=/scratch", "quota", "set-limits", "--uid=1001"]
SET_7 = ["--mount=/scratch", "--setquota", "--uid", "1001"]
TABLE = r"""
36 35 98:0 / / rw shared:1 - ext4 /dev/vda rw
90 36 0:52 / /mnt/bee\040gfs rw,nosuid shared:2 - beegfs beegfs_nodev rw,cfgFile=/etc/beegfs/home/client.conf
91 36 0:53 / /scratch rw - beegfs beegfs_nodev rw
"""


def test_stripe_patterns_of_both_releases_are_parsed() -> None:
    assert parse_pattern(FILE_7) == Pattern("raid0", 512 << 10, 2, None)
    assert parse_pattern(FOLDER_8) == Pattern("raid0", 1 << 20, 4, 1)
    assert parse_pattern(FOLDER_8.replace("RAID0", "Buddy Mirror")).kind == "buddymirror"
    with pytest.raises(CarmeError, match="cannot be read"):
        parse_pattern("Unable to reach the metadata node")


def test_the_first_target_of_a_file_is_parsed() -> None:
    assert parse_first_target(FILE_7) == "1"
    assert parse_first_target(FILE_7_MIRRORED) == "102"
    assert parse_first_target_8(FILE_8) == "201"
    mirrored = FILE_8.replace("201,101", "(mirrored)").replace("(unmirrored)", "3,1")
    assert parse_first_target_8(mirrored) == "3"
    folder = FILE_8.replace("201,101", "(directory)").replace("(unmirrored)", "(directory)")
    for reported in (lambda: parse_first_target(FOLDER_8), lambda: parse_first_target_8(folder)):
        with pytest.raises(CarmeError, match="cannot be read"):
            reported()


def most_at_once(order: list[tuple[str, str]], readers: int) -> int:
    """How many of so many readers, each taking the next one, read from one target at worst."""
    windows = [order[begin : begin + readers] for begin in range(len(order) - readers + 1)]
    return max(max(Counter(target for _, target in window).values()) for window in windows)


def test_readers_are_spread_over_targets() -> None:
    # As files come that were written one target after the other.
    files = [(f"f{number}", str(100 + number // 16)) for number in range(64)]
    order = balanced(files, lambda file: file[1])
    assert sorted(order) == sorted(files) and most_at_once(files, 4) == 4 and most_at_once(order, 4) == 1
    assert [name for name, target in order if target == "101"] == [f"f{number}" for number in range(16, 32)]
    # Where one target has more, readers meet there only when there is nothing else left to read.
    uneven = balanced([("x", "1")] * 6 + [("y", "2")] * 3 + [("z", "3")], lambda file: file[1])
    assert "".join(name for name, _ in uneven) == "xyzxyxyxxx"
    assert balanced([1, 2], lambda _: None) == [1, 2] and balanced([], str) == []


@pytest.mark.parametrize("program", ["beegfs", "beegfs-ctl"])
def test_nodes_that_copy_together_read_from_different_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """The program is a stand-in: a file's name says which target it begins on."""
    (tmp_path / program).write_text(
        f"#!{sys.executable}\nimport sys\n"
        f"answer = {FILE_8!r} if 'entry' in sys.argv else {FILE_7!r}\n"
        "number = sys.argv[-1][-1]\n"
        "print(answer.replace('201,', number + ',').replace('+ 1 @', '+ ' + number + ' @'))\n"
    )
    (tmp_path / program).chmod(0o755)
    source = tmp_path / "source"
    source.mkdir()
    for number in range(12):
        with (source / f"large{number:02}-{1 + number // 4}").open("wb") as file:
            file.truncate(PART)
    (source / "small").write_bytes(b"small")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(module, "mounts", lambda: [Mount(str(tmp_path))])
    assert set(first_targets([str(source / "large00-1"), str(source / "large11-3")]).values()) == {"1", "3"}
    plan = Spread(str(source), str(tmp_path / "target"), Options())
    assert plan.plan(3) == 13
    units = [json.loads(line) for line in (plan.folder / "units").read_text().splitlines()]
    targets = [names[0][-1] for _, names, *_ in units if names[0] != "small"]
    assert len(targets) == 12 and most_at_once([(each, each) for each in targets], 3) == 1
    # What it does not report keeps nothing from being copied.
    (tmp_path / program).write_text("#!/bin/sh\nexit 1\n")
    assert Spread(str(source), str(tmp_path / "target"), Options()).plan(3) == 13


def test_the_quota_of_release_7_is_parsed() -> None:
    (quota,) = parse_quota(QUOTA_7)
    assert (quota.pool, quota.used, quota.limit) == ("Default", int(601.03 * 2**30), 1 << 40)
    assert (quota.files, quota.files_limit) == (17688628, None)
    assert 0.58 < quota.share < 0.59
    assert parse_quota("nothing of the kind") == []


def test_the_quota_of_release_8_is_parsed() -> None:
    first, second = parse_quota_8(QUOTA_8, 1001)
    assert (first.pool, first.used, first.limit) == ("storage_pool_default", 601_030_000, 1 << 40)
    assert (first.files, first.files_limit) == (17688, None)
    assert (second.pool, second.limit, second.files_limit) == ("scratch", None, 100)
    assert parse_quota_8(QUOTA_8, 1002) == [] == parse_quota_8("[]\nError: no such user", 1001)


def test_the_free_space_of_targets_is_parsed() -> None:
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
    # One of the two targets reports its space, so one is what can be used; that is no reason to fail.
    (tmp_path / "beegfs").write_text("#!/bin/sh\nexit 1\n")
    assert not fit(str(tmp_path / "data"), 1, 1)


def test_mounts_are_found_in_the_mount_table() -> None:
    assert mounts(TABLE) == [Mount("/mnt/bee gfs", "/etc/beegfs/home/client.conf"), Mount("/scratch")]
    assert mounts("") == []


def test_the_stripe_pattern_follows_the_number_and_size_of_files() -> None:
    assert suited(200_000, 200_000 * 4096, 12) == Pattern("raid0", 64 << 10, 1)
    assert suited(1000, 1000 << 23, 12).targets == 4 and suited(1000, 1000 << 23, 2).targets == 2
    assert suited(20, 20 << 30, 12) == Pattern("raid0", 4 << 20, 12)
    assert suited(20, 20 << 30, 40, pool=2) == Pattern("raid0", 4 << 20, 16, 2)
    assert suited(0, 0, 0).targets == 1


@pytest.mark.parametrize("program", ["beegfs", "beegfs-ctl"])
def test_the_programs_of_each_release_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
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


@pytest.mark.parametrize(
    ("program", "output", "calls"),
    [
        (
            "beegfs",
            QUOTA_8.replace("?/?", "0/∞"),
            [[*SET_8, "--space=107374182400", "--inode=500", "archive"]],
        ),
        ("beegfs", "WARNING: No information found\n", [[*SET_8, "--space=107374182400", "--inode=500", "1"]]),
        ("beegfs-ctl", QUOTA_7.replace("     0||", "  1001||"), []),
        (
            "beegfs-ctl",
            QUOTA_7.replace("ID: 1", "ID: 4").replace("1024.00 GiB", "unlimited"),
            [[*SET_7, "--sizelimit=104857600K", "--inodelimit=500", "--storagepoolid=4"]],
        ),
    ],
)
def test_a_limit_is_set_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, output: str, calls: list[list[str]]
) -> None:
    """A stand-in says what a user has, and writes down what is to be set."""
    (tmp_path / program).write_text(
        f"#!{sys.executable}\nimport json, sys\n"
        "setting = {'set-limits', '--setquota'} & set(sys.argv)\n"
        f"print({output!r}) if not setting else None\n"
        f"setting and open({str(tmp_path / 'calls')!r}, 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n"
    )
    (tmp_path / program).chmod(0o755)
    (tmp_path / "calls").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert BeeGFS(Mount("/scratch")).limit(1001, 100 << 30, 500) == bool(calls)
    assert [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()] == calls


def test_without_its_programs_there_is_an_error_and_the_space_of_the_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CarmeError, match="Neither beegfs nor beegfs-ctl"):
        BeeGFS(Mount("/scratch"))
    total, free = _here(monkeypatch, tmp_path).space()
    assert total == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize and free <= total


def _here(monkeypatch: pytest.MonkeyPatch, folder: Path) -> BeeGFS:
    (folder / "beegfs").touch(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return BeeGFS(Mount(str(folder)))
