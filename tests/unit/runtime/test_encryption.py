"""What goes over the network between agents: who may speak, and what an eavesdropper sees."""

import os
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from carme.jobs.certificate import make_certificate

from .conftest import AGENT, HUB_TOKEN, PATIENCE, Job, clean_environment, private_file

MakeJob = Callable[..., Job]


class Eavesdropper:
    """A relay in front of the first agent that records both directions."""

    def __init__(self, port: int) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._target = port
        self.recorded = bytearray()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                outer, _ = self._server.accept()
            except OSError:
                return
            inner = socket.create_connection(("127.0.0.1", self._target))
            for source, sink in ((outer, inner), (inner, outer)):
                threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with source, sink:
            try:
                while data := source.recv(65536):
                    self.recorded += data
                    sink.sendall(data)
            except OSError:
                pass

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def eavesdropper(make_job: MakeJob) -> Iterator[tuple[Job, Eavesdropper]]:
    """A job whose second node joined by way of an eavesdropper."""
    job = make_job("n1", "n2", joining=False)
    relay = Eavesdropper(job.port)
    job.join(1, port=relay.port).wait_for_error("n2 joined")
    yield job, relay
    relay.close()


def test_environment_output_and_programs_are_not_seen_on_the_way(
    eavesdropper: tuple[Job, Eavesdropper], script: Callable[[str], str]
) -> None:
    job, relay = eavesdropper
    reported = {"DATABASE_PASSWORD": "correct-horse", "JUPYTERHUB_API_TOKEN": HUB_TOKEN}
    text = "import os; print(os.environ['DATABASE_PASSWORD'], 'JUPYTERHUB_API_TOKEN' in os.environ)"
    code, out, _ = job.launch(script(text), environment=reported).wait()
    assert code == 0
    assert sorted(out.splitlines()) == ["[rank 0] correct-horse False", "[rank 1] correct-horse False"]
    for secret in ("correct-horse", HUB_TOKEN, "DATABASE", "environment", script(text)):
        assert secret.encode() not in relay.recorded
    assert len(relay.recorded) > 4000  # it did listen


def test_without_a_certificate_they_would_be_seen(make_job: MakeJob, script: Callable[[str], str]) -> None:
    """The relay really sees what is sent."""
    job = make_job("n1", "n2", joining=False, encrypted=False)
    relay = Eavesdropper(job.port)
    job.join(1, port=relay.port).wait_for_error("n2 joined")
    assert job.launch("--", "true", environment={"PASSWORD": "correct-horse"}).wait()[0] == 0
    assert b"correct-horse" in relay.recorded
    relay.close()


def signed_by(issuer: str) -> str:
    """A key and a certificate that the key of the certificate `issuer` has signed, in its name."""
    signer = load_pem_private_key(issuer.encode(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.load_pem_x509_certificate(issuer.encode()).subject
    created = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "another")]))
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.now(UTC) - timedelta(days=1))
        .not_valid_after(datetime.now(UTC) + timedelta(days=1))
        .sign(signer, SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return (private + created.public_bytes(Encoding.PEM)).decode()


def knock(job: Job, certificate: Path | None) -> None:
    """Connect as a client that trusts the job's agent and shows `certificate`; it must be thrown out."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(job.certificate)
    if certificate:
        context.load_cert_chain(certificate)
    with (
        socket.create_connection(("127.0.0.1", job.port), PATIENCE) as plain,
        pytest.raises((ssl.SSLError, ConnectionError)),
        context.wrap_socket(plain) as peer,
    ):
        peer.sendall(b"\0\0\0\2{}")
        if peer.recv(1) == b"":
            raise ConnectionResetError


def test_only_the_jobs_own_certificate_is_let_in(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job("n1")
    issued = signed_by(job.certificate.read_text())
    knock(job, None)
    job.first.wait_for_error("no TLS with this job's certificate (PEER_DID_NOT_RETURN_A_CERTIFICATE)")
    for name, pem in {"foreign": make_certificate(), "issued": issued}.items():
        knock(job, private_file(tmp_path / f"{name}.pem", pem))
    with socket.create_connection(("127.0.0.1", job.port), PATIENCE) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        while plain.recv(4096):
            pass
    job.first.wait_for_error("no TLS with this job's certificate (HTTP_REQUEST)")
    code, _, errors = job.end()
    assert (code, errors.count("refused a connection from 127.0.0.1: no TLS")) == (0, 4)
    assert "Traceback" not in errors


def test_a_node_with_another_certificate_stays_out(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job("n1", "n2", joining=False)
    wrong_certificate = private_file(tmp_path / "other.pem", make_certificate())
    code, _, errors = job.join(1, certificate=wrong_certificate).wait()
    assert code == 1
    assert "does not use this job's certificate (CERTIFICATE_VERIFY_FAILED)" in errors
    job.join(1).wait_for_error("n2 joined")


def test_a_false_first_agent_learns_nothing(make_job: MakeJob, tmp_path: Path) -> None:
    """One that was started in its place, with the key but another certificate, is not joined."""
    job = make_job("n1")
    shutil.copy(job.key_file, tmp_path / "stolen.key")
    wrong_certificate = private_file(tmp_path / "other.pem", make_certificate())
    false = [*AGENT, "--nodes", "2", "--key-file", "stolen.key", "--certificate", str(wrong_certificate)]
    false += ["--announce", str(tmp_path / "false" / "a.json"), "--socket", str(tmp_path / "false" / "s")]
    impostor = job.start(
        [*false, "--listen", "127.0.0.1", "--", "sh", "-c", "echo up; read line"], clean_environment()
    )
    assert impostor.line() == "up"
    port = int((tmp_path / "false" / "a.json").read_text().rpartition(":")[2].strip(" }"))
    job.hosts.append("n2")
    job.devices.append("")
    assert job.join(1, port=port).wait()[0] == 1


def test_too_many_unauthenticated_peers_do_not_keep_the_owner_out_for_long(make_job: MakeJob) -> None:
    job = make_job("n1", "n2", joining=False)
    unauthenticated = [socket.create_connection(("127.0.0.1", job.port), PATIENCE) for _ in range(70)]
    job.first.wait_for_error("too many connections that have not proved yet that they know the key")
    job.first.wait_for_error("no proof of the key within 3 seconds")
    for stranger in unauthenticated:
        stranger.close()
    job.join(1).wait_for_error("n2 joined")


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_certificate_that_others_can_read_is_refused(make_job: MakeJob, tmp_path: Path, mode: int) -> None:
    job = make_job("n1", "n2", joining=False)
    job.certificate.chmod(mode)
    code, _, errors = job.join(1).wait()
    assert code == 1
    assert "fabric.pem is open to other users, it must be readable by its owner alone." in errors
    assert os.fspath(job.certificate) in errors
