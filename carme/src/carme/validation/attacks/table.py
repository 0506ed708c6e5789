"""All attacks, as one table: what the attacker does, and the same done by who may do it.

An attack counts as stopped only if its control works, so that none is stopped by a mistake of its own.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from carme.broker import BrokerClient
from carme.errors import CarmeError
from carme.jobs import Job, JobRequest
from carme.validation.attacks import moves
from carme.validation.attacks.moves import Outcome
from carme.validation.attacks.scene import EVIL, EVIL_TEXT, Player, Scene
from carme.validation.notebook import ChannelClosed

#: For a small job to come to its end, on a cluster that has other things to do.
JOB_SECONDS = 120.0

Deed = Callable[[Scene], Outcome]
Arguments = Callable[[Scene], dict[str, Any]]


@dataclass(frozen=True)
class Attack:
    """One attempt. `attack` must not reach what it is after, `control` must."""

    name: str
    area: str
    what: str
    attack: Deed
    control: Deed
    needs_gpus: bool = False
    needs_metrics: bool = False


ATTACKS: list[Attack] = []


def add(area: str, name: str, what: str, attack: Deed, control: Deed, **needs: bool) -> None:
    """Put an attack into the table."""
    ATTACKS.append(Attack(name, area, what, attack, control, **needs))


# On the node: the attacker's job runs beside the victim's, outside of any container; the control is made by
# the victim within the job.


def on_node(area: str, name: str, what: str, move: str, arguments: Arguments, **more: Any) -> None:
    """The same move by the attacker beside the job, and by the victim in it."""
    add(
        area,
        name,
        what,
        lambda s: s.attacker_node.make(move, **arguments(s)),
        lambda s: s.victim_node.make(move, **arguments(s)),
        **more,
    )


def on_head(area: str, name: str, what: str, move: str, arguments: Arguments) -> None:
    """The same move by both on the head."""
    add(
        area,
        name,
        what,
        lambda s: s.attacker_head.make(move, **arguments(s)),
        lambda s: s.victim_head.make(move, **arguments(s)),
    )


AREA = "The job's secrets"
for file in (
    "environment.json",
    "spec.json",
    "fabric.key",
    "fabric.pem",
    "files/singleuser.key",
    "output.log",
):
    on_node(
        AREA,
        f"file {file}",
        f"reads {file} of the job's private folder",
        "read",
        lambda s, file=file: {"path": f"{s.victim.folder}/{file}"},
    )
on_head(
    AREA,
    "private folder",
    "lists the job's private folder on the head",
    "enter",
    lambda s: {"path": s.victim.folder},
)
on_head(
    AREA,
    "folder of jobs",
    "lists the folder that holds the victim's job folders",
    "enter",
    lambda s: {"path": s.victim.folder.rpartition("/")[0]},
)
on_node(
    AREA,
    "environ",
    "reads the server's environment in /proc",
    "read",
    lambda s: {"path": f"/proc/{s.server_pid}/environ"},
)
on_node(
    AREA,
    "descriptors",
    "lists the server's open files in /proc",
    "enter",
    lambda s: {"path": f"/proc/{s.server_pid}/fd"},
)
add(
    AREA,
    "secrets in arguments",
    "looks for the victim's token, key and session's title in all command lines of the node",
    lambda s: s.attacker_node.make("arguments_with", user=s.victim.name, texts=secrets_of(s)),
    # The victim finds in command lines what is no secret: so looking works.
    lambda s: s.victim_node.make("arguments_with", user=s.victim.name, texts=["singleuser", s.victim.folder]),
)
for program, arguments in {
    "scontrol show job": ["scontrol", "--details", "--details", "show", "job"],
    "squeue": ["squeue", "--all", "--noheader", "--format=%A %j %k %Z %o"],
    "sacct": [
        "sacct",
        "--allusers",
        "--allocations",
        "--noheader",
        "--parsable2",
        "--format=JobIDRaw,JobName,WorkDir",
    ],
    "sstat": ["sstat", "--allsteps", "--noheader", "--format=JobID", "--jobs"],
}.items():
    on_head(
        AREA,
        program,
        f"looks for the victim's job with {program}",
        "run",
        lambda s, program=program, arguments=arguments: {
            "arguments": [*arguments, *([str(s.job_id)] if program == "sstat" else [])],
            "texts": [f"session-{s.victim.session}"] if program != "sstat" else [f"{s.job_id}."],
        },
    )
on_head(
    AREA,
    "batch script",
    "asks Slurm for the job's script",
    "run",
    lambda s: {
        "arguments": ["scontrol", "write", "batch_script", str(s.job_id), "-"],
        "texts": ["carme-job"],
    },
)
add(
    AREA,
    "secrets in Slurm",
    "looks for the victim's token, key and title in all that Slurm says about the job, even to its owner",
    lambda s: s.victim_head.make(
        "run",
        arguments=["sh", "-c", f"scontrol -dd show job {s.job_id}; scontrol write batch_script {s.job_id} -"],
        texts=secrets_of(s),
    ),
    lambda s: s.victim_head.make(
        "run", arguments=["scontrol", "show", "job", str(s.job_id)], texts=[f"session-{s.victim.session}"]
    ),
)
add(
    AREA,
    "secrets in logs",
    "looks for the victim's token and key in the job's log, even as its owner",
    lambda s: s.victim_head.make(
        "run", arguments=["cat", f"{s.victim.folder}/output.log"], texts=secrets_of(s)
    ),
    lambda s: s.victim_head.make("run", arguments=["cat", f"{s.victim.folder}/output.log"], texts=["http"]),
)


def secrets_of(scene: Scene) -> list[str]:
    """What nobody but the victim may read anywhere."""
    key = scene.victim_node.ask("run", arguments=["cat", f"{scene.victim.folder}/fabric.key"], texts=[])[1]
    return [scene.victim.token, key.rpartition("said: ")[2].strip()]


AREA = "The node"
on_node(
    AREA,
    "/tmp",
    "reads a file of the victim's in /tmp",
    "find_text",
    lambda s: {"path": "/tmp/carme-two-users", "text": s.secret},
)
on_node(
    AREA,
    "/dev/shm",
    "reads a file of the victim's in /dev/shm",
    "find_text",
    lambda s: {"path": "/dev/shm/carme-two-users", "text": s.secret},
)
on_node(
    AREA,
    "/tmp by /proc",
    "reads the victim's /tmp by way of the server's /proc/PID/root",
    "enter",
    lambda s: {"path": f"/proc/{s.server_pid}/root/tmp"},
)
add(
    AREA,
    "/tmp by its true place",
    "looks for the victim's /tmp where Slurm keeps it",
    lambda s: s.attacker_node.make("enter", path=f"/var/lib/slurm/job-tmp/{s.job_id}"),
    lambda s: s.victim_node.make("enter", path="/tmp"),
)
on_node(
    AREA,
    "GPUs",
    "opens the GPUs of the victim's job",
    "devices",
    lambda s: {"paths": s.victims_gpus},
    needs_gpus=True,
)
on_node(
    AREA,
    "processes",
    "looks at the command lines of the victim's processes",
    "processes_of",
    lambda s: {"user": s.victim.name},
)
on_node(
    AREA, "signals", "sends signals to the victim's server", "send_signal", lambda s: {"pid": s.server_pid}
)
add(
    AREA,
    "debugger",
    "attaches to the victim's server as a debugger does",
    lambda s: s.attacker_node.make("trace", pid=s.server_pid),
    # Attaching stops a server for a moment, and some sites forbid it for all but one's children.
    lambda s: s.attacker_node.make("own_child_traced"),
)
on_node(AREA, "memory", "opens the memory of the victim's server", "memory", lambda s: {"pid": s.server_pid})
for name, what, command in (
    (
        "step in the job",
        "runs a program inside the victim's job",
        ["srun", "--jobid=JOB", "--overlap", "--ntasks=1", "id"],
    ),
    (
        "change the job",
        "changes the job's time limit by Slurm",
        ["scontrol", "update", "JobId=JOB", "TimeLimit=-1"],
    ),
):
    add(
        AREA,
        name,
        what,
        lambda s, c=command: s.attacker_head.make(
            "run", arguments=[w.replace("JOB", str(s.job_id)) for w in c], texts=[]
        ),
        lambda s, c=command: s.victim_head.make(
            "run", arguments=[w.replace("JOB", str(s.job_id)) for w in c], texts=[]
        ),
    )
add(
    AREA,
    "cancel by Slurm",
    "cancels the victim's job by scancel",
    # scancel says nothing and ends well when it may not: whether the job lives is what counts.
    lambda s: (
        s.attacker_head.make("run", arguments=["scancel", str(s.job_id)], texts=[])[1:] and not lives(s),
        "scancel was run; the job " + ("lives" if lives(s) else "is gone"),
    ),
    lambda s: cancelled(
        s, s.victim, lambda job: s.victim_head.make("run", arguments=["scancel", str(job)], texts=[])
    ),
)
for whom in ("victim", "root"):
    add(
        AREA,
        f"sbatch as {whom}",
        f"submits a job as {'the victim' if whom == 'victim' else 'root'} with sbatch --uid",
        lambda s, whom=whom: s.attacker_head.make(
            "run",
            arguments=[
                "sbatch",
                f"--uid={s.victim.account.uid if whom == 'victim' else 0}",
                "--test-only",
                "--chdir=/",
                "--wrap=true",
            ],
            texts=["to start at"],
        ),
        lambda s: s.attacker_head.make(
            "run", arguments=["sbatch", "--test-only", "--chdir=/", "--wrap=true"], texts=["to start at"]
        ),
    )


def lives(scene: Scene) -> bool:
    """Whether the victim's session runs on."""
    return BrokerClient(scene.settings.broker.socket).job(scene.job_id).is_active


