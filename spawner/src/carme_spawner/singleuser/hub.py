"""What the server reports to the hub, and what the hub answers."""

import asyncio
import json
import os
from typing import Any

from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest

from carme.translation import Message
from carme_spawner.singleuser.certificates import Certificates

#: Seconds until an unanswered call counts as failed.
ANSWER_SECONDS = 20
#: Seconds for which the server tries to reach a hub that is down, before it gives its nodes back.
PATIENCE = 600.0
FIRST_DELAY, LONGEST_DELAY = 0.2, 5.0


class Refused(Exception):
    """The hub refused; the text is its sentence, a `Message` where the hub has one."""


class Unanswered(Exception):
    """The hub is down, restarts, or has a fault of its own."""


class Hub:
    """The hub, as this server may talk to it: with its own token and, where there is one, its certificate."""

    def __init__(self, certificates: Certificates | None) -> None:
        self._url = os.environ["JUPYTERHUB_API_URL"]
        self._tls: dict[str, Any] = {}
        if certificates:
            self._tls = {
                "client_key": str(certificates.key),
                "client_cert": str(certificates.certificate),
                "ca_certs": str(certificates.authority),
            }

    async def post(self, what: str, content: dict[str, Any]) -> dict[str, Any]:
        """Post to `carme/WHAT`; the answer.

        Raises:
            Refused, Unanswered.
        """
        request = HTTPRequest(
            f"{self._url}/carme/{what}",
            method="POST",
            headers={
                "Authorization": f"token {os.environ['JUPYTERHUB_API_TOKEN']}",
                "Content-Type": "application/json",
            },
            body=json.dumps(content),
            request_timeout=ANSWER_SECONDS,
            **self._tls,
        )
        try:
            response = await AsyncHTTPClient().fetch(request)
            return json.loads(response.body) if response.body else {}
        except HTTPClientError as error:
            answer = error.response.body.decode(errors="replace") if error.response else ""
            if 400 <= error.code < 500:
                raise Refused(_message(answer)) from None
            raise Unanswered(f"{error} {answer}".strip()) from None
        except (OSError, ValueError) as error:
            raise Unanswered(str(error)) from None

    async def announce(self, report: dict[str, Any], patience: float = PATIENCE) -> None:
        """Post to `carme/ready` until the hub has taken it; a hub that restarts is waited for.

        Raises:
            Refused: The hub does not want this server.
            Unanswered: It was not there for `patience` seconds.
        """
        loop = asyncio.get_running_loop()
        deadline, delay = loop.time() + patience, FIRST_DELAY
        while True:
            try:
                await self.post("ready", report)
                return
            except Unanswered:
                if loop.time() > deadline:
                    raise
            await asyncio.sleep(delay)
            delay = min(delay * 2, LONGEST_DELAY)


def _message(answer: str) -> str:
    """The sentence in an error's body, which keeps what it was made of where the hub says so."""
    try:
        body = json.loads(answer)
        found = body["message"]
    except (ValueError, KeyError, TypeError):
        return answer
    return Message.of_parts(body.get("parts")) or str(found)
