"""Stands in for squeue, sbatch, sacct, sacctmgr, scontrol, scancel and sinfo: one file under
seven names.

The folder beside it, `state`, holds what it knows: `jobs.json` (records by field), `accounting.json`,
`accounts.json` (who may use which account, and its limits), `nodes`, `partitions`, `reservations`,
`licenses`, `associations` (of users), `config` and `limits` if there are any, `private` if users may see no
job but their own, with the partitions that are hidden, `late.json` if there are jobs that squeue's long form
lacks (by id: `submitted`, or `ended` if it does not know them by their ids either), and, to make a program
fail, `fail-NAME` with what it writes to standard error.
Every call is written to `calls`, as a literal of Python.

A broker asks it some ten times a second, and most of its time would be that of imports: what is queried often
does without.
"""

from __future__ import annotations

import fcntl
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

state = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "state")
name = os.path.basename(sys.argv[0])
words = [word.removeprefix("--").partition("=") for word in sys.argv[1:] if word.startswith("--")]
options: dict[str, str] = {key: value for key, _, value in words}
# Before the lock: who closes our input may be waiting for it.
stdin = "" if sys.stdin.isatty() else sys.stdin.read()
lock = open(os.path.join(state, "lock"), "a")  # noqa: SIM115  until the end
fcntl.flock(lock, fcntl.LOCK_EX)


def exists(file: str) -> bool:
    return os.path.exists(os.path.join(state, file))


def text_of(file: str, otherwise: str = "") -> str:
    """The content of a file, or another text if it does not exist."""
    try:
        with open(os.path.join(state, file), encoding="utf-8") as opened:
            return opened.read()
    except FileNotFoundError:
        return otherwise


def write(file: str, text: str) -> None:
    with open(os.path.join(state, file), "w", encoding="utf-8") as opened:
        opened.write(text)


def values_of(file: str, otherwise: str = "{}"):
    """What the JSON in a file says."""
    text = text_of(file, otherwise)
    if "\\u" in text:  # only JSON joins the halves of a character
        import json

        return json.loads(text)
    return eval(text, {"null": None, "true": True, "false": False})


def save(file: str, values: object) -> None:
    import json

    write(file, json.dumps(values))


def count_of(tres: str) -> tuple[str, int] | None:
    """The type and the number of GPUs in `gres:gpu:a100:2` and the like."""
    prefix, *rest = tres.removeprefix("gres:").removeprefix("gres/").split(":")
    if prefix != "gpu" or not 1 <= len(rest) <= 2 or not rest[-1].isdigit():
        return None
    return "".join(rest[:-1]), int(rest[-1])


def megabytes_of(memory: str) -> tuple[int, bool] | None:
    """The megabytes of `4G`, `512M` or `2Gc`, and whether they are for each processor."""
    number, of_cpus = memory.removesuffix("c"), memory.endswith("c")
    unit = number[-1:] if number[-1:] in ("M", "G") else ""
    number = number.removesuffix(unit)
    return (int(number) * (1024 if unit == "G" else 1), of_cpus) if number.isdigit() else None


def allotted(job: dict) -> dict:
    """What squeue's long form prints of a job: what is given in it, else what follows from the short form."""
    nodes, cpus, memory = int(job.get("D", 1)), int(job.get("C", 0)), str(job.get("m", "0M"))
    gpus, size = count_of(str(job.get("b", ""))), megabytes_of(memory)
    whole = size[0] * (cpus if size[1] else nodes) if size else 0
    tres = f"cpu={cpus},mem={whole}M,node={nodes},billing={cpus}"
    if gpus:
        kind, total = gpus[0], gpus[1] * nodes
        tres += f",gres/gpu={total}" + (f",gres/gpu:{kind}={total}" if kind else "")
    long = {"JobID": job["A"], "RestartCnt": 0, "OverSubscribe": "OK", "NumNodes": nodes, "NumTasks": nodes}
    return long | {"tres-alloc": tres, "tres-per-node": job.get("b", "N/A")} | job


def records(rows: list[dict], fields: list[str], separator: str, whole: Callable[[dict], dict] = dict) -> str:
    lines = [whole(row) for row in rows]
    return "".join("".join(str(line.get(f, "")) + separator for f in fields) + "\n" for line in lines)


with open(os.path.join(state, "calls"), "a", encoding="utf-8") as calls:
    call = {"program": name, "arguments": sys.argv[1:], "stdin": stdin, "uid": os.getuid()}
    calls.write(ascii(call | {"environment": dict(os.environ), "cwd": os.getcwd()}) + "\n")
if exists(f"fail-{name}"):
    sys.exit(text_of(f"fail-{name}"))
jobs = values_of("jobs.json")
if name == "squeue" and (form := os.environ.get("SQUEUE_FORMAT")):
    first, second = form.split("%")[1:3]
    separator = first[1:]
    fields = [part[0] for part in form.split("%")[1:]]
    sys.stdout.write(records(jobs, fields, separator))
elif name == "squeue" and "helpFormat" in options:
    print("JobID  OverSubscribe  tres-alloc")
