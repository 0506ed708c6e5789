"""Settings: what may be chosen, what follows from it, what is kept."""

import json
from pathlib import Path
from typing import Any

import pytest

from carme_demo.errors import DemoError
from carme_demo.settings import Places, Settings, load, passwords, save


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places("carme", tmp_path / "lib", tmp_path / "run")


def test_the_default_demo_has_a_head_and_two_nodes_with_fixed_addresses() -> None:
    machines = Settings().machines()
    assert [(each.name, each.address, each.gpus) for each in machines] == [
        ("head", "10.77.0.2", 0),
        ("n1", "10.77.0.11", 4),
        ("n2", "10.77.0.12", 4),
    ]
    assert [each.is_head for each in machines] == [True, False, False]
    assert Settings().url == "https://localhost:8443"


def test_another_subnet_moves_all_addresses() -> None:
    settings = Settings(nodes=1, subnet="192.168.40.0/22")
    assert [each.address for each in settings.machines()] == ["192.168.40.2", "192.168.40.11"]
    assert settings.gateway == "192.168.40.1"


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"nodes": 0}, "--nodes"),
        ({"nodes": 17}, "1 to 16"),
        ({"gpus": -1}, "--gpus"),
        ({"port": 70000}, "--port"),
        ({"port": True}, "--port"),
        ({"subnet": "10.77.0.1/24"}, "--subnet"),
        ({"subnet": "fd00::/64"}, "IPv4"),
        ({"subnet": "10.77.0.0/28"}, "too small"),
        ({"images": ["vscode", "../etc"]}, "--images"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_right(wrong: dict[str, Any], word: str) -> None:
    with pytest.raises(DemoError) as refused:
        Settings(**wrong)
    assert word in refused.value.message
    assert refused.value.remedy


@pytest.mark.parametrize("name", ["", "Carme", "a-b", "../etc", "1st", "abcdefghijklm"])
def test_a_name_that_cannot_name_an_interface_is_refused(name: str) -> None:
    with pytest.raises(DemoError, match="--name"):
        Places(name)


def test_two_names_share_no_place() -> None:
    first, second = Places("carme"), Places("second")
    assert first.state == Path("/var/lib/carme-demo")
    for place in ("state", "run", "storage", "networks", "bridge", "lock"):
        assert getattr(first, place) != getattr(second, place)


def test_settings_are_saved(places: Places) -> None:
    assert load(places) is None
    save(places, Settings(nodes=3, port=9443))
    assert load(places) == Settings(nodes=3, port=9443)


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', '{"colour": 1}'])
def test_a_torn_settings_file_is_named(places: Places, text: str) -> None:
    places.state.mkdir(parents=True)
    places.settings.write_text(text)
    with pytest.raises(DemoError, match="settings"):
        load(places)


def test_passwords_are_made_once_and_only_their_owner_can_read_them(places: Places) -> None:
    first = passwords(places)
    assert set(first) == {"user1", "user2", "admin"}
    assert len(set(first.values())) == 3
    assert min(len(word) for word in first.values()) >= 16
    assert places.passwords.stat().st_mode & 0o777 == 0o600
    assert passwords(places) == first


def test_a_missing_password_is_added_and_the_others_stay(places: Places) -> None:
    places.state.mkdir(parents=True)
    places.passwords.write_text(json.dumps({"user1": "kept-as-it-is-now"}))
    words = passwords(places)
    assert words["user1"] == "kept-as-it-is-now"
    assert words["admin"]
    assert places.passwords.stat().st_mode & 0o777 == 0o600


def test_a_torn_password_file_is_replaced(places: Places) -> None:
    places.state.mkdir(parents=True)
    places.passwords.write_text('{"user1": "ab')
    assert set(passwords(places)) == {"user1", "user2", "admin"}
