"""`carme submit`."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from carme.broker import BrokerClient
from carme.cli import portal, predictions
from carme.cli.datasets import datasets
from carme.cli.output import moment, print_json
from carme.cli.parsing import take_program
from carme.command_line import (
    add_account,
    add_data,
    add_image,
    add_json,
    add_qos,
    add_reservation,
    add_share,
    add_size,
    add_time,
)
from carme.config import load
from carme.errors import CarmeError, InvalidRequest, SlurmError
from carme.images.catalogue import ImageCatalogue
from carme.images.user_images import is_own
from carme.jobs import JobRequest, arrays, minutes_text, parse_minutes, parse_stages, stage_words
from carme.jobs.contents import from_bytes
from carme.jobs.directives import directives
from carme.jobs.scripts import MAXIMUM_BYTES, check_start, interpreter, name_of
from carme.jobs.templates import TEMPLATES
from carme.projects import account_of
from carme.storage import space_of
from carme.translation import message as _
from carme.wording import size

_EPILOG = """\
examples:
  carme submit train.sh
  carme submit train.sh --gpus 2 --time 2h
  carme submit train.sh data.csv -- --epochs 3
  carme submit --gpus 2 --time 2h -- python train.py --epochs 3
  carme submit --stage imagenet --results results -- python train.py
  carme submit --array 0-9%2 -- sh -c 'echo task $SLURM_ARRAY_TASK_ID'
  carme submit --image torch --nodes 2 --gpus 1 -- carme-run train.py
  carme submit --template jax --nodes 4 train.py
  carme submit --template torch --nodes 4 --scaling scale.json train.py
