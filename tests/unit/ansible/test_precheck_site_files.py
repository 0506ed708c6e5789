"""Files of the site's own, such as nginx's, Redis' and munge's, are found and left alone."""

import base64
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from .conftest import ANSIBLE
from .test_precheck import module


def test_another_default_server_of_nginx_is_found(tmp_path: Path) -> None:
    precheck = module("precheck_services")
    (tmp_path / "sites-enabled").mkdir()
    (tmp_path / "sites-enabled/wiki").write_text("server {\n    listen [::]:443 ssl default_server;\n}\n")
    wanted = {"site_files": [], "site_ports": [443], "default_server": True}
    with pytest.raises(precheck.Problem) as caught:
        precheck.default_servers(wanted, tmp_path)
    assert "wiki (port 443)" in caught.value.detail and "reverse_proxy_default_server" in caught.value.remedy
    assert precheck.default_servers(wanted | {"default_server": False}, tmp_path)
    (tmp_path / "sites-enabled/wiki").write_text(
        "# Written by Ansible (role reverse_proxy)\nlisten 443 default_server;\n"
    )
    assert precheck.default_servers(wanted, tmp_path)


def test_an_nginx_with_other_sites_keeps_its_configuration(tmp_path: Path) -> None:
    precheck = module("precheck_services")
    (tmp_path / "sites-enabled").mkdir()
    (tmp_path / "nginx.conf").write_text("events {\n    worker_connections 768;\n}\n")
    (tmp_path / "sites-enabled/default").write_text("server { listen 80 default_server; }\n")
    (tmp_path / "sites-enabled/carme").write_text("# Written by Ansible (role reverse_proxy)\n")
    assert not precheck.other_sites([], tmp_path), "neither the welcome page nor ours is the site's"
    (tmp_path / "sites-enabled/intranet").write_text("server { listen 8080; }\n")
    (intranet,) = precheck.other_sites([], tmp_path)
    assert intranet.name == "intranet"
    assert precheck.connections({"site_files": []}, tmp_path)
    wanted = {"site_files": [str(tmp_path / "nginx.conf")], "connections": 16384}
    with pytest.raises(precheck.Problem) as caught:
        precheck.connections(wanted, tmp_path)
    assert "768" in caught.value.detail and "worker_connections 16384" in caught.value.remedy
    assert not caught.value.stops
    for text in ("events {\n    worker_connections 20000;\n}\n", "events { worker_connections 20000; }\n"):
        (tmp_path / "nginx.conf").write_text(text)
        assert precheck.connections(wanted, tmp_path) == "20000"
    with pytest.raises(precheck.Problem):
        precheck.connections(wanted | {"connections": 30000}, tmp_path)


def test_a_number_of_our_role_does_not_make_a_file_the_sites(tmp_path: Path) -> None:
    """Otherwise a second run could not set another number."""
    precheck = module("precheck_services")
    file, backup = tmp_path / "nginx.conf", tmp_path / "nginx.conf.99.2026-11-01@10:00:00~"
    backup.write_text("events { worker_connections 768; }\n")
    file.write_text("events { worker_connections 16384; }\n")
    assert not precheck.belongs_to_site(file)
    file.write_text("events { worker_connections 16384; }\nhttp {}\n")
    assert precheck.belongs_to_site(file), "the site has changed more of it"


def test_a_file_that_the_site_has_put_back_from_its_backup_is_the_sites(tmp_path: Path) -> None:
    precheck = module("precheck_services")
    file, backup = tmp_path / "redis.conf", tmp_path / "redis.conf.99.2026-11-01@10:00:00~"
    for path in (file, backup):
        path.write_text("port 6379\n")
    assert precheck.belongs_to_site(file)


def test_nginx_of_the_site_is_not_changed() -> None:
    """Evaluate the role's own condition with the findings of the check."""
    tasks = yaml.safe_load((ANSIBLE / "roles/reverse_proxy/tasks/main.yml").read_text())
    (task,) = (each for each in tasks if "ansible.builtin.replace" in each)
    assert task["ansible.builtin.replace"]["path"] == "/etc/nginx/nginx.conf"
    assert "'/etc/nginx/nginx.conf' not in precheck_site_files | default([])" in task["when"]


def test_a_redis_of_the_site_is_not_taken_over() -> None:
    precheck = module("precheck_services")
    with pytest.raises(precheck.Problem) as caught:
        precheck.redis({"redis_configure": True, "site_files": ["/etc/redis/redis.conf"]})
    assert "redis_configure to false" in caught.value.remedy
    assert precheck.redis({"redis_configure": False, "site_files": ["/etc/redis/redis.conf"]})


def test_a_slurm_and_a_directory_of_the_site_are_not_taken_over() -> None:
    services, slurm = module("precheck_services"), module("precheck_slurm")
    own = ["/etc/slurm/slurm.conf", "/etc/sssd/sssd.conf"]
    assert set(own) <= set(services.FOREIGN_FILES)
    with pytest.raises(services.Problem) as caught:
        slurm.own_configuration({"site_files": own})
    assert caught.value.stops and "/etc/slurm/slurm.conf. " in caught.value.detail
    assert "sssd" not in caught.value.detail and "slurm_controller" in caught.value.remedy
    with pytest.raises(services.Problem) as caught:
        services.directory({"site_files": own})
    assert caught.value.stops and "users_source to existing" in caught.value.remedy
    assert slurm.own_configuration({"site_files": own[1:]}) and services.directory({"site_files": own[:1]})


@pytest.mark.parametrize("former", [b"of the site's own\x00", b""])
def test_a_key_of_munge_that_is_replaced_has_a_backup(tmp_path: Path, former: bytes) -> None:
    """Other hosts may have the site's key; a package makes one as well, so that it need not be the site's."""
    tasks = yaml.safe_load((ANSIBLE / "roles/munge/tasks/main.yml").read_text())
    (task,) = (each["ansible.builtin.shell"] for each in tasks if "ansible.builtin.shell" in each)
    key = tmp_path / "munge.key"
    if former:
        key.write_bytes(former)
        key.chmod(0o400)
    command = ["sh", "-c", task["cmd"].replace("/etc/munge", str(tmp_path))]
    subprocess.run(command, input=base64.b64encode(b"ours\xff"), check=True, capture_output=True)
    assert key.read_bytes() == b"ours\xff"
    backups = [path for path in tmp_path.iterdir() if path != key]
    assert [path.read_bytes() for path in backups] == [former] * bool(former)
    for path in backups:
        assert path.stat().st_mode & 0o777 == 0o400
        assert re.fullmatch(r"munge\.key\.\d+\.\d{4}-\d\d-\d\d@\d\d:\d\d:\d\d~", path.name), (
            "as Ansible names them"
        )


def test_files_that_somebody_has_written_are_the_sites(tmp_path: Path) -> None:
    precheck = module("precheck_services")
    file = tmp_path / "apptainer.conf"
    assert not precheck.belongs_to_site(file)
    file.write_text("allow setuid = no\n")
    assert precheck.belongs_to_site(file)
    file.write_text(
        "# Written by Ansible (role apptainer). What is not named here keeps Apptainer's default.\n"
    )
    assert not precheck.belongs_to_site(file)
