"""The site's monitoring authority: certificates with which exporters and their readers know each other.

`python -m carme_monitoring.certificates FOLDER TABLE`, TABLE being JSON: `[{"name", "group", "hosts"}]`.
For each entry `FOLDER/NAME/` gets `tls.pem` (key and certificate) and `ca.crt`. One with hosts (names or
addresses) is a server, and one with `"client": true` may read; a server's certificate reads nothing, so that
a node that fell into wrong hands does not open the others. Run again it changes nothing, unless an entry has
other hosts than before or a certificate has less than a year left.
"""

import grp
import ipaddress
import json
import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NotRequired, TypedDict

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from carme.command_line import run_command
from carme.errors import CarmeError

__all__ = ["Entry", "make"]

LIFE = timedelta(days=3650)
RENEW = timedelta(days=365)
_OLDER = timedelta(hours=1)  # clocks of hosts differ


class Entry(TypedDict):
    """Who gets a certificate; files belong to root and `group`."""

    name: str
    group: str
    hosts: NotRequired[list[str]]
    client: NotRequired[bool]


def make(folder: Path, table: list[Entry], now: datetime | None = None) -> list[str]:
    """Make what is missing, and set owners and modes right; the names of what was made or changed.

    Raises:
        CarmeError: This host lacks a group of the table; then nothing was made.
    """
    now = now or datetime.now(UTC)
    changed: list[str] = []
    groups = {entry["group"]: _group(entry) for entry in table}
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    folder.chmod(0o755)
    key, certificate, is_new = _authority(folder, now)
    if is_new:
        changed.append("authority")
    for entry in table:
        place = folder / entry["name"]
        group = groups[entry["group"]]
        place.mkdir(mode=0o750, exist_ok=True)
        new = not _is_current(place / "tls.pem", entry, certificate, now)
        if new:
            _write(place / "tls.pem", _issue(entry, key, certificate, now), 0o640, group)
        authority = certificate.public_bytes(serialization.Encoding.PEM)
        if not (place / "ca.crt").exists() or (place / "ca.crt").read_bytes() != authority:
            _write(place / "ca.crt", authority, 0o640, group)
            new = True
        for path, mode in ((place, 0o750), (place / "tls.pem", 0o640), (place / "ca.crt", 0o640)):
            status = path.stat()
            if (status.st_mode & 0o7777, status.st_gid) != (mode, group):
                os.chown(path, os.getuid(), group)
                path.chmod(mode)
                new = True
        if new:
            changed.append(entry["name"])
    return changed


def _group(entry: Entry) -> int:
    try:
        return grp.getgrnam(entry["group"]).gr_gid
    except KeyError:
        raise CarmeError(
            f"This host has no group {entry['group']!r}, to which the certificate {entry['name']!r} is to "
            "belong. Nothing was made.",
            "Make the group (groupadd --system), install what it belongs to, or correct the table.",
        ) from None


def _authority(folder: Path, now: datetime) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate, bool]:
    file = folder / "authority.pem"
    if file.exists():
        text = file.read_bytes()
        key = serialization.load_pem_private_key(text, None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return key, x509.load_pem_x509_certificate(text), False
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Carme monitoring")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _OLDER)
        .not_valid_after(now + 3 * LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(authority=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(file, _pem(key) + certificate.public_bytes(serialization.Encoding.PEM), 0o600, os.getgid())
    return key, certificate, True


def _issue(
    entry: Entry, authority: ec.EllipticCurvePrivateKey, issuer: x509.Certificate, now: datetime
) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        x509.CertificateBuilder()
        .subject_name(
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, entry["name"].replace("/", "-")[:64])])
        )
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _OLDER)
        .not_valid_after(now + LIFE)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(_purposes(entry)), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False
        )
    )
    if names := _names(entry):
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    certificate = builder.sign(authority, hashes.SHA256())
    return _pem(key) + certificate.public_bytes(serialization.Encoding.PEM)


def _is_current(file: Path, entry: Entry, authority: x509.Certificate, now: datetime) -> bool:
    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
        certificate.verify_directly_issued_by(authority)
    except Exception:  # not there, torn, or of another authority
        return False
    try:
        found = list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        found = []
    purposes = list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    return (
        found == _names(entry)
        and purposes == _purposes(entry)
        and certificate.not_valid_after_utc - now > RENEW
    )


def _names(entry: Entry) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = []
    for host in entry.get("hosts", []):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    return names


def _purposes(entry: Entry) -> list[x509.ObjectIdentifier]:
    return [
        *([ExtendedKeyUsageOID.SERVER_AUTH] if entry.get("hosts") else []),
        *([ExtendedKeyUsageOID.CLIENT_AUTH] if entry.get("client") else []),
    ]


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes, mode: int, group: int) -> None:
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        os.fchown(file.fileno(), os.getuid(), group)
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())
    new.rename(path)


def _main() -> int:
    print(json.dumps({"changed": make(Path(sys.argv[1]), json.loads(sys.argv[2]))}))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command("carme_monitoring.certificates", _main))
