"""The node's own copies of images, with real files."""

import hashlib
import json
from pathlib import Path

import pytest

from carme.errors import CarmeError
from carme.images import ImageCatalogue, app_path
from carme.images.copies import refresh
from carme.launch.images import local_copy

PLENTY = 10**9


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    add(folder, "base", b"base" * 1000, "2026-01-01T00:00:00+00:00")
    add(folder, "torch", b"torch" * 1000, "2026-02-01T00:00:00+00:00")
    return folder


def add(folder: Path, name: str, content: bytes, built: str) -> None:
    digest = "sha256:" + hashlib.sha256(content).hexdigest()
    (folder / f"{name}.sif").write_bytes(content)
    manifest = {"name": name, "title": name, "digest": digest, "built": built}
    (folder / f"{name}.json").write_text(json.dumps(manifest))


def test_copies_are_used_once_they_are_whole(shared: Path, tmp_path: Path) -> None:
    copies, image = tmp_path / "copies", shared / "torch.sif"
    assert local_copy(str(image), str(copies)) == str(image)
    refresh(ImageCatalogue(shared), copies, PLENTY)
    copy = Path(local_copy(str(image), str(copies)))
    assert copy == copies / "torch.sif"
    assert copy.read_bytes() == image.read_bytes()
    assert refresh(ImageCatalogue(shared), copies, PLENTY) == []


def test_a_newer_image_is_used_from_the_shared_folder_until_it_is_copied(
    shared: Path, tmp_path: Path
) -> None:
    copies, image = tmp_path / "copies", shared / "torch.sif"
    refresh(ImageCatalogue(shared), copies, PLENTY)
    with (copies / "torch.sif").open("rb") as opened:
        add(shared, "torch", b"newer" * 1000, "2026-03-01T00:00:00+00:00")
        assert local_copy(str(image), str(copies)) == str(image)
        refresh(ImageCatalogue(shared), copies, PLENTY)
        assert opened.read() == b"torch" * 1000  # a job that has it open keeps it
    assert Path(local_copy(str(image), str(copies))).read_bytes() == b"newer" * 1000


def test_what_the_site_no_longer_has_goes(shared: Path, tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    refresh(ImageCatalogue(shared), copies, PLENTY)
    (shared / "base.json").unlink()
    (shared / "base.sif").unlink()
    refresh(ImageCatalogue(shared), copies, PLENTY)
    assert sorted(file.name for file in copies.iterdir()) == ["torch.json", "torch.sif"]


def test_the_newest_images_come_first_where_room_is_short(shared: Path, tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    done = refresh(ImageCatalogue(shared), copies, 6000)
    assert sorted(file.name for file in copies.iterdir()) == ["torch.json", "torch.sif"]
    assert any("base" in line and "no room" in line for line in done)


def test_a_file_that_is_not_what_its_manifest_says_is_not_copied(shared: Path, tmp_path: Path) -> None:
    (shared / "torch.sif").write_bytes(b"half")
    copies = tmp_path / "copies"
    refresh(ImageCatalogue(shared), copies, PLENTY)
    assert sorted(file.name for file in copies.iterdir()) == ["base.json", "base.sif"]
    image = str(shared / "torch.sif")
    assert local_copy(image, str(copies)) == image


@pytest.mark.parametrize("manifest", ["", "{", "[]", '{"digest": 5}', '{"digest": ""}'])
def test_a_damaged_manifest_counts_as_missing(shared: Path, tmp_path: Path, manifest: str) -> None:
    copies, image = tmp_path / "copies", shared / "torch.sif"
    refresh(ImageCatalogue(shared), copies, PLENTY)
    (copies / "torch.json").write_text(manifest)
    assert local_copy(str(image), str(copies)) == str(image)


def test_a_folder_that_others_may_write_to_is_refused(shared: Path, tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    copies.mkdir()
    copies.chmod(0o777)
    with pytest.raises(CarmeError, match="may write"):
        refresh(ImageCatalogue(shared), copies, PLENTY)


@pytest.mark.parametrize(
    ("name", "path"),
    [("lab", "lab"), ("terminal", "carme/terminal"), ("vscode", "vscode/"), ("mine", "app/mine/")],
)
def test_each_app_has_its_address(name: str, path: str) -> None:
    assert app_path(name) == path
