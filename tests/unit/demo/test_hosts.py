"""Nodes and what surrounds them, as far as it is decided without podman."""

import io
import json
import runpy
import signal
import socket
import subprocess
import tarfile
from pathlib import Path

import pytest

from carme_demo import host, image
from carme_demo.cleanup import end_processes_in, mounts_below, stale_rules
from carme_demo.errors import DemoError
from carme_demo.nodes import Nodes, files_archive, hosts_file, network_description, tar_archive
from carme_demo.podman import Podman, choose_runtime, engine_configuration, process_exists
from carme_demo.registries import Registries
from carme_demo.settings import Places, Settings
from patience import HANG

NODE = Path(image.__file__).parent / "node"
CERTIFICATE = "-----BEGIN CERTIFICATE-----\nYW4gYXV0aG9yaXR5\n-----END CERTIFICATE-----\n"


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places("carme", tmp_path / "lib", tmp_path / "run")


def test_every_node_knows_every_node() -> None:
    lines = hosts_file(Settings(nodes=3)).splitlines()
    assert lines[0] == "127.0.0.1 localhost"
    assert lines[-4:] == ["10.77.0.2 head", "10.77.0.11 n1", "10.77.0.12 n2", "10.77.0.13 n3"]


def test_the_runtime_follows_the_hosts_cgroups() -> None:
    assert choose_runtime(unified=True, systemd=True).name == "crun"
    assert choose_runtime(unified=True, systemd=True).node_environment == ()
    mixed = choose_runtime(unified=False, systemd=False)
    assert (mixed.name, mixed.cgroup_manager) == ("runc", "cgroupfs")
    assert dict(mixed.node_environment) == {"SYSTEMD_CGROUP_ENABLE_LEGACY_FORCE": "1"}


def test_podmans_settings_keep_it_apart_from_the_users(places: Places) -> None:
    text = engine_configuration(places, choose_runtime(unified=True, systemd=True))
    assert 'lock_type = "file"' in text
    assert f'static_dir = "{places.storage}/libpod"' in text
    assert f'tmp_dir = "{places.run}/libpod"' in text


def options(places: Places, settings: Settings, node: int) -> list[str]:
    podman = Podman(places, choose_runtime(unified=False, systemd=False))
    nodes = Nodes(podman, places, settings, Registries())
    return nodes.creation_options(settings.machines()[node], "carme-1")


def test_only_the_head_is_reached_from_outside_and_only_from_this_host(places: Places) -> None:
    head = options(places, Settings(port=9443), 0)
    assert "127.0.0.1:9443:9443" in head
    assert "--publish" not in options(places, Settings(port=9443), 1)
    assert head[head.index("--ip") + 1] == "10.77.0.2"
    assert "SYSTEMD_CGROUP_ENABLE_LEGACY_FORCE=1" in head


def test_all_nodes_share_home_scratch_and_images_but_no_package_archive(places: Places) -> None:
    head, first, second = (options(places, Settings(), node) for node in range(3))
    for folder in ("/home", "/scratch", "/srv/carme/images"):
        (mount,) = [word for word in head if word.endswith(f":{folder}")]
        assert mount in first
        assert mount in second
    archives = {word for each in (head, first, second) for word in each if word.endswith("/apt/archives")}
    assert len(archives) == 3


def test_local_package_folders_are_mounted_read_only_at_their_own_path(
    places: Places, tmp_path: Path
) -> None:
    registries = Registries(pip=(("find-links", str(tmp_path)),))
    nodes = Nodes(Podman(places, choose_runtime(unified=True, systemd=True)), places, Settings(), registries)
    assert f"{tmp_path}:{tmp_path}:ro" in nodes.creation_options(Settings().machines()[1], "carme-1")


def test_a_nodes_files_give_it_its_gpus_and_the_registries() -> None:
    registries = Registries(pip=(("retries", "3"),), authorities="-----BEGIN CERTIFICATE-----")
    settings = Settings(gpus=2)
    archive = tarfile.TarFile(fileobj=io.BytesIO(files_archive(settings.machines()[1], settings, registries)))

    def content(name: str) -> str:
        member = archive.extractfile(name)
        assert member is not None
        return member.read().decode()

    assert json.loads(content("etc/carme-demo/node.json"))["gpus"] == 2
    assert "retries = 3" in content("etc/pip.conf")
    assert content("etc/carme-demo/host-ca.pem") == registries.authorities
    assert archive.getmember("root/.npmrc").mode == 0o600
    assert {member.uid for member in archive.getmembers()} == {0}