def cancelled(scene: Scene, player: Player, cancel: Callable[[int], Outcome]) -> Outcome:
    """Whether a user can end a small job of their own in this way."""
    client = BrokerClient(scene.settings.broker.socket)
    # It does not end by itself while it is waited for.
    job = client.submit(small_job(command=["sleep", "600"], minutes=10), user=player.name)
    said = cancel(job)[1]
    if once_over(client, job):
        return True, f"a job of their own was cancelled; {said}"
    client.cancel(job)
    return False, said


def once_over(client: BrokerClient, job_id: int) -> Job | None:
    """A small job once it is over; None if it is not after longer than a busy cluster takes."""
    end = time.monotonic() + JOB_SECONDS
    while not (job := client.job(job_id)).is_over:
        if time.monotonic() > end:
            return None
        time.sleep(0.2)
    return job


def small_job(**changes: Any) -> JobRequest:
    """A job that waits a minute."""
    values = {
        "name": "security check",
        "kind": "batch",
        "image": None,
        "command": ["sleep", "60"],
        "minutes": 1,
    }
    return JobRequest(**(values | changes))


AREA = "Sockets and ports"
on_node(
    AREA,
    "agent's socket",
    "connects to the agent's Unix socket",
    "connect_unix",
    lambda s: {"path": f"{s.private}/agent.sock"},
)
on_node(
    AREA,
    "agent's socket by /proc",
    "connects to it by way of /proc/PID/root",
    "connect_unix",
    lambda s: {"path": f"/proc/{s.server_pid}/root{s.private}/agent.sock"},
)
on_node(
    AREA,
    "apps' folder",
    "looks into the folder with the sockets of the session's apps",
    "enter",
    lambda s: {"path": f"/proc/{s.server_pid}/root{s.private}"},
)
add(
    AREA,
    "other ports",
    "connects to every other port of the victim's programs, such as those of kernels",
    lambda s: kernels_ports(s),
    lambda s: s.victim_node.make("other_ports", user=s.victim.name, known=[]),
)


