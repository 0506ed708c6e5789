"""Users of the site's LDAP directory and of an outside provider sign in and work; nobody made them here.

The directory is slapd on the head, the provider a small one on this machine. The site is set up for both by
its playbook, as an administrator would, and set back at the end.
"""

import io
import json
import tarfile
from collections.abc import Callable, Iterator

import pytest
import real_chromium
from browser.conftest import start
from certificates import self_signed
from playwright.sync_api import Page, expect
from simulated_provider import CLIENT, SECRET, Provider

from demo_site import DemoSite, wait_until
from patience import HANG

BASE = "dc=example,dc=org"
FOLDER, UNIT, SECRETS = "/srv/showing-ldap", "showing-slapd", "/etc/carme/secrets"
CERTIFICATE = "/usr/local/share/ca-certificates/showing-ldap.crt"
BIND_SECRET = "the portal's own secret"
PACKAGES = ("slapd", "sssd-ldap", "libnss-sss", "libpam-sss")
#: Name, number and full name of the directory's users; the second is an administrator there.
PEOPLE = (("carol", 3101, "Carol Müller"), ("dora", 3102, "Dora Schmidt"))

AS_PORTAL = (
    *("runuser", "--user", "carme-portal", "--", "env", "CARME_CONFIG=/etc/carme/carme.toml"),
    "/opt/carme/venv/bin/carme-portal",
)
#: Else the portal would not give them what jobs need again: it does so once.
FORGET = (
    "from carme_webui.accounts.models import User; "
    f"User.objects.filter(username__in={[name for name, _number, _full_name in PEOPLE]}).delete()"
)

SLAPD_CONF = f"""\
include /etc/ldap/schema/core.schema
include /etc/ldap/schema/cosine.schema
include /etc/ldap/schema/nis.schema
include /etc/ldap/schema/inetorgperson.schema
modulepath /usr/lib/ldap
moduleload back_mdb
TLSCertificateFile {FOLDER}/ldap.crt
TLSCertificateKeyFile {FOLDER}/ldap.key
database mdb
suffix {BASE}
directory {FOLDER}/data
rootdn "cn=root,{BASE}"
maxsize 10485760
access to attrs=userPassword by anonymous auth by * none
access to * by * read
"""
TOP = f"""\
dn: {BASE}
objectClass: organization
objectClass: dcObject
o: Example
dc: example

dn: ou=people,{BASE}
objectClass: organizationalUnit
ou: people

dn: cn=portal,{BASE}
objectClass: organizationalRole
objectClass: simpleSecurityObject
cn: portal
userPassword: {BIND_SECRET}

dn: cn=admins,{BASE}
objectClass: groupOfNames
cn: admins
member: uid=dora,ou=people,{BASE}
"""
PERSON = """
dn: uid={name},ou=people,{base}
objectClass: inetOrgPerson
objectClass: posixAccount
uid: {name}
uidNumber: {number}
gidNumber: {number}
homeDirectory: /home/{name}
cn: {full_name}
sn: {full_name}
mail: {name}@example.org
userPassword: pw of {name}

dn: cn={name},ou=people,{base}
objectClass: posixGroup
cn: {name}
gidNumber: {number}
"""


