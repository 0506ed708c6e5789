"""The command `carme-remote`: run a command on another node of the job, as `ssh HOST COMMAND` would.

For programs that start something on other nodes by a command like ssh, as MPI's launchers do. The command is
a line for the shell, as with ssh; it gets the caller's variables, but for those that describe a node.
"""

import asyncio
import os
import signal
import sys

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.fabric.client import Fabric, connect
from carme_runtime.fabric.members import Member
from carme_runtime.ranks import without_secrets

FAILED = 255  # as with ssh
JOIN_SECONDS = 60.0
SSH_OPTIONS_WITH_VALUE = tuple("BbcDEeFIiJLlmOopQRSWw")
USAGE = "Usage: carme-remote HOST COMMAND ..."


def main() -> None:
    """Run it; see the module."""
    try:
        host, command = parse(sys.argv[1:])
        code = asyncio.run(_run(host, command))
    except CarmeRuntimeError as error:
        print(f"carme-remote: {error}", file=sys.stderr)
        code = FAILED
    sys.exit(code)


def parse(arguments: list[str]) -> tuple[str, str]:
    """The host and the line for its shell; options of ssh before them say nothing here."""
    index = 0
    while index < len(arguments) and arguments[index].startswith("-"):
        word = arguments[index]
        index += 2 if len(word) == 2 and word[1] in SSH_OPTIONS_WITH_VALUE else 1
    if len(arguments) < index + 2:
        raise CarmeRuntimeError("A host and a command are needed.", f"{USAGE}.")
    return arguments[index].rpartition("@")[2], " ".join(arguments[index + 1 :])


async def _run(host: str, command: str) -> int:
    fabric = await connect(os.environ)
    try:
        member = await _find(fabric, host)
        environment = without_secrets(os.environ)
        own = {"CARME_ADDRESS": member.address, "CARME_KEY_FILE": member.key_file} if fabric.in_job else {}
        request = {
            "type": "start",
            "command": ["/bin/sh", "-c", command],
            "cwd": "/",  # the command says itself where it works
            "environment": environment,
            "ranks": [{"rank": 0, "environment": own}],
        }
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, fabric.send, member.number, {"type": "stop"})
        fabric.send(member.number, request)
        return await _follow(fabric, member)
    finally:
        await fabric.close()


async def _find(fabric: Fabric, host: str) -> Member:
    """The node that is called so, once it has joined."""
    end = asyncio.get_running_loop().time() + JOIN_SECONDS
    while True:
        for member in fabric.members.present:
            if (
                host in (member.host, member.address)
                or host.partition(".")[0] == member.host.partition(".")[0]
            ):
                return member
        waiting = len(fabric.members.present) + len(fabric.members.lost) < fabric.members.expected
        left = end - asyncio.get_running_loop().time()
        if not waiting or left <= 0:
            present = ", ".join(member.host for member in fabric.members.present)
            raise CarmeRuntimeError(
                f"'{host}' is not a node of this job, whose nodes are: {present}.", "Name one of them."
            )
        try:
            await asyncio.wait_for(fabric.next_event(), left)
        except asyncio.TimeoutError:
            continue


async def _follow(fabric: Fabric, member: Member) -> int:
    code = FAILED
    while True:
        event = await fabric.next_event()
        if event.gone or member.number not in {each.number for each in fabric.members.present}:
            raise CarmeRuntimeError(f"The agent of {member.host} was lost.", "See whether the node is down.")
        if event.node != member.number:
            continue
        content = event.content
        if content["type"] == "refused":
            raise CarmeRuntimeError(content["message"], "See whether the node is well.")
        if content["type"] == "output":
            stream = sys.stdout if content["stream"] == 1 else sys.stderr
            stream.write(content["text"])
            stream.flush()
            fabric.send(member.number, {"type": "more", "bytes": content["bytes"]})
        elif content["type"] == "exit":
            code = content["code"] if content["code"] >= 0 else 128 - content["code"]
        elif content["type"] == "over":
            return code


if __name__ == "__main__":
    main()