def test_a_network_is_described_with_our_bridge() -> None:
    network = network_description("carme-1", Places(), Settings(), forwarder=False)
    assert network["network_interface"] == "carme0"
    assert network["subnets"] == [{"subnet": "10.77.0.0/24", "gateway": "10.77.0.1"}]
    assert network["dns_enabled"] is False
    assert network["id"] != network_description("carme-2", Places(), Settings(), forwarder=False)["id"]


def test_the_image_is_keyed_by_what_it_is_made_of() -> None:
    plain = image.digest(Registries())
    assert plain == image.digest(Registries())
    assert plain != image.digest(Registries(mirror="http://mirror.example/debian"))
    assert plain != image.digest(Registries(apt_options=(("Acquire::Retries", "3"),)))
    assert plain == image.digest(Registries(authorities="x")), "certificates go in when a node starts"


def test_another_debian_is_another_image() -> None:
    older = image.System("bookworm", ("munge",))
    assert image.digest(Registries(), older) != image.digest(Registries())
    registries = Registries(mirror="http://mirror.example/debian")
    line = image.arguments(registries, Path("/x/overlay.tar"), Path("/x/node.tar"), older)
    assert "--include=munge" in line and line[line.index("bookworm") + 1] == "/x/node.tar"
    assert line[-1] == "deb http://mirror.example/debian bookworm-updates main"


def test_the_overlay_masks_what_would_touch_the_host_and_starts_the_nodes_own_unit() -> None:
    archive = tarfile.TarFile(fileobj=io.BytesIO(image.overlay()))
    assert archive.getmember("etc/systemd/system/systemd-sysctl.service").linkname == "/dev/null"
    wanted = archive.getmember("etc/systemd/system/sysinit.target.wants/carme-demo-node.service").linkname
    assert archive.getmember(wanted.lstrip("/")).isfile()
    assert archive.getmember("usr/local/sbin/carme-demo-node").mode == 0o755


def test_mmdebstrap_is_given_packages_mirror_and_apt_options() -> None:
    registries = Registries(mirror="http://mirror.example/debian", apt_options=(("Acquire::Retries", "3"),))
    line = image.arguments(registries, Path("/x/overlay.tar"), Path("/x/node.tar"))
    assert '--aptopt=Acquire::Retries "3"' in line
    assert line[line.index("trixie") + 1] == "/x/node.tar"
    assert line[-1] == "deb http://mirror.example/debian trixie-updates main"


def test_stale_rules_are_those_of_our_network_alone() -> None:
    listing = "\n".join(
        [
            "-P PREROUTING ACCEPT",
            "-N NETAVARK-AAAAAA111",
            "-A POSTROUTING -s 10.77.0.0/24 -j NETAVARK-AAAAAA111",
            "-A POSTROUTING -s 10.88.0.0/16 -j NETAVARK-BBBBBB222",
            "-A NETAVARK-AAAAAA111 ! -d 224.0.0.0/4 -j MASQUERADE",
            "-A NETAVARK-BBBBBB222 ! -d 224.0.0.0/4 -j MASQUERADE",
            '-A NETAVARK-HOSTPORT-DNAT -p tcp --dport 8443 -m comment --comment "dnat name: carme-1f id: 12" '
            "-j NETAVARK-DN-AAAAAA111",
            "-A NETAVARK-HOSTPORT-MASQ -m mark --mark 0x2000/0x2000 -j MASQUERADE",
        ]
    )
    rules = stale_rules(listing, "10.77.0.0/24", "carme")
    assert ["-D", "POSTROUTING", "-s", "10.77.0.0/24", "-j", "NETAVARK-AAAAAA111"] in rules
    assert ["-D", "NETAVARK-AAAAAA111", "!", "-d", "224.0.0.0/4", "-j", "MASQUERADE"] in rules
    assert ["-X", "NETAVARK-DN-AAAAAA111"] in rules
    assert any("dnat name: carme-1f id: 12" in rule for rule in rules)
    assert not any("BBBBBB222" in word or "HOSTPORT-MASQ" in word for rule in rules for word in rule)
    assert rules.index(["-F", "NETAVARK-AAAAAA111"]) < rules.index(["-X", "NETAVARK-AAAAAA111"])


