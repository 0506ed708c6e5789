"""The key and certificate of agents that `carme-run` starts; those of Carme's jobs come from the broker."""

import os
import secrets
import shutil
import subprocess
import tempfile
from datetime import datetime, timedelta, timezone
from pathlib import Path

from carme_runtime.errors import CarmeRuntimeError

KEY, CERTIFICATE = "fabric.key", "fabric.pem"
NAME = "job fabric"
BEGIN = datetime(2020, 1, 1, tzinfo=timezone.utc)  # clocks of nodes differ
DAYS = 36500  # it lives as long as its folder
#: For `openssl ca`, which alone sets when a certificate begins to be valid.
_CONFIGURATION = f"""
[req]
distinguished_name = name
prompt = no
[name]
CN = {NAME}
[ca]
default_ca = own
[own]
database = index
new_certs_dir = .
serial = serial
default_md = sha256
policy = any
x509_extensions = extensions
[any]
commonName = supplied
[extensions]
basicConstraints = critical, CA:FALSE
"""


def write(folder: Path, encrypted: bool) -> list[str]:
    """Make a key, and a certificate unless nothing is to be encrypted; the options of `carme-agent` for them.

    Args:
        folder: Private, empty, and seen by all nodes.
        encrypted: Whether to make a certificate.

    Raises:
        CarmeRuntimeError: There is nothing here that makes certificates.
        OSError: A file cannot be written.
    """
    key_file = folder / KEY
    _write(key_file, secrets.token_hex(32))
    if not encrypted:
        return ["--key-file", str(key_file), "--unencrypted"]
    certificate = folder / CERTIFICATE
    _write(certificate, make_certificate())
    return ["--key-file", str(key_file), "--certificate", str(certificate)]


def make_certificate() -> str:
    """A new private key (P-256) and its self-signed certificate, in PEM. Raises CarmeRuntimeError."""
    try:
        return _by_cryptography()
    except ImportError:
        pass
    if program := shutil.which("openssl"):
        return _by_openssl(program)
    raise CarmeRuntimeError(
        "What the nodes say to each other cannot be encrypted: a certificate is made by openssl or by the "
        "package cryptography, and neither is here.",
        "Use: pip install cryptography. Where everybody on the network is trusted, add --unencrypted.",
    )


def _by_cryptography() -> str:
    from cryptography import x509  # pyright: ignore[reportMissingImports]  # no dependency of this package
    from cryptography.hazmat.primitives import serialization  # pyright: ignore[reportMissingImports]
    from cryptography.hazmat.primitives.asymmetric import ec  # pyright: ignore[reportMissingImports]
    from cryptography.hazmat.primitives.hashes import SHA256  # pyright: ignore[reportMissingImports]

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(BEGIN).not_valid_after(BEGIN + timedelta(days=DAYS))
    extension = x509.BasicConstraints(ca=False, path_length=None)
    certificate = builder.add_extension(extension, critical=True).sign(key, SHA256())
    pem = serialization.Encoding.PEM
    form, cipher = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return (key.private_bytes(pem, form, cipher) + certificate.public_bytes(pem)).decode("ascii")


def _by_openssl(program: str) -> str:
    """The same by two calls of the program: a request, and what it signs itself."""
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    times = ["-startdate", f"{BEGIN:%Y%m%d%H%M%S}Z", "-days", str(DAYS)]
    with tempfile.TemporaryDirectory(prefix="carme-") as name:
        work = Path(name)  # 0700, on this node
        (work / "configuration").write_text(_CONFIGURATION)
        (work / "index").touch()
        common = ["-config", "configuration"]
        for arguments in (
            ["req", "-new", *curve, *common, "-keyout", "key", "-out", "request"],
            ["ca", "-batch", "-selfsign", *common, "-create_serial", "-notext", *times, "-keyfile", "key",
             "-in", "request", "-out", "certificate"],
        ):  # fmt: skip
            done = subprocess.run(
                [program, *arguments], cwd=work, stdin=subprocess.DEVNULL, capture_output=True, check=False
            )
            if done.returncode:
                errors = done.stderr.decode(errors="replace").strip().splitlines()
                raise CarmeRuntimeError(
                    f"{program} could not make a certificate: {errors[-1] if errors else 'it says nothing'}.",
                    "Use: pip install cryptography",
                )
        return (work / "key").read_text() + (work / "certificate").read_text()


def _write(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