"""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser(
        "submit",
        help="start a job",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="carme submit [options] SCRIPT [options] [ARGS ...] [-- ARGS ...]\n"
        "       carme submit [options] -- COMMAND [ARGS ...]",
    )
    parser.add_argument(
        "--template",
        type=_template,
        choices=tuple(TEMPLATES),
        help="start the script, or the program after --, by carme-run --backend over the job's nodes; in "
        "the site's image of that name, or else its default one, with the template's nodes and GPUs, unless "
        "you say otherwise",
    )
    add_image(parser, "image to run in (default: no image, on the host)")
    add_size(parser)
    parser.set_defaults(nodes=None, gpus=None)  # not given: the script's own lines count
    add_share(parser)
    add_time(parser, "how long it may run")
    paying = parser.add_mutually_exclusive_group()
    add_account(paying, "account that pays (default: yours); see 'carme accounts'")
    paying.add_argument("--project", metavar="NAME", help="project of yours that pays")
    add_qos(parser)
    add_reservation(parser)
    add_data(parser, "the job")
    parser.add_argument(
        "--array",
        metavar="TASKS",
        help="one job for each of these tasks, like 0-99, 1,3,5 or 0-99%%4 (four at a time); a task finds "
        "its number in $SLURM_ARRAY_TASK_ID",
    )
    predictions.add(parser)
    parser.add_argument("--name", help="name of the job (default: the command's)")
    add_json(parser)
    take_program(parser, "script")
    parser.set_defaults(run=_submit, parser=parser)


def _read_script(options: argparse.Namespace) -> None:
    """Take from the script's `#SBATCH` lines what the command line does not say.

    Raises:
        InvalidRequest: A line cannot be understood.
    """
    options.workdir = None
    given = options.command
    if given and given[0] != "--" and Path(given[0]).is_file():
        try:
            with Path(given[0]).open("rb") as file:
                text = from_bytes(file.read(MAXIMUM_BYTES))
        except OSError:
            text = ""  # what uses it says so
        requested, ignored = directives(text.removeprefix("\ufeff"))
        if options.project:
            requested.pop("account", None)
        for name, value in requested.items():
            if getattr(options, name) is None:
                setattr(options, name, value)
        if ignored:
            print(
                f"carme: {given[0]} asks by #SBATCH for what carme submit does not have, which is ignored: "
                f"{', '.join(ignored)}.",
                file=sys.stderr,
            )
    template = TEMPLATES.get(options.template)
    nodes, gpus = (template.nodes, template.gpus_per_node) if template else (1, 0)
    options.nodes = nodes if options.nodes is None else options.nodes
    options.gpus = gpus if options.gpus is None else options.gpus


def _submit(options: argparse.Namespace) -> int:
    _read_script(options)
    if options.choices:
        return predictions.show(options, None if portal.is_remote() else _expected_start(options))
    if portal.is_remote():
        return _submit_remotely(options)
    if options.template and options.image is None:
        images = load().images
        names = ImageCatalogue(images.directory).names()
        options.image = TEMPLATES[options.template].image(names, images.default)
    if is_own(options.image):
        return _submit_in_own_image(options)
    command = _command(options)
    minutes = parse_minutes(options.time) if options.time else load().sessions.default_minutes
    request = JobRequest.read(
        {
            "name": options.name or name_of(options.template or command[0]),
            "kind": "batch",
            "image": options.image,
            "command": command,
            "partition": options.partition,
            "account": account_of(options.project) if options.project else options.account,
            "qos": options.qos,
            "nodes": options.nodes,
            "gpus_per_node": options.gpus,
            "gpu_type": options.gpu_type,
            "cpus_per_node": options.cpus,
            "memory_mb_per_node": options.memory,
            "minutes": minutes,
            "reservation": options.reservation,
            "array": options.array,
            "stage": parse_stages(options.stage, datasets()) if options.stage else [],
            "results": str(Path(options.results).absolute()) if options.results else None,
            "workdir": _workdir(options),
            "prediction": predictions.read_prediction(options),
        }
    )
    _check_room(request.results)
    return _print_submitted(options, BrokerClient().submit(request), f", for {minutes_text(minutes)} at most")


def _expected_start(options: argparse.Namespace) -> Callable[[int, int], str]:
    """Says when a job like this would start with other nodes, and GPUs of each."""
    minutes = parse_minutes(options.time) if options.time else load().sessions.default_minutes
    requested = {
        "name": "choices",
        "kind": "batch",
        "command": ["true"],
        "partition": options.partition,
        "account": account_of(options.project) if options.project else options.account,
        "qos": options.qos,
        "gpu_type": options.gpu_type,
        "cpus_per_node": options.cpus,
        "memory_mb_per_node": options.memory,
        "minutes": minutes,
        "reservation": options.reservation,
    }

    def start(nodes: int, gpus: int) -> str:
        request = JobRequest.read({**requested, "nodes": nodes, "gpus_per_node": gpus})
        try:
            return moment(BrokerClient().test(request).start)
        except (InvalidRequest, SlurmError) as error:
            if error.code == "slurm-away":
                raise
            return predictions.NOT_POSSIBLE  # such as a limit of the account, which smaller choices keep

    return start


def _check_room(results: str | None) -> None:
    """Refuse what would die of a quota, and say what soon may. Raises CarmeError."""
    places = {str(Path.home()): "not even the job's log"}
    if results:
        # The folder itself may come with the results.
        above = next((folder for folder in (Path(results), *Path(results).parents) if folder.is_dir()), None)
        places.setdefault(str(above or "/"), "no results")
    for path, what in places.items():
        try:
            space = space_of(path)
        except OSError:
            continue  # the job says what is wrong with it
        quota = space.quota
        words = f"{size(space.free)} free"
        if quota is not None and quota.share is not None:
            words = f"{int(quota.share * 100)} % of your quota used, {size(space.left)} left"
        if space.level == "full":
            raise InvalidRequest(
                _(
                    "{path} is full ({words}): nothing can be written there, {what}.",
                    path=path,
                    words=words,
                    what=what,
                ),
                _("Delete what you do not need there, then submit again."),
                field="results" if path != str(Path.home()) else None,
            )
        if space.level == "near":
            print(
                f"carme: {path} is nearly full ({words}). Jobs fail when nothing can be written.",
                file=sys.stderr,
            )


def _print_submitted(options: argparse.Namespace, job_id: int, limit: str = "") -> int:
    if options.json:
        print_json({"job_id": job_id})
    elif options.array:
        print(f"The tasks of array {job_id} are in the queue{limit and limit + ' each'}.")
        first = next(arrays.numbers(options.array))
        print(f"Follow what one of them writes with: carme logs -f {arrays.task_name(job_id, first)}")
        print(f"End them all with: carme cancel {job_id}")
    else:
        print(f"Job {job_id} is in the queue{limit}.")
        print(f"Follow what it writes with: carme logs -f {job_id}")
        print(f"End it with: carme cancel {job_id}")
    return 0


def _submit_in_own_image(options: argparse.Namespace) -> int:
    """Through the portal, which alone knows users' own images and who may use them."""
    stages = parse_stages(options.stage, datasets()) if options.stage else []
    results = str(Path(options.results).absolute()) if options.results else None
    words = stage_words(stages)
    return _through_portal(options, _command(options), [], words, results, _workdir(options))