def test_mounts_are_found_innermost_first() -> None:
    mountinfo = "\n".join(
        [
            "20 1 0:1 / / rw - ext4 x rw",
            "21 20 0:2 / /var/lib/carme-demo/storage/overlay rw - ext4 x rw",
            r"22 21 0:3 / /var/lib/carme-demo/storage/overlay/a\040b/merged rw - overlay x rw",
            "23 20 0:4 / /var/lib/carme-demo-other rw - ext4 x rw",
        ]
    )
    assert mounts_below(mountinfo, Path("/var/lib/carme-demo")) == [
        "/var/lib/carme-demo/storage/overlay/a b/merged",
        "/var/lib/carme-demo/storage/overlay",
    ]


def test_a_process_is_known_to_be_there_or_not() -> None:
    assert process_exists(1)
    assert not process_exists(0)
    assert not process_exists(2**22 + 1)


def test_too_little_space_is_reported_with_numbers() -> None:
    with pytest.raises(DemoError, match=r"3\.0 GiB free .* needs 12 GiB"):
        host.check_space(3 << 30, first=True)
    host.check_space(3 << 30, first=False)


def test_a_taken_port_is_reported_with_the_way_out() -> None:

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(DemoError, match=r"is taken.*--port"):
            host.check_port(taken.getsockname()[1])


def test_a_network_in_use_is_reported_but_our_own_bridge_does_not_count() -> None:
    routes = "10.77.0.0/16 dev tun0 proto kernel scope link\n"
    with pytest.raises(DemoError, match=r"10\.77\.0\.0/16 on tun0.*--subnet"):
        host.check_routes(routes, "10.77.0.0/24", "carme0")
    host.check_routes("10.77.0.0/24 dev carme0 proto kernel\n", "10.77.0.0/24", "carme0")


def test_two_demos_of_one_name_cannot_work_at_once_and_a_left_lock_is_no_obstacle(places: Places) -> None:
    with host.exclusive_lock(places), pytest.raises(DemoError, match="Another"), host.exclusive_lock(places):
        pass
    assert places.lock.exists()
    with host.exclusive_lock(places):
        pass


def test_a_process_left_working_in_our_folder_is_ended_and_no_other(tmp_path: Path) -> None:
    own_folder, other_folder = tmp_path / "tmp", tmp_path / "tmp2"
    own_folder.mkdir()
    other_folder.mkdir()
    inside = subprocess.Popen(["sleep", "600"], cwd=own_folder)
    outside = subprocess.Popen(["sleep", "600"], cwd=other_folder)
    try:
        end_processes_in(own_folder)
        assert inside.wait(timeout=HANG) == -signal.SIGKILL
        assert outside.poll() is None
    finally:
        for process in (inside, outside):
            process.kill()
            process.wait()


def test_a_node_stopped_while_it_installed_authorities_installs_them_at_its_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = runpy.run_path(str(NODE / "usr/local/sbin/carme-demo-node"), run_name="node")["authorities"]
    bundle, own = tmp_path / "ca-certificates.crt", tmp_path / "own"
    own.mkdir()
    bundle.write_text("")
    (tmp_path / "host-ca.pem").write_text(CERTIFICATE)
    places = {"SETTINGS": tmp_path, "OWN_AUTHORITIES": own, "BUNDLE": bundle}
    for name, place in places.items():
        monkeypatch.setitem(known.__globals__, name, place)
    requested: list[object] = []
    monkeypatch.setattr("subprocess.run", lambda command, **how: requested.append(command))
    known()  # and stopped before the bundle was written
    known()
    assert len(requested) == 2 and (own / "demo-host-0.crt").read_text() == CERTIFICATE
    bundle.write_text(CERTIFICATE)
    known()
    assert len(requested) == 2


def test_an_archive_ends_where_its_reader_does() -> None:
    """podman's reader may be gone before what follows is written, and `podman cp` fails."""
    archive = tar_archive({"etc/name": (b"content", 0o644)})
    assert len(archive) == 4 * tarfile.BLOCKSIZE, "a header, a content and the two blocks of the end"
    with tarfile.open(fileobj=io.BytesIO(archive)) as found:
        member = found.extractfile("etc/name")
        assert member is not None and member.read() == b"content"
    listed = subprocess.run(["tar", "-t"], input=archive, capture_output=True, check=True)
    assert (listed.stdout, listed.stderr) == (b"etc/name\n", b"")