def kernels_ports(scene: Scene) -> Outcome:
    """With a kernel at work: by default those talk over ports that all users of a node can reach."""
    known = [scene.server[1], scene.agent[1]]
    url = scene.settings.site.url + scene.victim.base
    with scene.victim.visitor.kernel(url) as kernel:
        kernel.run("1 + 1", timeout=60)
        return scene.attacker_node.make("other_ports", user=scene.victim.name, known=known)


AREA = "The job fabric"


def to_agent(who: Callable[[Scene], Player] | None, **more: Any) -> Arguments:
    """Arguments of `talk` with the victim's agent, with the certificate of one of the two."""

    def arguments(scene: Scene) -> dict[str, Any]:
        pem = f"{who(scene).folder}/fabric.pem" if who else ""
        return {"host": scene.agent[0], "port": scene.agent[1], "certificate": pem, **more}

    return arguments


VICTIM: Callable[[Scene], Player] = attrgetter("victim")
ATTACKER: Callable[[Scene], Player] = attrgetter("attacker")
HELLO = (b'{"protocol": "carme-fabric-1", "challenge": "' + b"00" * 32 + b'"}\n').hex()
for name, what, deed in (
    ("without certificate", "speaks TLS with the agent and shows no certificate", to_agent(None)),
    ("own certificate", "shows the agent the certificate of the attacker's own job", to_agent(ATTACKER)),
    ("without TLS", "greets the agent without TLS", to_agent(None, tls=False, send=HELLO)),
    ("garbage", "sends the agent a megabyte of garbage", to_agent(None, tls=False, send="ff" * 1_000_000)),
):
    add(
        AREA,
        name,
        what,
        lambda s, deed=deed: s.attacker_node.make("talk", **deed(s)),
        lambda s: s.victim_node.make("talk", **to_agent(VICTIM)(s)),
    )


AREA = "The notebook server"


def by_door(scene: Scene, path: str, **more: Any) -> Outcome:
    """A request at the site's own address, sent exactly as it is written."""
    site = urlsplit(scene.settings.site.url)
    return moves.http(site.hostname or "", site.port or 443, path, **more)


def as_browser(player: Player, path: str) -> dict[str, str]:
    """The headers of a request that a user's browser sends to a path."""
    return {"Cookie": player.cookies(path)}


def api(scene: Scene) -> str:
    """An address of the victim's server that only the victim may read."""
    return f"{scene.victim.base}api/contents"


def victim_reads(scene: Scene) -> Outcome:
    """The victim's own browser at that address."""
    return by_door(scene, api(scene), headers=as_browser(scene.victim, api(scene)), text='"path"')


def certificate_of(player: Player) -> dict[str, str]:
    """The certificate of a user's own server, which lies in their job's folder."""
    folder = f"{player.folder}/files"
    return {"certificate": f"{folder}/singleuser.crt", "key": f"{folder}/singleuser.key"}


FORGED = {
    "X-Forwarded-For": "127.0.0.1",
    "X-Forwarded-Proto": "https",
    "X-Forwarded-Host": "localhost",
    "X-Forwarded-User": "VICTIM",
    "X-Remote-User": "VICTIM",
    "Remote-User": "VICTIM",
    "X-Real-IP": "127.0.0.1",
    "X-Original-URI": "/",
    "Forwarded": "for=127.0.0.1;proto=https",
}


def forged(scene: Scene) -> dict[str, str]:
    """Headers that pretend to come from the proxy, for the victim."""
    return {name: value.replace("VICTIM", scene.victim.name) for name, value in FORGED.items()}


def directly(**more: Callable[[Scene], Any]) -> Deed:
    """A request to the victim's port from the attacker's job on the same node."""
    return lambda s: s.attacker_node.make(
        "http", host=s.server[0], port=s.server[1], path=api(s), **{k: make(s) for k, make in more.items()}
    )


def with_own_certificate(**more: Callable[[Scene], Any]) -> Deed:
    """The same with the certificate of the attacker's own server."""
    return directly(
        certificate=lambda s: certificate_of(s.attacker)["certificate"],
        key=lambda s: certificate_of(s.attacker)["key"],
        **more,
    )


def token(player: Player) -> dict[str, str]:
    """The header with a session's own token."""
    return {"Authorization": f"token {player.token}"}


for name, what, deed in (
    ("port, plain", "asks the victim's port without TLS", directly(tls=lambda s: False)),
    ("port, no certificate", "asks the victim's port without a certificate", directly()),
    (
        "port, own certificate",
        "asks it with the certificate of the attacker's own server",
        with_own_certificate(),
    ),
    (
        "port, own token",
        "asks it with that certificate and the attacker's own hub token",
        with_own_certificate(headers=lambda s: token(s.attacker)),
    ),
    (
        "port, forged headers",
        "asks it with that certificate and headers that pretend to be the proxy, for the victim",
        with_own_certificate(headers=forged),
    ),
    (
        "port, the victim's certificate name",
        "asks without certificate but with the victim's host name and cookies of the attacker's",
        directly(headers=lambda s: as_browser(s.attacker, api(s)) | {"Host": s.victim.session}),
    ),
):
    add(AREA, name, what, deed, victim_reads)

for name, what, headers in (
    (
        "proxy, own cookies",
        "reads files through the site's door with the attacker's cookies",
        lambda s: as_browser(s.attacker, api(s)),
    ),
    (
        "proxy, cookies of own server",
        "does so with the cookies of the attacker's own server",
        lambda s: as_browser(s.attacker, s.attacker.base),
    ),
    ("proxy, own token", "does so with the attacker's hub token", lambda s: token(s.attacker)),
    (
        "proxy, cookies and token",
        "does so with the attacker's cookies and hub token",
        lambda s: as_browser(s.attacker, api(s)) | token(s.attacker),
    ),
    (
        "proxy, forged headers",
        "does so with forged headers",
        lambda s: as_browser(s.attacker, api(s)) | forged(s),
    ),
    ("proxy, nobody", "does so without any cookie", lambda s: {}),
):
    add(
        AREA,
        name,
        what,
        lambda s, headers=headers: by_door(s, api(s), headers=headers(s), text='"path"'),
        victim_reads,
    )
