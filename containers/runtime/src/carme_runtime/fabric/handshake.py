"""How two agents of a job prove to each other that they hold the job's key, without showing it.

Both send a random challenge; each answers with an HMAC-SHA256 over both challenges and its own
role. The role in the MAC makes a mirrored answer worthless. The keys that seal all later frames
come from the same challenges, one key per direction.
"""

import hashlib
import hmac
import secrets
import stat
from pathlib import Path

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.fabric.frames import FrameError, Link, Message

PROTOCOL = "carme-fabric-1"
MINIMUM_KEY_BYTES = 16


class WrongKey(Exception):
    """The peer does not hold the key of this job."""


def read_key(path: Path) -> bytes:
    """The key in `path`, which must be readable by its owner alone and hold at least 16 bytes."""
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise CarmeRuntimeError(
                f"The key file {path} is open to other users, it must be readable by its owner alone.",
                f"Make a new key, and use: chmod 600 {path}",
            )
        key = path.read_bytes().strip()
    except OSError as error:
        raise CarmeRuntimeError(
            f"The key file {path} cannot be read: {error.strerror}.", "Give --key-file the job's key."
        ) from None
    if len(key) < MINIMUM_KEY_BYTES:
        raise CarmeRuntimeError(
            f"The key file {path} holds {len(key)} bytes, a key has {MINIMUM_KEY_BYTES} or more.",
            "Write 64 random hex digits into it.",
        )
    return key


async def join(link: Link, key: bytes) -> None:
    """The joining agent's side. Raises WrongKey, FrameError or LinkClosed."""
    mine = secrets.token_bytes(32)
    link.send({"protocol": PROTOCOL, "challenge": mine.hex()})
    answer = await link.receive()
    challenges = mine + _challenge(answer)
    _check(answer, _mac(key, "first", challenges))
    link.send({"proof": _mac(key, "joining", challenges).hex()})
    link.seal(sending=_mac(key, "from joining", challenges), receiving=_mac(key, "from first", challenges))


async def admit(link: Link, key: bytes) -> None:
    """The first agent's side. Raises WrongKey, FrameError or LinkClosed."""
    greeting = await link.receive()
    if greeting.get("protocol") != PROTOCOL:
        raise FrameError("a greeting of another protocol")
    mine = secrets.token_bytes(32)
    challenges = _challenge(greeting) + mine
    link.send({"challenge": mine.hex(), "proof": _mac(key, "first", challenges).hex()})
    _check(await link.receive(), _mac(key, "joining", challenges))
    link.seal(sending=_mac(key, "from first", challenges), receiving=_mac(key, "from joining", challenges))


def _mac(key: bytes, purpose: str, challenges: bytes) -> bytes:
    return hmac.new(key, f"{PROTOCOL}\0{purpose}\0".encode() + challenges, hashlib.sha256).digest()


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
