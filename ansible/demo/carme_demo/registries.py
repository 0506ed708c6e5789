"""How the host reaches its package registries, so that the nodes can reach them in the same way.

Mirrors, proxies, private certificate authorities and local package folders of the host are found here and put
into the nodes' own configuration files. Nothing is taken but what has to do with reaching registries.
"""

import configparser
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse

from . import commands

SYSTEM_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
BUNDLE_VARIABLES = (
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "PIP_CERT",
    "NODE_EXTRA_CA_CERTS",
)
PROXY_VARIABLES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
PIP_LISTS = ("extra-index-url", "find-links", "trusted-host")
PIP_OPTIONS = (
    "index-url",
    *PIP_LISTS,
    "no-index",
    "proxy",
    "timeout",
    "retries",
    "prefer-binary",
    "only-binary",
    "disable-pip-version-check",
)
APT_OPTIONS = re.compile(r"Acquire::(https?::.+|Retries|Check-Valid-Until|Check-Date|ForceIPv4|ForceIPv6)$")
NPM_OPTIONS = re.compile(r"(registry|@[a-z0-9._~-]+:registry|strict-ssl|proxy|https-proxy|noproxy)$")


@dataclass(frozen=True)
class Registries:
    """What the nodes get.

    Args:
        mirror: the host's Debian mirror; empty: Debian's default.
        security_mirror: the same for security updates.
        apt_options: apt settings that matter for downloads, name and value.
        pip: pip options.
        npm: npm options.
        proxies: proxy variables.
        authorities: certificates that the host trusts, PEM.
    """

    mirror: str = ""
    security_mirror: str = ""
    apt_options: tuple[tuple[str, str], ...] = ()
    pip: tuple[tuple[str, str], ...] = ()
    npm: tuple[tuple[str, str], ...] = ()
    proxies: tuple[tuple[str, str], ...] = ()
    authorities: str = ""

    def debian_sources(self, suite: str) -> list[str]:
        """Lines of sources.list for a Debian suite, or none to take the default mirror."""
        if not self.mirror:
            return []
        lines = [f"deb {self.mirror} {suite} main", f"deb {self.mirror} {suite}-updates main"]
        if self.security_mirror:
            lines.append(f"deb {self.security_mirror} {suite}-security main")
        return lines

    def pip_conf(self) -> str:
        """Text of /etc/pip.conf. The bundle is the node's own, which trusts what the host trusts."""
        lines = ["[global]", f"cert = {SYSTEM_BUNDLE}"]
        for name, value in self.pip:
            lines.append(f"{name} = {value}" if "\n" not in value else f"{name} =")
            if "\n" in value:
                lines += [f"    {part}" for part in value.splitlines()]
        return "\n".join(lines) + "\n"

    def pip_folders(self) -> list[Path]:
        """Local folders that pip's options name; the nodes get them under the same paths."""
        folders: list[Path] = []
        for name, value in self.pip:
            if name in ("index-url", "extra-index-url", "find-links"):
                folders += [folder for word in value.split() if (folder := local_folder(word))]
        return _without_nested(folders)

    def npmrc(self) -> str:
        """Text of the administrator's .npmrc."""
        return "".join(f"{name}={value}\n" for name, value in (*self.npm, ("cafile", str(SYSTEM_BUNDLE))))

    def apt_conf(self) -> str:
        """Text of a file in /etc/apt/apt.conf.d. Downloads are kept: a node made anew finds them."""
        options = (
            *self.apt_options,
            ("Binary::apt::APT::Keep-Downloaded-Packages", "true"),
            ("DPkg::Lock::Timeout", "120"),
        )
        return "".join(f"{name} {json.dumps(value)};\n" for name, value in options)

    def environment_file(self) -> str:
        """Text of /etc/environment."""
        return "".join(f'{name}="{value}"\n' for name, value in self.proxies)


def of_host(environment: Mapping[str, str] | None = None) -> Registries:
    """Find out how this host reaches its registries."""
    environment = os.environ if environment is None else environment
    mirror, security = _debian_mirrors()
    return Registries(
        mirror=mirror,
        security_mirror=security,
        apt_options=apt_options(commands.text(["apt-config", "dump"], timeout=30)),
        pip=pip_options([path.read_text() for path in pip_files(environment) if path.is_file()], environment),
        npm=npm_options([path.read_text() for path in npm_files(environment) if path.is_file()], environment),
        proxies=tuple((name, environment[name]) for name in PROXY_VARIABLES if environment.get(name)),
        authorities=authorities(environment),
    )


def homes(environment: Mapping[str, str]) -> list[Path]:
    """Root's home, and that of the user who called sudo: their own settings count more, so they come last."""
    found = [Path("/root")]
    caller = environment.get("SUDO_USER")
    if caller and re.fullmatch(r"[a-z_][a-z0-9_.-]*", caller):
        home = Path(f"~{caller}").expanduser()
        if home.is_absolute() and home not in found:
            found.append(home)
    return found


def pip_files(environment: Mapping[str, str]) -> list[Path]:
    """pip's configuration files, the weaker first."""
    files = [Path("/etc/xdg/pip/pip.conf"), Path("/etc/pip.conf")]
    for home in homes(environment):
        files += [home / ".pip/pip.conf", home / ".config/pip/pip.conf"]
    if environment.get("PIP_CONFIG_FILE"):
        files.append(Path(environment["PIP_CONFIG_FILE"]))
    return files