add(
    AREA,
    "proxy, token in the address",
    "does so with the attacker's hub token in the address",
    lambda s: by_door(s, f"{api(s)}?token={s.attacker.token}", text='"path"'),
    victim_reads,
)
add(
    AREA,
    "proxy, terminal",
    "opens a terminal on the victim's server through the door",
    lambda s: by_door(
        s,
        f"{s.victim.base}api/terminals",
        method="POST",
        headers=as_browser(s.attacker, api(s)) | token(s.attacker),
    ),
    victim_reads,
)
add(
    AREA,
    "proxy, WebSocket",
    "opens a WebSocket of the victim's server through the door",
    lambda s: websocket(s, s.attacker),
    lambda s: websocket(s, s.victim),
)
add(
    AREA,
    "proxy, from the head",
    "asks JupyterHub's proxy itself, past the site's door, on the head",
    lambda s: s.attacker_head.make(
        "http",
        host="127.0.0.1",
        port=8000,
        path=api(s),
        tls=False,
        text='"path"',
        headers=as_browser(s.attacker, api(s)) | token(s.attacker) | forged(s),
    ),
    victim_reads,
)
add(
    AREA,
    "proxy's routes",
    "asks the proxy's own interface on the head for its routes",
    lambda s: moves_any(
        s.attacker_head.make(
            "http", host="127.0.0.1", port=8001, path="/api/routes", tls=False, headers=token(s.attacker)
        ),
        s.attacker_head.make(
            "http", host="127.0.0.1", port=8001, path="/api/routes", headers=token(s.attacker)
        ),
    ),
    victim_reads,
)


def moves_any(*outcomes: Outcome) -> Outcome:
    """Several tries at the same thing: reached when one was."""
    return any(reached for reached, _ in outcomes), "; ".join(dict.fromkeys(said for _, said in outcomes))


def websocket(scene: Scene, player: Player) -> Outcome:
    """Open the socket on which the server tells what happens."""
    path = f"{scene.victim.base}api/events/subscribe"
    handshake = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
        "Origin": scene.settings.site.url,
        "Host": urlsplit(scene.settings.site.url).netloc,
    }
    return by_door(scene, path, headers=as_browser(player, path) | handshake)


AREA = "The door"
CONFUSING = (
    "/jupyter/user/ATTACKER/%2e%2e/VICTIM/REST",
    "/jupyter/user/ATTACKER/..%2fVICTIM/REST",
    "/jupyter/user/ATTACKER%2f..%2fVICTIM/REST",
    "/jupyter/user/ATTACKER/../VICTIM/REST",
    "/jupyter/user/ATTACKER\\..\\VICTIM/REST",
    "/jupyter/user/ATTACKER%5c..%5cVICTIM/REST",
    "/jupyter/user/./VICTIM/REST",
    "/jupyter/user//VICTIM/REST",
    "/jupyter//user/VICTIM/REST",
    "//jupyter/user/VICTIM/REST",
    "/jupyter/%75ser/VICTIM/REST",
    "/jupyter/%2575ser/VICTIM/REST",
    "/jupyter/hub/../user/VICTIM/REST",
    "/jupyter/hub/..%2fuser/VICTIM/REST",
    "/jupyter/hub\\..\\user\\VICTIM/REST",
    "/static/../jupyter/user/VICTIM/REST",
    "/static/..%2fjupyter/user/VICTIM/REST",
    "/jupyter/user/VICTIM%00/REST",
    "/jupyter/user/ATTACKER/#/../VICTIM/REST",
    "/jupyter/user/ATTACKER/?/../VICTIM/REST",
    "/jupyter/user/ATTACKER;/../VICTIM/REST",
)


def confusing(scene: Scene, whose: Player, server: Player, rest: str, text: str) -> Outcome:
    """Try each spelling of an address of `server` that could pass for one of `whose`."""
    reached, statuses = [], set()
    for spelling in CONFUSING:
        path = spelling.replace("ATTACKER", whose.name).replace("VICTIM", server.name).replace("REST", rest)
        headers = as_browser(whose, f"/jupyter/user/{whose.name}/") | as_browser(whose, whose.base)
        got, said = by_door(scene, path, headers=headers, text=text)
        statuses.add(said)
        if got:
            reached.append(spelling)
    return bool(reached), "reached by " + ", ".join(reached) if reached else ", ".join(sorted(statuses))


def rest_of(player: Player, tail: str) -> str:
    """What follows the user's name in the address of a server."""
    return player.base.split(f"/{player.name}/", 1)[1] + tail


add(
    AREA,
    "spellings of the victim's address",
    "reaches the victim's server by addresses that nginx, the proxy and the portal could read differently",
    lambda s: confusing(s, s.attacker, s.victim, rest_of(s.victim, "api/contents"), '"path"'),
    victim_reads,
)
add(
    AREA,
    "question to the portal",
    "asks from outside what only nginx may ask",
    lambda s: moves_any(
        *(
            by_door(s, path, headers=as_browser(s.attacker, "/") | {"X-Original-URI": s.attacker.base})
            for path in ("/internal/enter", "//internal/enter", "/%69nternal/enter", "/x/..%2finternal/enter")
        )
    ),
    victim_reads,
)
add(
    AREA,
    "signed out",
    "uses a copy of the victim's cookies after the victim has signed out",
    lambda s: signed_out(s, leave=True),
    lambda s: signed_out(s, leave=False),
)


