"""What runs before a commit is the test command's own quick part, and nothing is fetched for it."""

import subprocess
from pathlib import Path

import yaml

from patience import HANG

ROOT = Path(__file__).resolve().parents[2]


def test_hooks_before_a_commit_are_the_quick_part_of_lint() -> None:
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    hooks = repositories[0]["hooks"]
    assert {hook["language"] for hook in hooks} == {"system"}
    usage = subprocess.run(
        [ROOT / "test", "--help"], capture_output=True, text=True, check=True, timeout=HANG
    ).stdout
    assert [hook["entry"] for hook in hooks if f"{hook['entry']} [FILE ...]" in usage] == [
        hook["entry"] for hook in hooks
    ]
