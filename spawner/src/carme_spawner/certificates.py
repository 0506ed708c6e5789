"""The certificates by which hub, proxy and the servers of sessions know each other.

JupyterHub makes its own ones and the proxy's by certipy, in a folder that only the hub's account can enter.
What is here keeps those from running out, and makes one certificate for each server. A server's key is never
written to the hub's disk: it goes into the job's private folder, and dies with it.
"""

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

from certipy import Certipy
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from carme_spawner.names import name_pattern

#: The authority, by certipy's name, that signs for servers; hub and proxy trust it, servers do not.
SERVERS = "notebooks-ca"
#: Certificates with less time left are renewed when the hub starts; no session lasts so long.
REST = timedelta(days=400)
#: For how long certipy's certificates and those that are renewed are valid.
LIFE = timedelta(days=5 * 365)
#: By how much the clocks of two machines may differ.
SKEW = timedelta(hours=1)


@contextmanager
def exclusively(directory: Path) -> Iterator[None]:
    """Hold the folder of certificates, which hub and proxy may both prepare; make it if there is none."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (directory / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # certipy opens the folder to everybody.
            directory.chmod(0o700)


def renew(directory: Path, names: Sequence[str], now: datetime | None = None) -> None:
    """Prepare a folder of certificates so that what JupyterHub finds in it holds.

    An authority that runs out is certified again with the same key, so that sessions go on; other
    certificates that run out, or lack a name, are forgotten and thereby made anew.

    Args:
        directory: certipy's folder; may be empty.
        names: What the hub's and the proxy's certificates must be good for, like `IP:10.77.0.2`.
        now: The time, if it is not that of the clock.
    """
    now = now or datetime.now(UTC)
    store = Certipy(store_dir=str(directory)).store
    for component, record in list(store.store.items()):
        key, file = (Path(record["files"][kind]) for kind in ("key", "cert"))
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
        lasts = certificate.not_valid_after_utc - now > REST
        if record["is_ca"]:
            if not lasts:
                file.write_bytes(certified_again(certificate, private_key(key), now))
        elif not lasts or not set(names) <= alternative_names(certificate):
            store.remove_record(component)


def certified_again(old: x509.Certificate, key: rsa.RSAPrivateKey, now: datetime) -> bytes:
    """The certificate of an authority with the same key, name and rights, and a later end."""
    builder = (
        x509.CertificateBuilder()
        .subject_name(old.subject)
        .issuer_name(old.issuer)
        .public_key(old.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + LIFE)
    )
    for extension in old.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def alternative_names(certificate: x509.Certificate) -> set[str]:
    """What a certificate is good for, in certipy's words."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return set()
    return {f"DNS:{name}" for name in names.get_values_for_type(x509.DNSName)} | {
        f"IP:{address}" for address in names.get_values_for_type(x509.IPAddress)
    }


def issue(directory: str, trust: str, identity: str, lifetime: timedelta) -> dict[str, str]:
    """A new key and certificate for one server, as the files of its job.

    Args:
        directory: The hub's folder of certificates.
        trust: The file with the authorities that the server shall trust.
        identity: What distinguishes this server from all others, see `carme_spawner.names`.
        lifetime: For how long the certificate is valid.
    """
    authority, authority_key = signer(directory)
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity)]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(min(now + lifetime, authority.not_valid_after_utc))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
            critical=True,
        )
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name_pattern(identity))]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
        )
        .sign(authority_key, hashes.SHA256())
    )
    return {
        "singleuser.key": key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode(),
        "singleuser.crt": certificate.public_bytes(Encoding.PEM).decode(),
        "singleuser-ca.crt": Path(trust).read_text(encoding="ascii"),
    }


@cache
def signer(directory: str) -> tuple[x509.Certificate, rsa.RSAPrivateKey]:
    """The authority for servers, read once: checking its key takes longer than everything else."""
    folder = Path(directory) / SERVERS
    authority = x509.load_pem_x509_certificate((folder / f"{SERVERS}.crt").read_bytes())
    return authority, private_key(folder / f"{SERVERS}.key")


def private_key(file: Path) -> rsa.RSAPrivateKey:
    """A key that certipy has made."""
    key = load_pem_private_key(file.read_bytes(), password=None)
    assert isinstance(key, rsa.RSAPrivateKey)
    return key