def signed_out(scene: Scene, leave: bool) -> Outcome:
    """Use a browser's cookies, after its owner has signed out there or not."""
    with scene.another_browser(scene.victim) as visitor:
        owner = Player(scene.victim.account, "", visitor)
        headers = as_browser(owner, api(scene))
        by_door(scene, api(scene), headers=headers)  # so that nginx may remember the yes
        if leave:
            scene.sign_out(visitor)
        return by_door(scene, api(scene), headers=headers, text='"path"')


add(
    AREA,
    "signed out, kernel open",
    "goes on computing over a connection to a kernel that was opened before the victim signed out",
    lambda s: kernel_after(s, leave=True),
    lambda s: kernel_after(s, leave=False),
)


def kernel_after(scene: Scene, leave: bool) -> Outcome:
    """Run a cell over an open connection, after its owner has signed out there or not."""
    server = urljoin(scene.settings.site.url, scene.victim.base)
    with scene.another_browser(scene.victim) as visitor, visitor.kernel(server) as kernel:
        kernel.run("40 + 1", timeout=60)
        if leave:
            scene.sign_out(visitor)
        try:
            said = kernel.run("40 + 2", timeout=60).output
        except ChannelClosed as closed:
            said = str(closed)
    return "42" in said, said


AREA = "The victim's origin"


def evil(player: Player) -> str:
    """The address of the page that the attacker's server gives to everybody."""
    return f"{player.base.rstrip('/')}{EVIL}"


def attacker_sees_it(scene: Scene) -> Outcome:
    """The attacker's own browser gets the page, so the page is really there."""
    path = evil(scene.attacker)
    return by_door(scene, path, headers=as_browser(scene.attacker, path), text=EVIL_TEXT)


add(
    AREA,
    "page of the attacker's",
    "leads the victim's browser to a page that the attacker's server delivers without asking who comes",
    lambda s: by_door(
        s,
        evil(s.attacker),
        headers=as_browser(s.victim, evil(s.attacker)) | {"Sec-Fetch-Mode": "navigate"},
        text=EVIL_TEXT,
    ),
    attacker_sees_it,
)
add(
    AREA,
    "page by another spelling",
    "leads it there by addresses that look like the victim's own",
    lambda s: confusing(s, s.victim, s.attacker, rest_of(s.attacker, EVIL.lstrip("/")), EVIL_TEXT),
    attacker_sees_it,
)
add(
    AREA,
    "page to nobody",
    "leads a browser there in which nobody is signed in",
    lambda s: by_door(s, evil(s.attacker), headers={"Sec-Fetch-Mode": "navigate"}, text=EVIL_TEXT),
    attacker_sees_it,
)
add(
    AREA,
    "portal's cookie",
    "lets a notebook server read the cookie with which its visitor is signed in to the portal",
    lambda s: by_door(
        s, evil(s.attacker), headers=as_browser(s.attacker, evil(s.attacker)), text="__Host-carme-session="
    ),
    lambda s: by_door(
        s,
        evil(s.attacker),
        headers={"Cookie": as_browser(s.attacker, evil(s.attacker))["Cookie"] + "; carme-probe=1"},
        text="carme-probe=1",
    ),
)


add(
    AREA,
    "cookies and scripts",
    "reads a cookie with which the victim is signed in by a script, without TLS, or from another site",
    lambda s: loose_cookies(s),
    lambda s: (
        any(name.startswith("__Host-") for name in sign_in_cookies(s)),
        f"the victim has {', '.join(sign_in_cookies(s))}",
    ),
)


def sign_in_cookies(scene: Scene) -> dict[str, Any]:
    """The victim's cookies that a thief would want; `_xsrf` is made for scripts."""
    wanted = ("session", "login", "jupyterhub-user")
    jar = scene.victim.visitor.http.cookies.jar
    return {cookie.name: cookie for cookie in jar if any(word in cookie.name for word in wanted)}


def loose_cookies(scene: Scene) -> Outcome:
    """Those that scripts can read, that go over the wire without TLS, or that other sites may have sent."""
    loose = []
    for name, cookie in sign_in_cookies(scene).items():
        if not cookie.has_nonstandard_attr("HttpOnly") or not cookie.secure:
            loose.append(name)
        if cookie.get_nonstandard_attr("SameSite") not in ("Lax", "Strict"):
            loose.append(name)
    return bool(loose), f"not closed: {', '.join(loose)}" if loose else "HttpOnly, Secure, SameSite"


AREA = "The hub"
HUB_API = "/jupyter/hub/api"


def hub(method: str, path: str, body: str = "", text: str = "") -> Deed:
    """A request to the hub's interface with all that the attacker has: cookies, token, certificate."""

    def deed(scene: Scene) -> Outcome:
        where = (
            f"{HUB_API}{path.replace('VICTIM', scene.victim.name).replace('SESSION', scene.victim.session)}"
        )
        found = {"method": method, "body": body_of(scene, body), "text": text}
        json_body = {"Content-Type": "application/json"}
        hub_address = urlsplit(scene.settings.hub.listen)
        return moves_any(
            by_door(
                scene,
                where,
                headers=as_browser(scene.attacker, where) | token(scene.attacker) | json_body,
                **found,
            ),
            by_door(scene, where, headers=as_browser(scene.attacker, where) | json_body, **found),
            scene.attacker_node.make(
                "http",
                host=hub_address.hostname,
                port=hub_address.port,
                path=where,
                headers=token(scene.attacker) | json_body,
                **found,
                **certificate_of(scene.attacker),
            ),
            scene.attacker_node.make(
                "http",
                host=hub_address.hostname,
                port=hub_address.port,
                path=where,
                tls=False,
                headers=token(scene.attacker) | json_body,
                **found,
            ),
        )

    return deed


def body_of(scene: Scene, body: str) -> str:
    """A body with the victim's address and names in it."""
    return (
        body.replace("HOST", scene.server[0])
        .replace("PORT", str(scene.server[1]))
        .replace("VICTIM", scene.victim.name)
        .replace("SESSION", scene.victim.session)
    )


