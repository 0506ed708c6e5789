"""Which section of the users' guides says more about a message.

A message's identifier is its template, as for its translation. The tests find a template that no code
makes any more (`tests/unit/carme/test_help.py`) and a section that no guide has.
"""

from __future__ import annotations

from carme.translation import Message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SECTIONS", "help_path"]

_FOLDER = "/help"

#: The templates that each section of `docs/users` helps with, as GUIDE#ANCHOR.
SECTIONS: dict[str, tuple[str, ...]] = {
    "sessions#start": (
        "The partition {partition_name!r} has {nodes}; {nodes_2} were requested.",
        "The nodes of partition {partition_name!r} have no GPUs; {requested} were requested.",
        "The partition {partition_name!r} has no GPUs of type {kind}; its types are: {kinds}.",
        "A node has at most {gpus} of type {kind}; {requested} were requested.",
        "A node has at most {gpus}; {requested} were requested.",
        "The partition {partition!r} has {nodes} with {gpus}; {wanted} were requested.",
        "A node of partition {partition_name!r} has at most {processors}; {cpus} were requested.",
        "A node of partition {partition_name!r} has at most {most_memory} MiB of memory; {memory} MiB were "
        "requested.",
        "No set of nodes of this partition can ever give what the job asks for.",
    ),
    "sessions#time": (
        "{what} lasts at most {limit}, not {asked}.",
        "The job asks for more time than its partition allows.",
        "The {what} reached its time limit{limit} and was ended; {again} with more time, or extend it next "
        "time before it ends.",
        "The {what} was stopped because nothing ran in it; {again} to continue.",
    ),
    "sessions#when-something-goes-wrong": (
        "The {what} ran out of memory{memory}; {again} with more memory, or load less at a time.",
        "The {what} ended with exit code {number}{early}; check the log and fix the problem, then {again}.",
        "The {what} was ended by signal {number}{early}; check the log and fix the problem, then {again}.",
    ),
    "sessions#a-shell-inside": ("Carme cannot find the address of the job's agent ({what}).",),
    "training": ("The training runtime is not installed here.",),
    "training#when-ranks-or-nodes-are-lost": (
        "One of its nodes failed and the {what} ended with it; {again}, it goes to nodes that work.",
        "Node {node} failed and the {what} ended with it; {again}, it goes to nodes that work.",
    ),
    "training#checkpoints": (
        "Slurm ended the {what} in favour of {other}; {again} and it waits for its turn.",
    ),
    "scaling#where-you-ask-for-gpus": (
        "The predicted efficiency is {efficiency}. Below {floor} this site asks for a reason.",
    ),
    "scaling#what-can-go-wrong": (
        "The probe's result has no prediction for {what}.",
        "{file} has no predictions.",
        "{file} is a result of version {version}, and this site reads versions {oldest} to {newest}.",
    ),
    "projects#accounts-and-qos-of-slurm": (
        "Slurm's accounting allows {holder} at most {most}.",
        "The job would exceed a limit of your account or quality of service.",
        "The job would exceed the limit that {owner} has on {thing} for {over}{detail}; it starts when your "
        "other jobs under it have ended, or never if it asks for more than the limit, so end one of them or "
        "ask for less.",
        "Slurm does not let you use this account in this partition.",
        "Slurm does not let you use this quality of service.",
    ),
    "bookings#book": (
        "The booking costs {cost} GPU-hours, but you have only {left} left of the {most} "
        "that you may book in {days}.",
        "A booking lasts at most {longest_minutes}, not {minutes}.",
        "A booking must be made at least {notice} before it begins.",
        "A booking can begin at most {days} ahead.",
        "You have {count} booking in partition {partition!r} that is not over; {allowed}.",
        "{taken} is not free for the whole time, {when}.",
        "No node with {gpus} of type {gpu_type} is free for the whole time, {when}.",
    ),
    "bookings#for-a-project": (
        "The booking costs {cost} GPU-hours, but the project {project!r} has only {left} "
        "left of the {most} that it may book in {days}.",
        "The project {project!r} has {count} booking in partition {partition!r} that is not over; {allowed}.",
    ),
    "bookings#use-it": (
        "You may not use this booking.",
        "There is no such booking (any more), or it is not for this partition.",
        "The job waits for its booking and starts when the booking begins{detail}; to start now, choose no "
        "booking.",
    ),
    "bookings#change-shorten-delete": ("The booking has begun, so its start cannot change any more.",),
    "data#data-for-jobs-and-sessions": (
        "{part!r} cannot be staged: it {why}.",
        "{part!r} names the target {target!r}; there are: {targets}.",
        "This site has no scratch for staging.",
        "This site has no BeeOND for staging.",
        "There is not enough space for {wanted} in {folder}: you have {free} free, and the "
        "copies there are in use.",
        "{wanted} are more than copies may take here ({limit}).",
        "The data of the {what} could not be copied to {where}; check its log for the reason, then {again}.",
    ),
    "data#what-you-can-rely-on": ("{source} cannot be copied: {path}: {reason}{more}.",),
    "data#datasets": ("There is no dataset {name!r}; there are: {names}.",),
    "images#build-one": ("An image is built either from requirements or from a definition.",),
    "images#use-it": (
        "There is no image {name!r}; there are: {names}.",
        "The image {image} is missing on {where}; choose another one, or ask an administrator to distribute "
        "it.",
        "The image {image} has changed since it was built, or you may not read it; choose "
        "another one, or build it again and {again}.",
    ),
    "files#your-quota": (
        "Your quota is used up, so {name!r} does not fit.",
        "{path} is full ({words}): nothing can be written there, {what}.",
        "Your home directory is not writable on {where}; check that it is yours and has "
        "space left, or tell an administrator that it is not mounted there.",
    ),
}
_SECTION = {template: section for section, templates in SECTIONS.items() for template in templates}


def help_path(text: str) -> str:
    """The page of a portal that says more about a message, like `/help/data/#options`; empty for none.

    Args:
        text: A message, or one that has such a message among its values.
    """
    section = next((_SECTION[template] for template in _templates(text) if template in _SECTION), "")
    guide, mark, anchor = section.partition("#")
    return f"{_FOLDER}/{guide}/{mark}{anchor}" if guide else ""


def _templates(text: object) -> Iterator[str]:
    """The templates of a message and of those within it, from outside in."""
    if isinstance(text, Message):
        yield text.template
        for value in text.values.values():
            yield from _templates(value)
