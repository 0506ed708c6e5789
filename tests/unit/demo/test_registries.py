"""Nodes use the package registries and proxies of the host."""

from pathlib import Path

import pytest

from carme_demo.registries import (
    Registries,
    apt_options,
    authorities,
    debian_mirrors,
    local_folder,
    missing_programs,
    npm_options,
    pip_files,
    pip_options,
    resolvers,
)


def test_pip_variables_win_over_files_and_later_files_over_earlier() -> None:
    files = [
        "[global]\nindex-url = https://one.example/simple\ntimeout = 5\ncert = /etc/own.pem\n",
        "[global]\nindex_url = https://two.example/simple\nextra-index-url =\n  https://a.example\n  https://b.example\n",
    ]
    options = dict(pip_options(files, {"PIP_DEFAULT_TIMEOUT": "90", "PIP_CACHE_DIR": "/x", "HOME": "/root"}))
    assert options == {
        "index-url": "https://two.example/simple",
        "extra-index-url": "https://a.example\nhttps://b.example",
        "timeout": "90",
    }


def test_a_pip_file_that_cannot_be_read_is_left_out() -> None:
    assert pip_options(["no section = here", "[global]\nretries = 3\n"], {}) == (("retries", "3"),)


def test_pip_conf_of_a_node_names_the_nodes_own_bundle() -> None:
    text = Registries(pip=(("find-links", "/a\nhttps://b.example"), ("retries", "3"))).pip_conf()
    assert text == (
        "[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n"
        "find-links =\n    /a\n    https://b.example\nretries = 3\n"
    )
    assert dict(pip_options([text], {}))["find-links"] == "/a\nhttps://b.example"


def test_local_package_folders_are_found_an_index_with_its_parent(tmp_path: Path) -> None:
    wheels, index = tmp_path / "wheels", tmp_path / "my index" / "simple"
    wheels.mkdir()
    index.mkdir(parents=True)
    quoted = f"file://{tmp_path}/my%20index/simple"
    assert local_folder(str(wheels)) == wheels
    assert local_folder(quoted) == index.parent
    assert local_folder("https://pypi.example/simple") is None
    assert local_folder(str(tmp_path / "absent")) is None
    registries = Registries(pip=(("find-links", f"{wheels}\n{wheels}"), ("extra-index-url", quoted)))
    assert registries.pip_folders() == [index.parent, wheels]


def test_a_folder_inside_another_is_not_given_twice(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    registries = Registries(pip=(("find-links", f"{tmp_path}/inner\n{tmp_path}"),))
    assert registries.pip_folders() == [tmp_path]


def test_pip_files_of_the_user_behind_sudo_come_after_roots() -> None:
    files = pip_files({"SUDO_USER": "root", "PIP_CONFIG_FILE": "/etc/more.conf"})
    assert files[-1] == Path("/etc/more.conf")
    assert Path("/root/.config/pip/pip.conf") in files
    assert pip_files({"SUDO_USER": "../../etc"}) == pip_files({})


def test_npm_takes_the_registry_and_leaves_the_rest() -> None:
    text = "registry=https://npm.example/\n//npm.example/:_authToken=secret\n@me:registry = https://me.example\nfund=false\n"
    assert npm_options([text], {}) == (
        ("@me:registry", "https://me.example"),
        ("registry", "https://npm.example/"),
    )
    assert npm_options([text], {"npm_config_registry": "https://x.example"})[1][1] == "https://x.example"
    assert Registries().npmrc() == "cafile=/etc/ssl/certs/ca-certificates.crt\n"


def test_apt_takes_what_has_to_do_with_downloads() -> None:
    dump = "\n".join(
        [
            'APT::Architecture "amd64";',
            'Acquire::http::Proxy "http://proxy.example:3128";',
            'Acquire::https "";',
            'Acquire::Check-Valid-Until "false";',
            'Acquire::IndexTargets::deb::Packages::Optional "0";',
            'DPkg::Post-Invoke:: "rm -rf /";',
        ]
    )
    assert apt_options(dump) == (
        ("Acquire::http::Proxy", "http://proxy.example:3128"),
        ("Acquire::Check-Valid-Until", "false"),
    )


def test_the_hosts_mirror_is_used_for_the_nodes_release() -> None:
    targets = "\n".join(
        [
            "https://tools.example/deb/|stable|Tools",
            "http://mirror.example/debian/|bookworm|Debian",
            "http://mirror.example/debian/|bookworm-updates|Debian",
            "http://mirror.example/debian-security/|bookworm-security|Debian",
        ]
    )
    mirror, security = debian_mirrors(targets, "bookworm")
    sources = Registries(mirror=mirror, security_mirror=security).debian_sources("trixie")
    assert sources == [
        "deb http://mirror.example/debian trixie main",
        "deb http://mirror.example/debian trixie-updates main",
        "deb http://mirror.example/debian-security trixie-security main",
    ]


def test_without_a_mirror_debians_default_is_taken() -> None:
    assert debian_mirrors("", "bookworm") == ("", "")
    assert Registries().debian_sources("trixie") == []


def test_no_resolver_on_the_loopback_reaches_a_node() -> None:
    stub, real = "nameserver 127.0.0.53\nnameserver ::1\n", "nameserver 192.0.2.1\nnameserver 192.0.2.2\n"
    assert resolvers([stub, real]) == ["192.0.2.1", "192.0.2.2"]
    assert resolvers([stub]) == []


def test_proxies_reach_the_nodes_environment() -> None:
    text = Registries(proxies=(("https_proxy", "http://proxy.example:3128"),)).environment_file()
    assert text == 'https_proxy="http://proxy.example:3128"\n'


def test_authorities_come_from_every_bundle_that_a_variable_names(tmp_path: Path) -> None:
    bundle = tmp_path / "extra.pem"
    bundle.write_text("-----BEGIN CERTIFICATE-----\nextra\n-----END CERTIFICATE-----\n")
    found = authorities({"SSL_CERT_FILE": str(bundle), "PIP_CERT": str(bundle), "CURL_CA_BUNDLE": "/absent"})
    assert found.count("extra") == 1


@pytest.mark.parametrize(
    ("program", "missing"), [("sh", []), ("/bin/sh", []), ("no-such-program", ["the-package"])]
)
def test_only_packages_whose_program_is_absent_are_missing(program: str, missing: list[str]) -> None:
    assert missing_programs({program: "the-package"}) == missing