def own_record(scene: Scene) -> Outcome:
    """What a token may do: its owner's own record."""
    path = f"{HUB_API}/user"
    return by_door(scene, path, headers=token(scene.victim), text=scene.victim.name)


for name, what, deed in (
    ("victim's record", "reads the victim's record", hub("GET", "/users/VICTIM")),
    ("all users", "lists all users", hub("GET", "/users")),
    ("stop", "stops the victim's server", hub("DELETE", "/users/VICTIM/servers/SESSION")),
    ("token", "makes a token of the victim's", hub("POST", "/users/VICTIM/tokens", "{}")),
    (
        "share",
        "shares the victim's server with the attacker",
        hub("POST", "/shares/VICTIM/SESSION", '{"user": "VICTIM"}'),
    ),
    ("admin", "makes the attacker an administrator", hub("PATCH", "/users/VICTIM", '{"admin": true}')),
    (
        "spawner's attributes",
        "sets any attribute of a spawner, such as the command that ends its job",
        hub("POST", "/batchspawner", '{"batch_cancel_cmd": "touch /tmp/carme-was-here", "port": PORT}'),
    ),
    (
        "ready elsewhere",
        "reports the victim's address as that of the attacker's own server",
        hub("POST", "/carme/ready", '{"port": PORT, "host": "HOST", "pid": 1, "marks": {}}'),
    ),
    (
        "ready for another",
        "reports for the victim's server",
        hub(
            "POST",
            "/carme/ready",
            '{"port": PORT, "host": "HOST", "pid": 1, "marks": {}, "user": "VICTIM", "server": "SESSION"}',
        ),
    ),
    (
        "activity for another",
        "reports activity for the victim's server",
        hub(
            "POST",
            "/carme/activity",
            '{"busy_since_last": true, "kernels": null, "terminals": null, "gpus": null, '
            '"ranks": null, "user": "VICTIM", "server": "SESSION"}',
        ),
    ),
    (
        "extend for another",
        "prolongs the victim's server",
        hub("POST", "/carme/extend", '{"minutes": 1, "user": "VICTIM", "server": "SESSION"}'),
    ),
    (
        "activity of the hub's",
        "says that the victim's server was active, by JupyterHub's own interface",
        hub(
            "POST",
            "/users/VICTIM/activity",
            '{"servers": {"SESSION": {"last_activity": "2030-01-01T00:00:00Z"}}}',
        ),
    ),
):
    add(AREA, name, what, deed, own_record)


AREA = "The portal"


def page(path: str) -> tuple[Deed, Deed]:
    """A page of the victim's, by the attacker and by the victim."""

    def by(player: Callable[[Scene], Player]) -> Deed:
        def deed(scene: Scene) -> Outcome:
            where = path.replace("SESSION", scene.victim.session).replace("JOB", str(scene.job_id))
            return by_door(scene, where, headers=as_browser(player(scene), where))

        return deed

    return by(ATTACKER), by(VICTIM)


for name, what, path in (
    ("session's page", "opens the victim's session's page", "/sessions/SESSION/"),
    ("session's live page", "opens its live part", "/sessions/SESSION/live/"),
    ("stop page", "opens the page that stops it", "/sessions/SESSION/stop/"),
    ("job's page", "opens the page of the victim's job, with its log", "/jobs/JOB/"),
    ("job's use", "opens what the victim's job used", "/jobs/JOB/use/"),
):
    add(AREA, name, what, *page(path))
for name, what, path in (
    ("stop", "sends the form that stops the victim's session", "/sessions/SESSION/stop/"),
    ("extend", "sends the form that prolongs it", "/sessions/SESSION/extend/"),
):
    add(AREA, name, what, lambda s, path=path: sent_form(s, path), page("/sessions/SESSION/")[1])


def sent_form(scene: Scene, path: str) -> Outcome:
    """Send a form as the attacker, with the attacker's own valid token against forgery."""
    visitor = scene.attacker.visitor
    url = scene.settings.site.url
    start = visitor.form(visitor.fetch(url), "gpus_per_node")
    form_token = start.select_one('[name="csrfmiddlewaretoken"]')
    assert form_token
    answer = visitor.http.post(
        url + path.replace("SESSION", scene.victim.session),
        data={"csrfmiddlewaretoken": str(form_token["value"]), "minutes": "1"},
        headers={"Referer": url + "/"},
        follow_redirects=False,
    )
    return answer.status_code < 400 or not lives(scene), f"status {answer.status_code}"


AREA = "Metrics"
#: Ways to ask for the series of a job, by who may not see them.
QUERIES = (
    'carme_job_info{jobid="JOB"}',
    '{user="VICTIM"}',
    '{jobid=~".+"}',
    'carme_job_info or carme_job_info{user="VICTIM"}',
    'max_over_time(carme_job_info{jobid="JOB"}[10m:30s])',
    'carme_job_info{user="ATTACKER"} or on () carme_job_info{jobid="JOB"}',
    'carme_job_info{user="ATTACKER\\"} or carme_job_info{user=\\"VICTIM"}',
)


def series(scene: Scene, player: Player, scope: str) -> Outcome:
    """Look for the victim's job in what the portal tells of metrics."""
    outcomes = []
    for query in QUERIES:
        asked = query.replace("JOB", str(scene.job_id)).replace("VICTIM", scene.victim.name)
        asked = quote(asked.replace("ATTACKER", scene.attacker.name))
        for path in (f"query?query={asked}", f"series?match[]={asked}"):
            where = f"/metrics/{scope}/api/v1/{path}"
            outcomes.append(
                by_door(scene, where, headers=as_browser(player, where), text=f'"{scene.job_id}"')
            )
    return moves_any(*outcomes)


def own_series(scene: Scene) -> Outcome:
    """The victim asks the same about the victim's own jobs; the next scrape may be still to come."""
    end = time.monotonic() + 60
    while not (found := series(scene, scene.victim, "mine"))[0] and time.monotonic() < end:
        time.sleep(3)
    return found