def pip_options(files: Iterable[str], environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Translate pip's configuration: later files over earlier ones, PIP_* variables over all, as pip does.

    Args:
        files: texts of configuration files, the weaker first.
        environment: variables.
    """
    chosen: dict[str, str] = {}
    for text in files:
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read_string(text)
        except configparser.Error:
            continue  # pip itself will complain to the user; the demo goes on without this file
        for section in ("global", "install"):
            if parser.has_section(section):
                chosen |= {name.replace("_", "-"): value for name, value in parser.items(section)}
    for name, value in environment.items():
        if name.startswith("PIP_") and value:
            chosen[name.removeprefix("PIP_").lower().replace("_", "-")] = value
    if "default-timeout" in chosen:
        chosen["timeout"] = chosen.pop("default-timeout")
    result = []
    for name in PIP_OPTIONS:
        value = chosen.get(name, "").strip()
        if value:
            result.append((name, "\n".join(value.split()) if name in PIP_LISTS else value))
    return tuple(result)


def local_folder(word: str) -> Path | None:
    """The folder that a pip option names, or None for an address on the network.

    A local index keeps its files beside its pages (.../simple, .../files), so it is taken with its parent.
    """
    address = urlparse(word)
    if address.scheme == "file":
        path = Path(unquote(address.path))
    elif word.startswith("/"):
        path = Path(word)
    else:
        return None
    if path.name == "simple" and len(path.parts) > 2:
        path = path.parent
    return path if path.is_dir() and path != Path("/") else None


def _without_nested(folders: Iterable[Path]) -> list[Path]:
    saved: list[Path] = []
    for folder in sorted(set(folders)):
        if not any(folder.is_relative_to(parent) for parent in saved):
            saved.append(folder)
    return saved


def npm_files(environment: Mapping[str, str]) -> list[Path]:
    """npm's configuration files, the weaker first."""
    return [Path("/etc/npmrc"), Path("/usr/etc/npmrc"), *(home / ".npmrc" for home in homes(environment))]


def npm_options(files: Iterable[str], environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The options of npm that say which registry is used and how."""
    chosen: dict[str, str] = {}
    for text in files:
        for line in text.splitlines():
            name, equals, value = line.partition("=")
            if equals and NPM_OPTIONS.match(name.strip()):
                chosen[name.strip()] = value.strip()
    registry = environment.get("npm_config_registry") or environment.get("NPM_CONFIG_REGISTRY")
    if registry:
        chosen["registry"] = registry
    return tuple(sorted(chosen.items()))


def apt_options(dump: str) -> tuple[tuple[str, str], ...]:
    """The settings of ``apt-config dump`` that say how packages are fetched."""
    chosen = []
    for line in dump.splitlines():
        match = re.fullmatch(r'(\S+) "(.*)";', line)
        if match and match[2] and APT_OPTIONS.match(match[1]):
            chosen.append((match[1], match[2]))
    return tuple(chosen)


def debian_mirrors(targets: str, codename: str) -> tuple[str, str]:
    """The mirror and the security mirror among apt's index targets.

    Args:
        targets: lines ``ADDRESS|SUITE|ORIGIN``.
        codename: the host's Debian release.
    """
    found: dict[str, str] = {}
    for line in targets.splitlines():
        address, _, rest = line.partition("|")
        suite, _, origin = rest.partition("|")
        if origin.strip() in ("Debian", "") and address.startswith(("http://", "https://")):
            found.setdefault(suite.strip(), address.strip().rstrip("/"))
    return found.get(codename, ""), found.get(f"{codename}-security", "")


def _debian_mirrors() -> tuple[str, str]:
    release = Path("/etc/os-release").read_text()
    codename = re.search(r"^VERSION_CODENAME=(\S+)", release, re.MULTILINE)
    if not re.search(r"^ID=debian$", release, re.MULTILINE) or not codename:
        return "", ""
    options = [
        "apt-get",
        "indextargets",
        "--format",
        "$(REPO_URI)|$(RELEASE)|$(ORIGIN)",
        "Identifier: Packages",
    ]
    return debian_mirrors(commands.text(options, timeout=30, check=False), codename[1])


def authorities(environment: Mapping[str, str]) -> str:
    """All certificates that the host trusts, from its own bundle and from those that variables name."""
    bundles = [
        SYSTEM_BUNDLE,
        *(Path(environment[name]) for name in BUNDLE_VARIABLES if environment.get(name)),
    ]
    texts = [path.read_text(errors="replace") for path in dict.fromkeys(bundles) if path.is_file()]
    return "\n".join(texts)


def resolvers(texts: Iterable[str]) -> list[str]:
    """Name servers that a node can reach: those of the first text that has one not on the loopback."""
    for text in texts:
        found = re.findall(r"^nameserver\s+(\S+)", text, re.MULTILINE)
        usable = [address for address in found if not address.startswith("127.") and address != "::1"]
        if usable:
            return usable
    return []


def host_resolvers() -> list[str]:
    """Name servers of the host, past a local forwarder such as systemd-resolved."""
    files = [Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf")]
    return resolvers(path.read_text() for path in files if path.is_file())


def missing_programs(programs: Mapping[str, str]) -> list[str]:
    """Packages whose program is not there.

    Args:
        programs: program (name or absolute path) and the package that brings it.
    """
    return [package for program, package in programs.items() if not _is_installed(program)]


def _is_installed(program: str) -> bool:
    return Path(program).exists() if program.startswith("/") else shutil.which(program) is not None