def _workdir(options: argparse.Namespace) -> str:
    # No links resolved: the path must hold on the nodes.
    return os.path.join(os.getcwd(), options.workdir or "")  # noqa: PTH109, PTH118


def _submit_remotely(options: argparse.Namespace) -> int:
    """A script of this computer is sent along; a command must be one of the cluster's."""
    given: list[str] = options.command
    if not given or given == ["--"]:
        options.parser.error("name a script, or a command after --")
    if options.results and not options.results.startswith("/"):
        raise InvalidRequest(
            _(
                "From this computer the results need an absolute path, not {results!r}.",
                results=options.results,
            ),
            _("Name a folder of the cluster, like /scratch/me/results."),
            field="results",
        )
    if options.template:
        given = _remote_template(options, given)
    what: Path | list[str] = given[1:] if given[0] == "--" else Path(given[0])
    arguments = [] if isinstance(what, list) else given[1:]
    return _through_portal(
        options, what, arguments, options.stage, options.results, _absolute(options.workdir)
    )


def _template(word: str) -> str:
    """The name of a template, as the command line has it."""
    if word in TEMPLATES:
        return word
    from carme.wording import nearest

    sentence, known = (
        f"there is no template {word!r}. {nearest(word, TEMPLATES)}",
        ", ".join(sorted(TEMPLATES)),
    )
    raise argparse.ArgumentTypeError(sentence if known in sentence else f"{sentence} Choose from: {known}.")


def _remote_template(options: argparse.Namespace, given: list[str]) -> list[str]:
    """The command that a template makes of a program of the cluster."""
    if given[0] != "--":
        raise InvalidRequest(
            _(
                "From this computer, --template starts only files of the cluster, but {given!r} is "
                "on this computer.",
                given=given[0],
            ),
            _(
                "Copy it there, and name it after --: carme submit --template {template} --image NAME -- "
                "/home/me/train.py",
                template=options.template,
            ),
            field="template",
        )
    if options.image is None:
        raise InvalidRequest(
            _("From this computer --template needs the name of an image."),
            _("Add --image NAME; the portal's pages list the images."),
            field="image",
        )
    options.name = options.name or options.template
    return ["--", *TEMPLATES[options.template].command(given)]


def _absolute(path: str | None) -> str | None:
    """A folder that a script names, if it means one of the cluster's."""
    return path if path and path.startswith("/") else None


def _through_portal(
    options: argparse.Namespace,
    what: Path | list[str],
    arguments: list[str],
    stage: list[str],
    results: str | None,
    workdir: str | None = None,
) -> int:
    with portal.client() as site:
        from carme.client import JobOptions  # it is installed, or there would be no client

        requested = JobOptions(
            gpus=options.gpus,
            nodes=options.nodes,
            minutes=parse_minutes(options.time) if options.time else None,
            gpu_type=options.gpu_type,
            cpus=options.cpus,
            memory_mb=options.memory,
            image=options.image,
            name=options.name,
            partition=options.partition,
            account=account_of(options.project) if options.project else options.account,
            qos=options.qos,
            reservation=options.reservation,
            workdir=workdir,
            stage=stage,
            results=results,
            prediction=predictions.read_prediction(options),
        )
        if options.array:
            job_id = site.array(what, options.array, *arguments, **requested).id
        else:
            job_id = site.submit(what, *arguments, **requested).id
    assert job_id is not None
    return _print_submitted(options, job_id)


def _command(options: argparse.Namespace) -> list[str]:
    """The command after `--`, or a script of the user's with its arguments."""
    given: list[str] = options.command
    template = TEMPLATES.get(options.template)
    if given and given[0] == "--":
        given = given[1:]
        if not given:
            options.parser.error("there is no command after --")
        return template.command(["--", *given]) if template else given
    if not given:
        options.parser.error("name a script, or a command after --")
    script = Path(given[0])
    if not script.is_file():
        raise InvalidRequest(
            _("There is no script {given!r}.", given=given[0]),
            _("Name a file, or put a command after --, like: carme submit -- hostname"),
            field="command",
        )
    try:
        with script.open("rb") as file:
            first = file.read(4096)
    except OSError as error:
        raise CarmeError(
            _("The script {given!r} cannot be read: {why}.", given=given[0], why=error.strerror),
            _("Make it readable."),
        ) from None
    if template:
        return template.command([str(script.absolute()), *given[1:]])
    check_start(given[0], first)
    path = str(script.absolute())
    if first.startswith(b"#!") and b"\r" not in first.partition(b"\n")[0] and os.access(script, os.X_OK):
        return [path, *given[1:]]
    return [*interpreter(first), path, *given[1:]]