for name, what, scope in (
    ("own series", "looks for the victim's job among the series of the attacker's own jobs", "mine"),
    (
        "account's series",
        "looks for it among those of the victim's account, which others manage",
        "account/ACCOUNT",
    ),
    ("all series", "looks for it among all series, which administrators may see", "all"),
):
    add(
        AREA,
        name,
        what,
        lambda s, scope=scope: series(
            s, s.attacker, scope.replace("ACCOUNT", s.victim.job.account if s.victim.job else "")
        ),
        own_series,
        needs_metrics=True,
    )
add(
    AREA,
    "Prometheus itself",
    "asks Prometheus, past the portal, on the head",
    lambda s: moves_any(
        *(
            s.attacker_head.make("http", host="127.0.0.1", port=9090, path="/api/v1/query?query=up", tls=tls)
            for tls in (True, False)
        )
    ),
    own_series,
    needs_metrics=True,
)
add(
    AREA,
    "exporter",
    "asks the exporter of the node, without and with the certificate of the attacker's own server",
    lambda s: moves_any(
        *(
            s.attacker_node.make("http", host=s.agent[0], port=9750, path="/metrics", **more)
            for more in ({}, {"tls": False}, certificate_of(s.attacker))
        )
    ),
    own_series,
    needs_metrics=True,
)


AREA = "The broker"


def ask(question: dict[str, Any], text: str = "") -> tuple[Deed, Deed]:
    """A question about the victim, by the attacker and by the victim."""

    def by(hand: str) -> Deed:
        def deed(scene: Scene) -> Outcome:
            filled = {
                key: {"JOB": scene.job_id, "SESSION": scene.victim.session, "VICTIM": scene.victim.name}.get(
                    str(value), value
                )
                for key, value in question.items()
            }
            seen = text.replace("SESSION", scene.victim.session)
            return getattr(scene, hand).make(
                "broker", path=str(scene.settings.broker.socket), question=filled, text=seen
            )

        return deed

    return by("attacker_head"), by("victim_head")


for name, what, question, text in (
    ("job", "reads the victim's job", {"method": "job", "job_id": "JOB"}, ""),
    ("log", "reads its log", {"method": "log", "job_id": "JOB"}, ""),
    ("session", "reads the victim's session", {"method": "session", "name": "SESSION"}, ""),
    ("jobs", "lists jobs as the victim", {"method": "jobs", "user": "VICTIM"}, ""),
    ("own jobs", "finds the victim's among the attacker's own jobs", {"method": "jobs"}, "session-SESSION"),
    ("history", "lists ended jobs as the victim", {"method": "history", "user": "VICTIM"}, ""),
    ("sessions", "lists sessions as the victim", {"method": "sessions", "user": "VICTIM"}, ""),
    ("events", "finds the victim's job among the news", {"method": "events"}, "session-SESSION"),
    ("extend", "prolongs the victim's session", {"method": "extend", "job_id": "JOB", "minutes": 1}, ""),
    (
        "extend as the victim",
        "does so in the victim's name",
        {"method": "extend", "job_id": "JOB", "minutes": 1, "user": "VICTIM"},
        "",
    ),
):
    add(AREA, name, what, *ask(question, text))
for name, question in (
    ("cancel", {"method": "cancel", "job_id": "JOB"}),
    ("cancel as the victim", {"method": "cancel", "job_id": "JOB", "user": "VICTIM"}),
):
    add(
        AREA,
        name,
        "cancels the victim's job" + (" in the victim's name" if "user" in question else ""),
        ask(question)[0],
        lambda s: cancelled(
            s,
            s.victim,
            lambda job: s.victim_head.make(
                "broker", path=str(s.settings.broker.socket), question={"method": "cancel", "job_id": job}
            ),
        ),
    )


def submitted(hand: str, user: str | None, **changes: Any) -> Deed:
    """Submit a job; one that is taken is ended again."""

    def deed(scene: Scene) -> Outcome:
        request = small_job(**changes).model_dump(mode="json")
        named = scene.victim.name if user == "VICTIM" else user
        question = {"method": "submit", "request": request, "user": named}
        reached, said = getattr(scene, hand).make(
            "broker", path=str(scene.settings.broker.socket), question=question
        )
        number = said.removeprefix("granted: ")
        if reached and number.isdecimal():
            BrokerClient(scene.settings.broker.socket).cancel(int(number))
        return reached, said

    return deed


for name, user in (
    ("submit as the victim", "VICTIM"),
    ("submit as root", "root"),
    ("submit as the hub", "carme-hub"),
):
    add(
        AREA,
        name,
        f"submits a job in the name of {user.lower() if user != 'VICTIM' else 'the victim'}",
        submitted("attacker_head", user),
        submitted("victim_head", "VICTIM"),
    )
add(
    AREA,
    "note",
    "tells the broker what only the hub may say: that the victim's session was lost",
    ask({"method": "note", "job_id": "JOB", "user": "VICTIM", "note": {}})[0],
    lambda s: moves.broker(
        str(s.settings.broker.socket), {"method": "job", "job_id": s.job_id, "user": s.victim.name}
    ),
)


AREA = "The command line"
CARME = "/opt/carme/venv/bin/carme"
for name, what, arguments, texts in (
    ("logs", "reads the victim's log", ["logs", "JOB"], []),
    ("jobs", "finds the victim's job in its list", ["jobs", "--all-states", "--json"], ["session-SESSION"]),
    ("session show", "shows the victim's session", ["session", "show", "SESSION"], []),
    ("session list", "finds it in the list of sessions", ["session", "list", "--json"], ["SESSION"]),
    ("session extend", "prolongs it", ["session", "extend", "SESSION", "1"], []),
):
    on_head(
        AREA,
        name,
        what,
        "run",
        lambda s, arguments=arguments, texts=texts: {
            "arguments": [
                CARME,
                *(w.replace("JOB", str(s.job_id)).replace("SESSION", s.victim.session) for w in arguments),
            ],
            "texts": [w.replace("SESSION", s.victim.session) for w in texts],
        },
    )