elif name == "squeue" and (form := os.environ.get("SQUEUE_FORMAT2")):
    # As 24.11 answers, with the total and each type of GPUs that the accounting counts.
    first, *_ = fields = [part.partition(":") for part in form.split(",")]
    late = values_of("late.json")
    if "jobs" in options:
        named = options["jobs"].split(",")
        listed = [job for job in jobs if str(job["A"]) in named and late.get(str(job["A"])) != "ended"]
        if not listed:
            sys.exit("slurm_load_jobs error: Invalid job id specified")
    else:
        listed = [job for job in jobs if str(job["A"]) not in late]
    sys.stdout.write(records(listed, [field for field, _, _ in fields], first[2], allotted))
elif name == "squeue":
    private = "exit_code" not in options["Format"] and exists("private")
    named = set(options["jobs"].split(",")) if "jobs" in options else None
    for job in jobs:
        listed = named is None or str(job["A"]) in named
        if listed and (not private or job["u"] == os.environ["USER"]):
            print(f"{job['A']:<20}{job.get('exit', 0):<20}")
elif name == "sacct":
    sys.stdout.write(
        records(values_of("accounting.json"), options["format"].split(","), options["delimiter"])
    )
elif name == "sacctmgr" and "runawayjobs" in sys.argv:
    known = {str(job["A"]) for job in jobs}
    accounts = values_of("accounting.json")
    for record in accounts:
        if record["State"] in ("PENDING", "RUNNING") and str(record["JobIDRaw"]) not in known:
            record |= {"State": "COMPLETED", "End": "1795181538"}
    save("accounting.json", accounts)
elif name == "sacctmgr" and "withcoordinator" in sys.argv:
    print("carme|\nphysics|ada,eva\nlab|eva\nroot|root")
elif name == "sacctmgr" and "withassoc" in sys.argv:
    (user,) = [word.removeprefix("name=") for word in sys.argv if word.startswith("name=")]
    lines = text_of("associations").splitlines()
    print("".join(f"{line}\n" for line in lines if line.startswith(f"{user}|")), end="")
elif name == "sacctmgr" and {"account", "association", "user"} & set(sys.argv):
    # As 24.11 answers.
    accounts = values_of("accounts.json")
    rest = [word for word in sys.argv[1:] if not word.startswith("--")]
    action, what, rest = rest[0], rest[1], rest[2:]
    values = dict(word.split("=", 1) for word in rest if "=" in word)
    requested = values.get("account", values.get("name", "")).split(",")
    if action == "show" and what == "account":
        for account, about in accounts.items():
            if "name" not in values or account in requested:
                print(f"{account}|{about['organization']}")
    elif action == "show" and "user" in values:
        for account, about in accounts.items():
            print("".join(f"{account}\n" for user in about["users"] if user[0] == values["user"]), end="")
    elif action == "show":
        for account in requested:
            limits = accounts[account]["limits"]
            wall = limits.get("MaxWall", "")
            wall = f"{int(wall) // 60:02}:{int(wall) % 60:02}:00" if wall else ""
            group = [limits.get(key, "") for key in ("GrpTRES", "GrpJobs")]
            print("|".join([account, "", "", "", *group, wall, limits.get("GrpTRESMins", "")]))
            for user, partition, most in accounts[account]["users"]:
                print("|".join([account, user, partition, most, "", "", wall, ""]))
    elif action == "add" and what == "account":
        if rest[0] in accounts:
            sys.exit(f" Already existing account {rest[0]}")
        accounts[rest[0]] = {"organization": values["organization"], "limits": {}, "users": []}
    elif action == "add":
        accounts[values["account"]]["users"].append([rest[0], values.get("partition", ""), ""])
    elif action == "modify" and what == "account":
        limits = accounts[values["name"]]["limits"]
        for key in values.keys() - {"name", "cluster"}:
            before = dict(part.split("=") for part in limits.get(key, "").split(",") if "=" in part)
            if "=" in values[key]:
                before |= dict(part.split("=") for part in values[key].split(","))
                limits[key] = ",".join(f"{kind}={most}" for kind, most in before.items() if most != "-1")
            else:
                limits[key] = values[key].replace("-1", "")
    elif action == "modify":
        for association in accounts[values["account"]]["users"]:
            if association[0] == values["name"]:
                association[2] = values["MaxSubmitJobs"].replace("-1", "")
    elif action == "delete":
        if any(job["u"] == values["name"] and job.get("a") == values["account"] for job in jobs):
            sys.exit(" Error with request: Job(s) active, cancel job(s) before remove")
        users = accounts[values["account"]]["users"]
        accounts[values["account"]]["users"] = [
            association
            for association in users
            if association[:2] != [values["name"], values.get("partition", "")]
        ]
    save("accounts.json", accounts)
elif name == "sacctmgr":
    number, text = sys.argv[-3].removeprefix("jobid="), sys.argv[-1].removeprefix("AdminComment=")
    accounted = values_of("accounting.json")
    for line in accounted:
        if str(line.get("JobIDRaw")) == number:
            line["AdminComment"] = text
    save("accounting.json", accounted)
