"""Runs of Ansible that share what has imported it."""

from pathlib import Path

import pytest

from .conftest import Playbooks

PLAY = """
- hosts: localhost
  gather_facts: false
  tasks:
    - ansible.builtin.debug:
        msg: "{{ lookup('env', 'TEST_WORD') }} in {{ lookup('pipe', 'pwd') }}"
    - ansible.builtin.fail:
        msg: It fails
      when: fails | default(false)
"""


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    (tmp_path / "play.yml").write_text(PLAY)
    return ["-i", "localhost,", "-c", "local", str(tmp_path / "play.yml")]


def test_each_run_has_its_own_environment_output_and_exit_code(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    playbooks = Playbooks(tmp_path)
    try:
        monkeypatch.setenv("TEST_WORD", "first")
        first = playbooks.run(*arguments)
        assert first.returncode == 0 and "first in" in first.stdout and "It fails" not in first.stdout
        monkeypatch.setenv("TEST_WORD", "second")
        second = playbooks.run(*arguments, "-e", '{"fails": true}')
        assert second.returncode == 2 and "second in" in second.stdout and "It fails" in second.stdout
        wrong = playbooks.run("--no-such-option")
        assert wrong.returncode == 2 and "usage: ansible-playbook" in wrong.stderr
    finally:
        playbooks.end()


def test_after_a_run_that_hung_the_next_one_gets_its_own_answer(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    playbooks = Playbooks(tmp_path)
    monkeypatch.setenv("TEST_WORD", "next")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("select.select", interrupted)
        playbooks.run(*arguments, "-e", '{"fails": true}')
    try:
        done = playbooks.run(*arguments)
        assert done.returncode == 0 and "next in" in done.stdout
    finally:
        playbooks.end()
