"""Signing in with accounts of a real LDAP server, encrypted; left out where there is no slapd."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import self_signed
from free_ports import free_port
from ldap3.core.exceptions import LDAPException

from carme.config.settings import LdapSettings
from carme.errors import SlurmError
from carme_webui.accounts.directory import Entry, look_up
from carme_webui.accounts.models import User
from patience import HANG

from .conftest import PASSWORD, Browser
from .fake_broker import FakeBroker

#: Where `./test` unpacks it; else the system's.
ROOT = Path(os.environ.get("CARME_SLAPD", "/"))
SLAPD = ROOT / "usr/sbin/slapd"
LIBRARIES = {"LD_LIBRARY_PATH": str(ROOT / "usr/lib/x86_64-linux-gnu")} if str(ROOT) != "/" else {}
pytestmark = pytest.mark.skipif(not SLAPD.exists(), reason="there is no slapd; ./test fetches it")

BASE = "dc=example,dc=org"
SECRET = "the portal's own secret"
LDIF = """\
dn: dc=example,dc=org
objectClass: organization
objectClass: dcObject
o: Example
dc: example

dn: ou=people,dc=example,dc=org
objectClass: organizationalUnit
ou: people

dn: cn=portal,dc=example,dc=org
objectClass: organizationalRole
objectClass: simpleSecurityObject
cn: portal
userPassword: the portal's own secret
"""
PERSON = """
dn: uid={name},ou=people,dc=example,dc=org
objectClass: inetOrgPerson
uid: {name}
cn: {name} Müller
sn: Müller
mail: {name}@example.org
userPassword: pw of {name}
"""
GROUP = """
dn: cn=admins,dc=example,dc=org
objectClass: groupOfNames
cn: admins
member: uid=dora,ou=people,dc=example,dc=org
"""


@pytest.fixture(scope="module")
def ldap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LdapSettings]:
    """A directory with the users carol, dora (an administrator), and two who are called eve."""
    folder = tmp_path_factory.mktemp("ldap")
    for ending, content in zip(("crt", "key"), self_signed("localhost"), strict=True):
        (folder / f"ldap.{ending}").write_bytes(content)
    (folder / "data").mkdir()
    schemas = "".join(
        f"include {ROOT}/etc/ldap/schema/{name}.schema\n" for name in ("core", "cosine", "inetorgperson")
    )
    (folder / "slapd.conf").write_text(
        f"{schemas}modulepath {ROOT}/usr/lib/ldap\nmoduleload back_mdb\n"
        f"TLSCertificateFile {folder}/ldap.crt\nTLSCertificateKeyFile {folder}/ldap.key\n"
        f"disallow bind_anon\ndatabase mdb\nsuffix {BASE}\ndirectory {folder}/data\n"
        f'rootdn "cn=root,{BASE}"\nmaxsize 10485760\n'
        "access to attrs=userPassword by anonymous auth by * none\naccess to * by users read by * none\n"
    )
    people = "".join(PERSON.format(name=name) for name in ("carol", "dora", "eve"))
    second_eve = PERSON.format(name="eve").replace("uid=eve,ou=people", "cn=eve two,ou=people")
    second_eve = second_eve.replace("cn: eve Müller", "cn: eve two")
    (folder / "all.ldif").write_text(LDIF + people + second_eve + GROUP)
    environment = os.environ | LIBRARIES
    command = [str(SLAPD), "-T", "add", "-f", str(folder / "slapd.conf"), "-l", str(folder / "all.ldif")]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    port = free_port()
    url = f"ldaps://localhost:{port}"
    server = subprocess.Popen(
        [str(SLAPD), "-d", "0", "-f", str(folder / "slapd.conf"), "-h", url],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        end = time.monotonic() + HANG
        while True:
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None and time.monotonic() < end, "slapd has not started"
            time.sleep(0.1)
        yield LdapSettings(
            url=url, base=f"ou=people,{BASE}", bind_dn=f"cn=portal,{BASE}", certificates=folder / "ldap.crt",
            admin_group=f"cn=admins,{BASE}",
        )  # fmt: skip
    finally:
        server.terminate()
        server.wait(HANG)


def test_a_right_password_shows_who_it_is(ldap: LdapSettings) -> None:
    found = look_up("carol", "pw of carol", ldap, SECRET)
    assert found == Entry("carol", "carol@example.org", "carol Müller", admin=False)
    found = look_up("dora", "pw of dora", ldap, SECRET)
    assert found is not None and found.admin


def test_a_name_is_spelled_as_the_directory_does(ldap: LdapSettings) -> None:
    found = look_up("Carol", "pw of carol", ldap, SECRET)
    assert found is not None and found.name == "carol"


@pytest.mark.parametrize(
    ("name", "password"),
    [
        ("carol", "pw of dora"), ("carol", ""), ("nobody", "x"), ("*", "pw of carol"),
        ("caro*", "pw of carol"),
        ("carol)(uid=*", "pw of carol"), ("", "x"), ("eve", "pw of eve"),
        ("carol\0", "pw of carol"),
    ],
)  # fmt: skip
def test_wrong_names_and_passwords_find_nobody(ldap: LdapSettings, name: str, password: str) -> None:
    assert look_up(name, password, ldap, SECRET) is None


def test_a_server_that_cannot_prove_itself_gets_no_password(ldap: LdapSettings) -> None:
    stranger = ldap.model_copy(update={"certificates": None})
    with pytest.raises((LDAPException, OSError)):
        look_up("carol", "pw of carol", stranger, SECRET)
    elsewhere = ldap.model_copy(update={"url": ldap.url.replace("localhost", "127.0.0.1")})
    with pytest.raises((LDAPException, OSError)):
        look_up("carol", "pw of carol", elsewhere, SECRET)


def test_a_portal_that_may_not_search_the_directory_reports_it(ldap: LdapSettings) -> None:
    with pytest.raises(LDAPException):
        look_up("carol", "pw of carol", ldap, "wrong")


@pytest.fixture
def site(ldap: LdapSettings, settings, folder: Path, at_once: None) -> LdapSettings:
    """The portal asks that directory."""
    (folder / "secrets/ldap-password").write_text(SECRET)
    settings.SITE = settings.SITE.model_copy(update={"ldap": ldap})
    settings.AUTHENTICATION_BACKENDS = [
        *settings.AUTHENTICATION_BACKENDS, "carme_webui.accounts.directory.LdapBackend",
    ]  # fmt: skip
    return ldap


def sign_in(browser: Browser, name: str, password: str):
    return browser.send("/accounts/login/", "/accounts/login/", login=name, password=password)


def test_a_user_of_the_directory_signs_in_and_is_enrolled(
    anonymous: Browser, site: LdapSettings, broker: FakeBroker
) -> None:
    assert sign_in(anonymous, "carol", "pw of carol").status_code == 302
    assert anonymous.get("/profile/").status_code == 200
    carol = User.objects.get(username="carol")
    assert (carol.email, carol.first_name, carol.last_name) == ("carol@example.org", "carol", "Müller")
    assert not carol.has_usable_password() and not carol.is_staff
    assert [requested.name for requested in broker.requests_of("enrol")] == ["carol"]
    second = Browser()
    assert sign_in(second, "carol", "pw of carol").status_code == 302
    assert len(broker.requests_of("enrol")) == 1 and User.objects.count() == 1


def test_a_failed_enrolment_is_repeated_at_the_next_sign_in(
    anonymous: Browser, site: LdapSettings, broker: FakeBroker
) -> None:
    broker.refusal = SlurmError("Slurm does not answer.", "Wait.", code="slurm-away")
    assert sign_in(anonymous, "carol", "pw of carol").status_code == 302
    broker.refusal = None
    for _again in range(2):
        assert sign_in(Browser(), "carol", "pw of carol").status_code == 302
    assert [requested.name for requested in broker.requests_of("enrol")] == ["carol", "carol"]


def test_administrators_follow_the_group(
    anonymous: Browser, site: LdapSettings, broker: FakeBroker, settings
) -> None:
    sign_in(anonymous, "dora", "pw of dora")
    assert anonymous.get("/admin/").status_code == 200
    settings.SITE = settings.SITE.model_copy(
        update={"ldap": site.model_copy(update={"admin_group": f"cn=none,{BASE}", "filter": "(uid={name})"})}
    )
    User.objects.update(is_staff=True)
    second = Browser()
    answer = sign_in(second, "dora", "pw of dora")
    # A missing group is an error of the site; the earlier membership does not count then.
    assert "does not answer" in answer.content.decode()


def test_wrong_passwords_and_closed_accounts_stay_outside(
    anonymous: Browser, site: LdapSettings, broker: FakeBroker
) -> None:
    assert "not correct" in sign_in(anonymous, "carol", "wrong").content.decode()
    sign_in(anonymous, "carol", "pw of carol")
    User.objects.update(is_active=False)
    second = Browser()
    sign_in(second, "carol", "pw of carol")
    assert second.get("/profile/").status_code == 302


def test_an_account_of_the_portal_is_not_taken_over(
    anonymous: Browser, site: LdapSettings, broker: FakeBroker
) -> None:
    User.objects.create_user("carol", password=PASSWORD)
    assert "not correct" in sign_in(anonymous, "carol", "pw of carol").content.decode()
    assert sign_in(anonymous, "carol", PASSWORD).status_code == 302


def test_while_the_directory_is_away_that_is_reported_and_others_get_in(
    anonymous: Browser, site: LdapSettings, settings, alice: User
) -> None:
    away = site.model_copy(update={"url": "ldaps://localhost:1"})
    settings.SITE = settings.SITE.model_copy(update={"ldap": away})
    assert "does not answer" in sign_in(anonymous, "carol", "pw of carol").content.decode()
    assert sign_in(anonymous, "alice", PASSWORD).status_code == 302
