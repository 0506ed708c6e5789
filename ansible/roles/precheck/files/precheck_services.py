"""What a host serves beside Carme (ports, nginx, Redis, Prometheus, MariaDB, SSSD), and the site's files."""

import re
import shutil
from pathlib import Path

from precheck_findings import WRITTEN_BY_ANSIBLE, Problem, listed, output

NGINX = "/etc/nginx/nginx.conf"
#: Files of other programs that roles would write.
FOREIGN_FILES = (
    *("/etc/apptainer/apptainer.conf", "/etc/redis/redis.conf"),
    *(NGINX, "/etc/nginx/sites-enabled/default", "/etc/prometheus/prometheus.yml"),
    *("/etc/prometheus/alertmanager.yml", "/etc/sssd/sssd.conf"),
    *("/etc/slurm/slurm.conf", "/etc/slurm/gres.conf", "/etc/slurm/cgroup.conf"),
    *("/etc/slurm/job_container.conf", "/etc/slurm/slurmdbd.conf"),
)
#: Addresses of sockets that take a port on every address.
ANYWHERE = ("*", "0.0.0.0", "[::]")
#: Databases that each MariaDB has, or the role slurm_database makes.
OUR_DATABASES = {"information_schema", "mysql", "performance_schema", "sys", "test", "slurm_acct_db"}


def sockets(port):
    """The lines of ss about sockets that listen on a TCP port; empty where that cannot be found out."""
    shown = output(
        "ss", "--no-header", "--tcp", "--listening", "--numeric", "--processes", "sport", "=", f":{port}"
    )
    return [line for line in (shown or "").splitlines() if line.strip()]


def listener(lines):
    """The names of the programs in lines of ss."""
    return sorted(set(re.findall(r'\(\("([^"]+)"', "\n".join(lines))) or ({"?"} if lines else ()))


def ports(wanted):
    """The ports of the head must be free, or ours."""
    taken = []
    installed = Path("/etc/carme/carme.toml").exists()
    for port in wanted["ports"]:
        programs = listener(sockets(port))
        if not programs or (programs == ["nginx"] and port in wanted["site_ports"]):
            continue
        if not installed or port in wanted["site_ports"]:
            taken.append("port {} by {}".format(port, ", ".join(programs)))
    if taken:
        raise Problem(
            "In use are: {}.".format("; ".join(taken)),
            "Stop these programs, or give carme_site_url another port (https://HOST:PORT).",
        )
    return "free, or nginx's"


def metrics_ports(wanted):
    """The ports of exporters and Prometheus must be free, or their units'.

    Those units listen on 127.0.0.1, but on a compute node on its address in the network.
    """
    taken = []
    for unit, port in sorted(wanted["metrics_ports"].items()):
        local = unit != "carme-node-exporter"
        lines = [line for line in sockets(port) if _collides(line, local)]
        process = (output("systemctl", "show", "--property=MainPID", "--value", unit) or "").strip()
        if lines and not re.search(rf"\bpid={process or 0}\b", "\n".join(lines)):
            taken.append("port {} by {}, but {} needs it".format(port, ", ".join(listener(lines)), unit))
    if taken:
        raise Problem(
            "In use are: {}.".format("; ".join(taken)),
            "Stop these programs, or give them other ports: those of Carme's metrics are fixed. A port by "
            "systemd is a socket unit's (Cockpit has 9090: 'systemctl edit cockpit.socket'). Or install "
            "without: no host in the group 'monitoring' (Prometheus), --skip-tags monitoring (all metrics).",
        )
    return "free, or ours"


def _collides(line, local):
    """Whether a socket of ss is in the way of one on 127.0.0.1 (local), or of one on another address."""
    address = line.split()[3].rpartition(":")[0]
    return address in ANYWHERE or (address.startswith("127.") or address == "[::1]") == local


def other_sites(site_files, root=Path("/etc/nginx")):
    """The files of nginx's other sites, with their texts; without ours and the welcome page."""
    found = {}
    for path in [*root.glob("sites-enabled/*"), *root.glob("conf.d/*.conf")]:
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        if WRITTEN_BY_ANSIBLE.search(text) or (path.name == "default" and str(path) not in site_files):
            continue  # the welcome page makes room
        found[path] = text
    return found


def default_servers(wanted, root=Path("/etc/nginx")):
    """No other site of nginx may be the default server of our port."""
    found = []
    for path, text in other_sites(wanted["site_files"], root).items():
        for port, rest in re.findall(r"^\s*listen\s+(?:\S*:)?(\d+)([^;]*);", text, re.MULTILINE):
            if int(port) in wanted["site_ports"] and "default_server" in rest:
                found.append(f"{path} (port {port})")
    if found and wanted["default_server"]:
        raise Problem(
            "nginx has a default server already: {}.".format(", ".join(found)),
            "Set reverse_proxy_default_server to false: Carme then answers for the host of "
            "carme_site_url alone.",
        )
    return "no conflict"