elif name == "scontrol" and (
    word := [
        argument
        for argument in sys.argv
        if argument.startswith("ReservationName=") and not argument.endswith("=")
    ]
):
    # As 24.11 answers: whole nodes are reserved, and a reservation that jobs use is not deleted.
    from datetime import UTC, datetime

    lines = text_of("reservations").splitlines()
    existing = [line for line in lines if line.startswith(word[0] + " ")]
    values = dict(word.split("=") for word in sys.argv[2:] if "=" in word)
    now = datetime.now(UTC)
    for key in {"StartTime", "EndTime"} & set(values):
        moment = now if values[key] == "now" else datetime.fromisoformat(values[key]).replace(tzinfo=UTC)
        values[key] = str(int(moment.timestamp()))
    if sys.argv[1] != "create" and not existing:
        sys.exit("slurm_update error: Requested reservation is invalid")
    if sys.argv[1] == "delete" and any(job.get("v") == values["ReservationName"] for job in jobs):
        sys.exit(f"delete_reservation {word[0]}: Requested reservation is in use")
    before = dict(part.split("=", 1) for part in existing[0].split()) if existing else {}
    if "StartTime" in values and before and int(before["StartTime"]) <= now.timestamp():
        sys.exit("slurm_update error: Reservation already started")
    lines = [line for line in lines if line not in existing]
    if sys.argv[1] != "delete":
        after = before | values | {"TRES": "cpu=8", "Flags": "SPEC_NODES"}
        lines.append(" ".join(f"{key}={value}" for key, value in after.items()))
    write("reservations", "".join(line + "\n" for line in lines))
elif (
    name == "scontrol"
    and sys.argv[1:2] == ["update"]
    and any(argument.startswith("State=") for argument in sys.argv)
):
    pass  # the call is on record
elif name == "scontrol" and sys.argv[1] == "update" and "ReservationName=" in sys.argv:
    (job,) = [job for job in jobs if f"JobId={job['A']}" in sys.argv]
    job["v"] = "(null)"
    save("jobs.json", jobs)
elif name == "scontrol" and sys.argv[1] == "update" and "NodeName=" in sys.argv[2]:
    import re

    values = dict(word.split("=") for word in sys.argv[2:])
    lines = text_of("nodes").splitlines()
    for number, line in enumerate(lines):
        if line.startswith(f"NodeName={values['NodeName']} "):
            line = re.sub(r" AvailableFeatures=\S+", "", line)
            lines[number] = f"{line.rstrip()} AvailableFeatures={values['AvailableFeatures']} "
    write("nodes", "".join(line + "\n" for line in lines))
elif name == "scontrol" and sys.argv[1] == "update" and any(word.startswith("Prefer=") for word in sys.argv):
    pass
elif name == "scontrol" and sys.argv[1] == "update":
    values = dict(word.split("=") for word in sys.argv[2:])
    (job,) = [job for job in jobs if str(job["A"]) == values["JobId"]]
    job["l"] = f"{values['TimeLimit']}:00"
    save("jobs.json", jobs)
elif name == "scontrol" and (requested := {"reservation", "assoc_mgr", "licenses"} & set(sys.argv)):
    known = {"reservation": "reservations", "assoc_mgr": "limits"}.get(word := requested.pop(), word)
    sys.stdout.write(text_of(known, "No reservations in the system\n"))
elif name == "scontrol" and "config" in sys.argv:
    sys.stdout.write(text_of("config", "AccountingStorageEnforce = none\n"))
elif name == "scontrol" and "job" in sys.argv:
    print(text_of("jobs.json"))
elif name == "scontrol":
    sys.stdout.write(text_of("nodes" if "node" in sys.argv else "partitions"))
elif name == "sbatch" and exists("most-nodes") and int(options["nodes"]) > int(text_of("most-nodes")):
    sys.exit("sbatch: error: QOSMaxNodePerUserLimit")
elif name == "sbatch" and "test-only" in options:
    print(
        "sbatch: Job 9 to start at 1795181538 using 1 processors on nodes n1 in partition gpu",
        file=sys.stderr,
    )
elif name == "sbatch" and options.get("prefer", "") not in text_of("nodes"):
    sys.exit("sbatch: error: Batch job submission failed: Invalid preferred feature specification")
elif name == "sbatch":
    number = 100 + len(jobs)
    job = {"A": number, "j": options["job-name"], "u": os.environ["USER"], "P": options["partition"]}
    job |= {"T": "PENDING", "r": "Resources", "D": options["nodes"], "b": options.get("gres", "N/A")}
    job |= {
        "C": options["cpus-per-task"],
        "m": options["mem"],
        "l": f"{options['time']}:00",
        "V": "1795181538",
    }
    job |= {"F": number, "K": options["array"]} if "array" in options else {}
    save("jobs.json", [*jobs, job | {"k": options["comment"]}])
    print(f"{number};carme")
elif name == "sinfo":
    hidden = text_of("private").split()
    print("\n".join({job["P"] for job in jobs} - set(hidden)))
elif name == "scancel":
    for job in jobs:
        if sys.argv[1] in (str(job["A"]), str(job.get("F")), f"{job.get('F')}_{job.get('K')}"):
            job["T"] = "CANCELLED"
    save("jobs.json", jobs)
