import errno
import os
from pathlib import Path
from typing import Any

import pytest

import carme.config
from carme.config import load
from carme.errors import ConfigError

EXAMPLE = Path(carme.config.__file__).parent / "example.toml"
LEAST = '[site]\nurl = "https://carme.example.org"\n[slurm]\ncluster = "c"\n'


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "carme.toml"
    file.write_text(text)
    return file


def test_the_example_is_right_and_names_every_key() -> None:
    settings = load(EXAMPLE)
    assert settings.site.name == "Carme demo"
    assert settings.broker.services == ["carme-hub", "carme-portal"]
    assert settings.sessions.bind == [Path("/scratch")]
    for table in set(type(settings).model_fields) - {"partitions", "projects", "quotas"}:
        model = getattr(settings, table)
        assert model.model_fields_set == set(type(model).model_fields), table
    for named in (settings.partitions, settings.projects, settings.quotas):
        for model in named.values():
            assert model.model_fields_set == set(type(model).model_fields)


def test_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARME_CONFIG", str(write(tmp_path, LEAST)))
    assert load().slurm.cluster == "c"


def test_settings_are_frozen() -> None:
    with pytest.raises(Exception, match="frozen"):
        load(EXAMPLE).site.name = "x"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[slrm]\n", "there is no table [slrm]. The nearest known one is 'slurm'."),
        (
            "[images]\ndirectry = '/x'",
            "there is no key 'directry' in [images]. The nearest known one is 'directory'.",
        ),
        (
            "[images]\nzzz = 1",
            "there is no key 'zzz' in [images]. Choose from: build_cpus, build_memory_mb, build_minutes, ",
        ),
        ("[broker]\nminimum_uid = 'many'", "'minimum_uid' in [broker] must be a whole number, not 'many'."),
        ("[broker]\nminimum_uid = 0", "'minimum_uid' in [broker] must be at least 1, not 0."),
        ("[broker]\nservices = ['a', 3]", "entry 2 of 'services' in [broker] must be a text, not 3."),
        ("[images]\ndirectory = 'x'", "'directory' in [images] must be an absolute path, not 'x'."),
        ("[hub]\nlisten = 'http://h:1/'", "without a trailing slash, not 'http://h:1/'."),
        ("[hub]\nbase_path = 'jupyter'", "must begin and end with a slash, not 'jupyter'."),
        ("[portal]\nlisten = '8100'", "'listen' in [portal] must be like '127.0.0.1:8100', not '8100'."),
        ("[sessions]\ndefault_minutes = 2000", "more than maximum_minutes = 1440."),
        ("hub = 3", "the table [hub] must be a table, not 3."),
        (
            "[partitions.gpu]\nidle_minuts = 3",
            "there is no key 'idle_minuts' in [partitions.gpu]. The nearest known one is 'idle_minutes'.",
        ),
        (
            "[partitions.gpu]\nidle_minutes = -1",
            "'idle_minutes' in [partitions.gpu] must be at least 0, not -1.",
        ),
        ("[partitions]\ngpu = 3", "the table [partitions.gpu] must be a table, not 3."),
        ("[partitions.'']\nidle_minutes = 3", "the name of a table in [partitions] must not be empty."),
    ],
)
def test_wrong_values_are_reported_in_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    whole = text + "\n" + LEAST if text.startswith("hub") else LEAST + text
    file = write(tmp_path, whole)
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_wrong_place_has_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, "[site]\nname = 3\n[slurm]\ncluster = 'c'\n"))
    assert [line.split(": ", 1)[1] for line in str(caught.value).splitlines()] == [
        "'name' in [site] must be a text, not 3.",
        "'url' in [site] is missing.",
    ]


def test_a_missing_or_broken_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no configuration file .*nowhere.toml\. Create it"):
        load(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match=r"is not valid TOML: .*line 1"):
        load(write(tmp_path, "name = Carme"))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load(tmp_path / "bytes")


def test_a_secret_is_read_from_its_file(tmp_path: Path) -> None:
    settings = load(write(tmp_path, LEAST + f"[secrets]\ndirectory = '{tmp_path}'"))
    (tmp_path / "hub-api-token").write_text("abc\n")
    (tmp_path / "empty").write_text("\n")
    assert settings.secret("hub-api-token") == "abc"
    with pytest.raises(ConfigError, match=r"The secret 'empty' .* is empty"):
        settings.secret("empty")
    with pytest.raises(ConfigError, match="The secret 'other' is missing: there is no file"):
        settings.secret("other")
    with pytest.raises(ConfigError, match="is not a valid name of a secret"):
        settings.secret("../carme.toml")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        settings.secret("folder")


def test_the_password_of_a_database_is_a_secret(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    folder.mkdir()
    text = f"""{LEAST}
[hub]
database = "postgresql://carme-hub@db.example.org:5433/hub?sslmode=require"
[portal]
database = "postgresql:///carme-portal"
[secrets]
directory = "{folder}"
"""
    settings = load(write(tmp_path, text))
    assert settings.database("hub") == settings.hub.database
    for part in ("hub", "portal"):
        (folder / f"{part}-database-password").write_text("a/b@c\n")
    assert settings.database("hub") == (
        "postgresql://carme-hub:a%2Fb%40c@db.example.org:5433/hub?sslmode=require"
    )
    # The socket says who calls.
    assert settings.database("portal") == "postgresql:///carme-portal"
    older = load(write(tmp_path, text.replace("carme-hub@", "carme-hub:older@")))
    assert older.database("hub") == older.hub.database


def test_a_folder_of_secrets_that_is_closed_is_an_error_of_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"""{LEAST}
[portal]
database = "postgresql://carme-portal@db.example.org/portal"
[secrets]
directory = "{tmp_path / "closed"}"
"""
    settings, ordinary = load(write(tmp_path, text)), os.stat

    def stat(path: Any, *rest: Any, **more: Any) -> os.stat_result:
        if "closed" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return ordinary(path, *rest, **more)

    def read(path: Path, *rest: Any, **more: Any) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(Path, "read_text", read)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        settings.database("portal")