def connections(wanted, root=Path("/etc/nginx")):
    """An nginx of the site's own should hold many connections; its nginx.conf is left as it is."""
    path = root / "nginx.conf"
    if str(path) not in wanted["site_files"]:
        return "ours to set"
    match = re.search(r"^[^#\n]*\bworker_connections\s+(\d+)", path.read_text(errors="replace"), re.MULTILINE)
    allowed = int(match.group(1)) if match else 512
    least = wanted["connections"]
    if allowed < least:
        raise Problem(
            f"{path} is the site's own, and each worker of nginx may hold {allowed} connections.",
            f"Set 'worker_connections {least};' in it: an open notebook holds a dozen of them. Until "
            "then the portal fails when many users are there.",
            stops=False,
        )
    return str(allowed)


def redis(wanted):
    """A Redis that serves others must not be turned into ours."""
    if wanted["redis_configure"] and "/etc/redis/redis.conf" in wanted["site_files"]:
        raise Problem(
            "/etc/redis/redis.conf is the site's own, and Carme would replace it (no port, a socket "
            "of its own).",
            "Give it 'unixsocket /run/redis/redis-server.sock' and 'unixsocketperm 770' and set "
            "redis_configure to false, or "
            "move that Redis to another host.",
        )
    return "ours, or as it came"


def prometheus(wanted):
    """A Prometheus that watches other things must not be turned into ours."""
    found = [path for path in wanted["site_files"] if path.startswith("/etc/prometheus/")]
    if found:
        raise Problem(
            "The site's own: {}.".format(", ".join(found)),
            "Take the head out of the group 'monitoring'; your Prometheus can scrape the exporters "
            "(docs/admins/monitoring.md).",
        )
    return "ours, or as it came"


def database(wanted, folders=(Path("/etc/mysql/mariadb.conf.d"), Path("/etc/my.cnf.d"))):
    """A MariaDB that serves others must not be closed to the network for Slurm's accounting."""
    files = [folder / "90-slurm.cnf" for folder in folders]
    written = [path.read_text(errors="replace") for path in files if path.exists()]
    if not wanted["database_configure"] or any(map(WRITTEN_BY_ANSIBLE.search, written)):
        return "ours, or left as it is"
    if (output("systemctl", "is-active", "mariadb", always=True) or "").strip() != "active":
        return "none runs"
    shown = output("mariadb", "--batch", "--skip-column-names", "--execute", "SHOW DATABASES")
    if shown is None:
        raise Problem(
            "MariaDB runs here, and root cannot log in to it through its socket ('mariadb' as root).",
            "Let root do so (ALTER USER root@localhost IDENTIFIED VIA unix_socket), or put another host into "
            "the group slurm_database.",
        )
    foreign = sorted(set(shown.split("\n")) - OUR_DATABASES - {""})
    if foreign:
        raise Problem(
            f"MariaDB on this host has databases of others: {listed(foreign)}. Carme would close its port, "
            "set its memory and restart it.",
            "Put another host into the group slurm_database, or set slurm_database_configure to false: "
            "MariaDB's configuration then stays as it is, and Slurm's accounting uses its socket.",
        )
    return "serves nobody else"


def directory(wanted):
    """An SSSD that asks a directory already must not be turned into ours."""
    if "/etc/sssd/sssd.conf" in wanted["site_files"]:
        raise Problem(
            "/etc/sssd/sssd.conf is the site's own, and Carme would replace it.",
            "Set users_source to existing: this host already uses a directory. If Carme is to "
            "configure it, move that file away first.",
        )
    return "ours, or none"


def _counted(path):
    """A file of nginx's without its number of connections."""
    return re.sub(r"\b(worker_connections\s+)\d+", r"\1", path.read_text(errors="replace"))


def belongs_to_site(path):
    """Whether somebody has changed a file since its package brought it, and it was not one of our roles."""
    if not path.exists():
        return False
    if WRITTEN_BY_ANSIBLE.search(path.read_text(errors="replace")):
        return False
    if path.name == Path(NGINX).name and any(
        _counted(each) == _counted(path) for each in path.parent.glob(f"{path.name}.*~")
    ):
        return False  # since its backup only our role's number has changed, which bears no mark
    real = path.resolve()
    if shutil.which("dpkg"):
        owner = (output("dpkg", "--search", str(real)) or "").split(":")[0]
        return not owner or str(real) in (output("dpkg", "--verify", owner, always=True) or "")
    owner = (output("rpm", "--query", "--file", str(real)) or "").strip()
    return not owner or str(real) in (output("rpm", "--verify", owner, always=True) or "")


def site_files():
    """Files of other programs that are the site's: what it changed, and nginx.conf beside its own pages."""
    found = [path for path in FOREIGN_FILES if belongs_to_site(Path(path))]
    if NGINX not in found and Path(NGINX).exists() and other_sites(found):
        found.append(NGINX)
    return found
