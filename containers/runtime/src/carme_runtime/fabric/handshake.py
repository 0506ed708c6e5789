"""How two agents of a job prove to each other that they hold the job's key (see `carme_runtime.key`).

The keys that seal all later frames come from the same challenges, one key per direction.
"""

import hmac
import secrets

from carme_runtime.fabric.frames import FrameError, Link, Message
from carme_runtime.key import proof

PROTOCOL = "carme-fabric-1"


class WrongKey(Exception):
    """The peer does not hold the key of this job."""


async def join(link: Link, key: bytes) -> None:
    """The joining agent's side. Raises WrongKey, FrameError or LinkClosed."""
    challenge = secrets.token_bytes(32)
    link.send({"protocol": PROTOCOL, "challenge": challenge.hex()})
    answer = await link.receive()
    challenges = challenge + _challenge(answer)
    _check(answer, _mac(key, "first", challenges))
    link.send({"proof": _mac(key, "joining", challenges).hex()})
    link.seal(sending=_mac(key, "from joining", challenges), receiving=_mac(key, "from first", challenges))


async def admit(link: Link, key: bytes) -> None:
    """The first agent's side. Raises WrongKey, FrameError or LinkClosed."""
    greeting = await link.receive()
    if greeting.get("protocol") != PROTOCOL:
        raise FrameError("a greeting of another protocol")
    challenge = secrets.token_bytes(32)
    challenges = _challenge(greeting) + challenge
    link.send({"challenge": challenge.hex(), "proof": _mac(key, "first", challenges).hex()})
    _check(await link.receive(), _mac(key, "joining", challenges))
    link.seal(sending=_mac(key, "from first", challenges), receiving=_mac(key, "from joining", challenges))


def _mac(key: bytes, purpose: str, challenges: bytes) -> bytes:
    return proof(key, PROTOCOL, purpose, challenges)


def _challenge(message: Message) -> bytes:
    return _bytes(message, "challenge")


def _check(message: Message, expected: bytes) -> None:
    if not hmac.compare_digest(_bytes(message, "proof"), expected):
        raise WrongKey


def _bytes(message: Message, name: str) -> bytes:
    try:
        value = bytes.fromhex(message[name])
    except (KeyError, TypeError, ValueError):
        raise FrameError(f"a greeting without a {name}") from None
    if len(value) != 32:
        raise FrameError(f"a greeting whose {name} has the wrong length")
    return value
