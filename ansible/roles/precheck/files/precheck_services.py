"""What a host serves beside Carme: ports, nginx, Redis, Prometheus, SSSD, and which files are the site's."""

import re
import shutil
from pathlib import Path

from precheck_findings import WRITTEN_BY_ANSIBLE, Problem, output

NGINX = "/etc/nginx/nginx.conf"
#: Files of other programs that roles would write.
FOREIGN_FILES = (
    *("/etc/apptainer/apptainer.conf", "/etc/redis/redis.conf"),
    *(NGINX, "/etc/nginx/sites-enabled/default", "/etc/prometheus/prometheus.yml"),
    *("/etc/prometheus/alertmanager.yml", "/etc/sssd/sssd.conf"),
    *("/etc/slurm/slurm.conf", "/etc/slurm/gres.conf", "/etc/slurm/cgroup.conf"),
    *("/etc/slurm/job_container.conf", "/etc/slurm/slurmdbd.conf"),
)


def listener(port):
    """The names of the programs that listen on a TCP port; None where that cannot be found out."""
    shown = output(
        "ss", "--no-header", "--tcp", "--listening", "--numeric", "--processes", "sport", "=", f":{port}"
    )
    return (
        None
        if shown is None
        else sorted(set(re.findall(r'\(\("([^"]+)"', shown)) or ({"?"} if shown.strip() else ()))
    )


def ports(wanted):
    """The ports of the head must be free, or ours."""
    taken = []
    installed = Path("/etc/carme/carme.toml").exists()
    for port in wanted["ports"]:
        programs = listener(port)
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
