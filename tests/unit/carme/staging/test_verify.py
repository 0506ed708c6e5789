"""Copies compared with their source, and images with the folders that they were made of."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from carme.errors import CarmeError, InvalidRequest, NotFound
from carme.staging import Options, copy, pack, verify

from .trees import carme_data, from_and_to, many


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A folder and its copy."""
    source, target = from_and_to(tmp_path)
    many(source, 2, 4)
    (source / "link").symlink_to("d0")
    (source / "large").write_bytes(b"0123456789" * (7 << 20))
    assert copy(str(source), str(target)).ok
    return source, target


def same_times(path: Path, change: Callable[[], object]) -> None:
    """Change something, and let it look as if it was not."""
    status, above = path.stat(), path.parent.stat()
    change()
    if path.exists():
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.utime(path.parent, ns=(above.st_atime_ns, above.st_mtime_ns))


def flip(path: Path, place: int) -> None:
    """Change one byte."""
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def test_a_good_copy_is_the_same(pair: tuple[Path, Path]) -> None:
    for options in (Options(), Options(verify="device", workers=3)):
        result = verify(str(pair[0]), str(pair[1]), options)
        assert result.ok and result.counts.unchanged == 10
        files = [pair[0] / "large", *pair[0].glob("d*/f*")]
        assert result.counts.bytes_unchanged == sum(file.stat().st_size for file in files)
    assert verify(str(pair[0] / "large"), str(pair[1] / "large")).ok


def test_every_difference_is_reported(pair: tuple[Path, Path]) -> None:
    source, target = pair
    same_times(target / "d0/f0", lambda: flip(target / "d0/f0", 5))
    # In its last part, and in two of its parts: reported once.
    same_times(target / "large", lambda: (flip(target / "large", 69 << 20), flip(target / "large", 0)))
    same_times(target / "d0/f1", lambda: (target / "d0/f1").unlink())
    same_times(target / "d1/f0", lambda: (target / "d1/f0").chmod(0o600))
    same_times(target / "d1/f1", lambda: (target / "d1/f1").write_text("shorter"))
    same_times(target / "d1/f2", lambda: os.setxattr(target / "d1/f2", "user.x", b"1"))
    os.utime(target / "d1/f3", ns=(0, 0))
    above = target.stat()
    (target / "link").unlink()
    (target / "link").symlink_to("d1")
    (target / "extra").mkdir()
    os.utime(target, ns=(0, above.st_mtime_ns))
    result = verify(str(source), str(target))
    assert not result.ok and result.counts.different == 9
    assert {problem.path: problem.reason for problem in result.problems} == {
        "d0/f0": "it has other contents at the destination",
        "large": "it has other contents at the destination",
        "d0/f1": "it is missing at the destination",
        "d1/f0": "it differs in mode",
        "d1/f1": "it has 7 bytes at the destination, not 148",
        "d1/f2": "it differs in extended attributes or ACLs",
        "d1/f3": "it differs in time",
        "link": "the symlink leads elsewhere at the destination",
        "extra": "it is not in the source",
    }
    ended = carme_data("verify", str(source), str(target))
    assert ended.returncode == 1 and "9 entries differ" in ended.stdout
    assert copy(str(source), str(target), Options(contents=True)).ok
    shutil.rmtree(target / "extra")
    os.utime(target, ns=(0, source.stat().st_mtime_ns))
    assert carme_data("verify", str(source), str(target)).returncode == 0


def test_a_path_that_is_missing_cannot_be_verified(pair: tuple[Path, Path], tmp_path: Path) -> None:
    for source, target in (
        (pair[0], tmp_path / "no"),
        (tmp_path / "no", pair[0]),
        (pair[0], pair[1] / "large"),
    ):
        with pytest.raises(NotFound):
            verify(str(source), str(target))


squashfs = pytest.mark.skipif(not shutil.which("mksquashfs"), reason="squashfs-tools is not installed")


@squashfs
@pytest.mark.parametrize("compression", ["zstd", "lz4", "none"])
def test_a_folder_is_packed_into_one_image_that_can_be_verified(
    pair: tuple[Path, Path], tmp_path: Path, compression: str
) -> None:
    image = tmp_path / "data.sqsh"
    result = pack(str(pair[0]), str(image), compression)
    assert result.ok and result.counts.copied == 10
    about = json.loads(Path(f"{image}.json").read_text())
    assert (about["files"], about["size"]) == (10, image.stat().st_size)
    index = [json.loads(line) for line in Path(f"{image}.index").read_text().splitlines()]
    assert {line["path"] for line in index} == {"large", *(f"d{d}/f{f}" for d in range(2) for f in range(4))}
    subprocess.run(["unsquashfs", "-q", "-n", "-d", str(tmp_path / "out"), str(image)], check=True)
    # squashfs keeps whole seconds.
    for file in [each for each in pair[0].rglob("*") if each.is_file()]:
        assert (tmp_path / "out" / file.relative_to(pair[0])).read_bytes() == file.read_bytes()
    assert verify(str(image)).ok
    flip(image, image.stat().st_size // 2)
    ended = carme_data("verify", str(image))
    assert ended.returncode == 1 and "it is not the image that was packed" in ended.stderr
    left = {each.name for each in tmp_path.iterdir()}
    assert left == {"source", "target", "out", "data.sqsh", "data.sqsh.json", "data.sqsh.index"}


@squashfs
def test_an_image_that_cannot_be_packed_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="is inside the folder"):
        pack(str(pair[0]), str(pair[0] / "x.sqsh"))
    with pytest.raises(NotFound):
        pack(str(tmp_path / "nowhere"), str(tmp_path / "x.sqsh"))
    with pytest.raises(CarmeError):
        pack(str(pair[0]), str(tmp_path / "no/where.sqsh"))
    with pytest.raises(InvalidRequest, match="no compression called"):
        pack(str(pair[0]), str(tmp_path / "x.sqsh"), "magic")
    with pytest.raises(NotFound, match="Name an image that carme data pack created"):
        verify(str(pair[0] / "large"))
    assert {each.name for each in tmp_path.iterdir()} == {"source", "target"}
