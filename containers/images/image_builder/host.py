"""What the build takes from its host: certificates, pip's settings, Debian's mirror, capabilities."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
from pathlib import Path

from .definitions import SUITE
from .errors import BuildError


def ca_bundle() -> Path:
    """The certificate authorities that this host trusts."""
    for name in ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE"):
        if (value := os.environ.get(name)) and Path(value).is_file():
            return Path(value)
    debian = Path("/etc/ssl/certs/ca-certificates.crt")
    if debian.is_file():
        return debian
    redhat = Path("/etc/pki/tls/certs/ca-bundle.crt")
    if redhat.is_file():
        return redhat
    raise BuildError("This host has no bundle of certificate authorities. Install ca-certificates.")


def pip_settings() -> dict[str, str]:
    """The build host's pip configuration: its files in pip's own order, then the PIP_ variables."""
    files = [Path("/etc/pip.conf"), Path("~/.pip/pip.conf").expanduser()]
    files.append(Path(os.environ.get("XDG_CONFIG_HOME", "~/.config"), "pip/pip.conf").expanduser())
    variables = dict(os.environ)
    if extra := variables.pop("PIP_CONFIG_FILE", ""):
        files.append(Path(extra))
    parser = configparser.RawConfigParser()
    parser.read(file for file in files if os.access(file, os.R_OK))
    settings: dict[str, str] = {}
    for section in ("global", "install"):
        if parser.has_section(section):
            settings |= dict(parser.items(section))
    for name, value in variables.items():
        if name.startswith("PIP_") and value:
            settings[name.removeprefix("PIP_").lower().replace("_", "-")] = value
    return settings


def debian_sources(mirrors: list[str]) -> list[str]:
    """The package sources for the base image: those given, else those of the host if it runs Debian.

    Elsewhere there is none, and mmdebstrap takes its own default.
    """
    if mirrors:
        return [mirror if mirror.startswith("deb") else f"deb {mirror} {SUITE} main" for mirror in mirrors]

    def host(label: str) -> str:
        command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Origin: Debian", f"Label: {label}"]
        if not shutil.which(command[0]):
            return ""
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
        return found[0].rstrip("/") if found else ""

    main, security = host("Debian"), host("Debian-Security")
    sources = [f"deb {main} {SUITE} main", f"deb {main} {SUITE}-updates main"] if main else []
    if main and security:
        sources.append(f"deb {security} {SUITE}-security main")
    return sources


def may_raise_limits() -> bool:
    """Whether this process holds CAP_SYS_RESOURCE, which Apptainer else asks for in vain as root."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapBnd:"):
            return bool(int(line.split()[1], 16) >> 24 & 1)
    return True