on_head(
    AREA,
    "session shell",
    "opens a shell in the victim's session",
    "run",
    lambda s: {
        "arguments": [CARME, "session", "shell", s.victim.session],
        "texts": [f"uid={s.victim.account.uid}"],
        "stdin": "id\nexit\n",
    },
)
for name, what, arguments in (
    ("cancel", "cancels the victim's job", ["cancel", "JOB"]),
    ("session stop", "stops the victim's session", ["session", "stop", "SESSION"]),
):
    add(
        AREA,
        name,
        what,
        lambda s, a=arguments: s.attacker_head.make(
            "run",
            arguments=[
                CARME,
                *(w.replace("JOB", str(s.job_id)).replace("SESSION", s.victim.session) for w in a),
            ],
            texts=[],
        ),
        lambda s: cancelled(
            s,
            s.victim,
            lambda job: s.victim_head.make("run", arguments=[CARME, "cancel", str(job)], texts=[]),
        ),
    )


AREA = "Names and paths"
for name, what, changes in (
    (
        "image by path",
        "names an image by a path out of the catalogue",
        {"image": "../../../etc/passwd", "kind": "session"},
    ),
    ("image, absolute", "names an image by an absolute path", {"image": "/etc/passwd", "kind": "session"}),
    (
        "image as option",
        "names an image like an option of a program",
        {"image": "--bind=/:/host", "kind": "session"},
    ),
    ("partition as option", "names a partition like an option of Slurm's", {"partition": "--uid=0"}),
    ("account as option", "names an account like an option of Slurm's", {"account": "x --uid=0"}),
    ("name with a path", "names a job like a path", {"name": "../../x"}),
    ("name with a line", "names a job with a line for a job script", {"name": "x\n#SBATCH --uid=0"}),
    ("workdir, relative", "names a working directory that is relative", {"workdir": "../../root"}),
    (
        "file with a path",
        "sends a file whose name leads out of the job's folder",
        {"files": {"../spec.json": "{}"}},
    ),
):
    add(
        AREA,
        name,
        what,
        lambda s, changes=changes: raw_submission(s, changes),
        lambda s: submitted("attacker_head", None)(s),
    )


def raw_submission(scene: Scene, changes: dict[str, Any]) -> Outcome:
    """Submit what our own models would refuse before it reaches the broker."""
    request = small_job().model_dump(mode="json") | changes
    reached, said = scene.attacker_head.make(
        "broker", path=str(scene.settings.broker.socket), question={"method": "submit", "request": request}
    )
    number = said.removeprefix("granted: ")
    if reached and number.isdecimal():
        BrokerClient(scene.settings.broker.socket).cancel(int(number))
    return reached, said


for name, what, path in (
    ("session's name", "asks the broker for a session by a path", "../../x"),
    ("session's name in SQL", "asks for a session by a piece of SQL", "x' OR '1'='1"),
):
    add(
        AREA,
        name,
        what,
        ask({"method": "session", "name": path})[0],
        ask({"method": "session", "name": "SESSION"})[1],
    )


def log_by_link(target: Callable[[Scene], str] | None) -> Deed:
    """Put a link into the place of an own job's log, or leave it, and have the broker read the log."""

    def deed(scene: Scene) -> Outcome:
        client = BrokerClient(scene.settings.broker.socket)
        job_id = client.submit(small_job(command=["echo", "harmless"]), user=scene.attacker.name)
        job = once_over(client, job_id) or client.job(job_id)
        if target:
            folder = f"{scene.attacker.account.home}/.local/share/carme/jobs/{job.key}"
            scene.attacker_head.ask("link", target=target(scene), path=f"{folder}/output.log")
        reached, said = scene.attacker_head.make(
            "broker", path=str(scene.settings.broker.socket), question={"method": "log", "job_id": job_id}
        )
        return reached and '"text": ""' not in said, said

    return deed


for name, what, target in (
    (
        "log by link, victim",
        "replaces an own job's log by a link to the victim's",
        lambda s: f"{s.victim.folder}/output.log",
    ),
    ("log by link, root", "replaces it by a link to what root alone may read", lambda s: "/etc/shadow"),
    (
        "log by link, secret",
        "replaces it by a link to a secret of the hub's",
        lambda s: str(s.settings.secrets.directory / "hub-api-token"),
    ),
):
    add(AREA, name, what, log_by_link(target), log_by_link(None))


def workdir_of_the_victim(scene: Scene) -> Outcome:
    """A job whose working directory is a link to the victim's home, as the attacker."""
    link = f"{scene.attacker.account.home}/carme-way-in"
    scene.attacker_head.ask("link", target=scene.victim.account.home, path=link)
    try:
        return job_says(scene, scene.attacker, workdir=link, command=["ls", ".local/share/carme"])
    finally:
        scene.attacker_head.ask("remove", path=link)


def job_says(scene: Scene, player: Player, **changes: Any) -> Outcome:
    """Whether a job ends well and prints something."""
    client = BrokerClient(scene.settings.broker.socket)
    job_id = client.submit(small_job(**changes), user=player.name)
    job = once_over(client, job_id)
    if job is None:
        raise CarmeError(f"Job {job_id} of {player.name} did not end.")
    text = client.log(job_id, user=player.name).text.strip()
    return job.exit_code == 0 and bool(text), text.splitlines()[-1][:160] if text else str(job.state)


add(
    AREA,
    "workdir by link",
    "runs a job in a working directory that is a link to the victim's home",
    workdir_of_the_victim,
    lambda s: job_says(s, s.victim, workdir=s.victim.account.home, command=["ls", ".local/share/carme"]),
)