def files(demo: DemoSite, host: str, contents: dict[str, bytes]) -> None:
    """Write files on a host, for root alone."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name.lstrip("/"))
            member.size, member.mode = len(content), 0o600
            archive.addfile(member, io.BytesIO(content))
    demo.podman.execute(host, "tar", "--extract", "--directory=/", data=buffer.getvalue(), timeout=HANG)


def play(demo: DemoSite, variables: dict[str, object]) -> None:
    """Set the site up as its administrator does, with further variables."""
    demo.run(
        "head", "systemd-run", "--quiet", "--collect", "--wait", "--pipe", "--unit=carme-demo-deploy",
        "--setenv=LANG=C.UTF-8", "--setenv=HOME=/root", "--property=EnvironmentFile=-/etc/environment",
        "--working-directory=/opt/carme/src/ansible", "ansible-playbook", "-i", "inventories/demo",
        "-i", "/opt/carme/inventory/hosts.yml", "-e", "@/opt/carme/inventory/settings.json",
        "-e", json.dumps(variables), "site.yml", timeout=840,
    )  # fmt: skip


@pytest.fixture(scope="module")
def provider(demo: DemoSite) -> Iterator[Provider]:
    """It is on this machine, where the browser is; the head reaches it at its own loopback address."""
    gateway = demo.run("head", "sh", "-c", "ip route show default | cut -d' ' -f3").stdout.strip()
    found = Provider(f"{demo.url.rstrip('/')}/accounts/outside/back/", ("127.0.0.1", gateway))
    begin = ("systemd-run", "--quiet", "--collect", "--unit=showing-provider")
    demo.run("head", *begin, *found.forwarder(gateway))
    try:
        yield found
    finally:
        demo.run("head", "systemctl", "stop", "showing-provider", check=False)
        found.stop()


@pytest.fixture(scope="module")
def site(demo: DemoSite, provider: Provider) -> Iterator[DemoSite]:
    """The demo, with slapd on its head, whose accounts its hosts and its portal know."""
    hosts = [machine.name for machine in demo.settings.machines()]
    public, key = self_signed("head")
    people = "".join(PERSON.format(name=n, number=i, full_name=f, base=BASE) for n, i, f in PEOPLE)
    written = {"slapd.conf": SLAPD_CONF, "all.ldif": TOP + people}
    demo.run(
        "head", "sh", "-c", "DEBIAN_FRONTEND=noninteractive apt-get install -qq -y slapd", timeout=2 * HANG
    )
    try:
        demo.run("head", "systemctl", "disable", "--now", "slapd", check=False)
        demo.run("head", "install", "-d", "-m", "700", FOLDER, f"{FOLDER}/data")
        files(demo, "head", {f"{FOLDER}/{name}": text.encode() for name, text in written.items()})
        files(demo, "head", {f"{FOLDER}/ldap.crt": public, f"{FOLDER}/ldap.key": key})
        demo.run("head", "slapadd", "-f", f"{FOLDER}/slapd.conf", "-l", f"{FOLDER}/all.ldif")
        serve = ("slapd", "-d", "0", "-f", f"{FOLDER}/slapd.conf", "-h", "ldaps://head")
        demo.run("head", "systemd-run", "--quiet", "--collect", f"--unit={UNIT}", *serve)
        for host in hosts:
            files(demo, host, {CERTIFICATE: public})
            demo.run(host, "sh", "-c", f"chmod 644 {CERTIFICATE} && update-ca-certificates")
        secrets = {"ldap-password": BIND_SECRET, "oidc-provider-secret": SECRET}
        files(demo, "head", {f"{SECRETS}/{name}": text.encode() for name, text in secrets.items()})
        for name in secrets:
            demo.run("head", "chown", "root:carme-portal", f"{SECRETS}/{name}")
            demo.run("head", "chmod", "640", f"{SECRETS}/{name}")
        ldap = {
            "url": "ldaps://head", "base": f"ou=people,{BASE}", "bind_dn": f"cn=portal,{BASE}",
            "certificates": CERTIFICATE, "admin_group": f"cn=admins,{BASE}",
        }  # fmt: skip
        oidc = {"issuer": provider.issuer, "client_id": CLIENT, "name": "Example University"}
        source = {"users_source": "ldap", "users_ldap_uri": "ldaps://head", "users_ldap_base": BASE}
        play(demo, {**source, "carme_ldap": ldap, "carme_oidc": oidc})
        yield demo
    finally:
        for name, _, _ in PEOPLE:
            demo.run("head", "scancel", f"--user={name}", check=False)
        demo.end_all_jobs()
        for name, _, _ in PEOPLE:
            demo.run("head", "sacctmgr", "--immediate", "delete", "user", name, check=False)
            demo.run("head", "rm", "-rf", f"/home/{name}")
        demo.run("head", *AS_PORTAL, "shell", "--command", FORGET)
        for host in hosts:
            demo.run(host, "sh", "-c", f"rm -f {CERTIFICATE} && update-ca-certificates --fresh")
            demo.run(
                host, "apt-get", "purge", "-qq", "-y", "--autoremove", *PACKAGES, check=False, timeout=300
            )
        demo.run("head", "systemctl", "stop", UNIT, check=False)
        demo.run("head", "rm", "-rf", FOLDER, f"{SECRETS}/ldap-password", f"{SECRETS}/oidc-provider-secret")
        play(demo, {})


def sign_in(page: Page, name: str, password: str) -> None:
    page.goto("/")
    real_chromium.sign_in(page, name, password)


def test_a_user_of_the_directory_signs_in_and_works(
    page: Page, site: DemoSite, keep: Callable[[str], None]
) -> None:
    assert site.run("n2", "id", "-u", "carol").stdout.strip() == "3101"
    sign_in(page, "carol", "pw of dora")
    expect(page.get_by_role("alert").first).to_be_visible()
    sign_in(page, "carol", "pw of carol")
    expect(page.get_by_role("heading", name="Start a session")).to_be_visible()
    keep("ldap-1-signed-in")
    line = (
        "sacctmgr",
        "--noheader",
        "--parsable2",
        "show",
        "associations",
        "user=carol",
        "format=user,account",
    )
    wait_until("Slurm knows her", lambda: "carol|" in site.run("head", *line).stdout)
    wait_until(
        "she has a home", lambda: site.run("head", "test", "-d", "/home/carol", check=False).returncode == 0
    )
    assert site.run("head", "stat", "--format=%U %a", "/home/carol").stdout.split() == ["carol", "700"]
    start(page, "Of the directory", minutes=5)
    expect(page.get_by_role("link", name="Open JupyterLab").first).to_be_visible()
    (job,) = site.carme_json("jobs", user="carol")
    inside = ("squeue", "--noheader", f"--jobs={job['id']}", "--format=%u %N")
    assert site.run("head", *inside).stdout.split()[0] == "carol"
    keep("ldap-2-her-session")
    page.get_by_role("link", name="Stop").click()
    page.get_by_role("button", name="Stop the session").click()
    queued = ("squeue", "--noheader", f"--jobs={job['id']}", "--states=running")
    wait_until("it is over", lambda: not site.run("head", *queued, check=False).stdout.strip())


def test_an_administrator_of_the_directory_administers_the_portal(page: Page, site: DemoSite) -> None:
    sign_in(page, "dora", "pw of dora")
    expect(page.get_by_role("heading", name="Start a session")).to_be_visible()
    page.goto("/admin/users/")
    expect(page.get_by_text("carol@example.org").first).to_be_visible()


def test_a_user_of_the_outside_provider_signs_in(
    page: Page, site: DemoSite, provider: Provider, keep: Callable[[str], None]
) -> None:
    provider.claims = {"sub": "u-7", "preferred_username": "carol"}
    page.goto("/")
    keep("oidc-1-the-button")
    page.get_by_text("Sign in with Example University").click()
    expect(page.get_by_role("heading", name="Start a session")).to_be_visible()
    expect(page.get_by_text("carol").first).to_be_visible()
