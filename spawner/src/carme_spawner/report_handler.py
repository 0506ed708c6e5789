"""How the hub takes what the servers of sessions report."""

from typing import TypeVar, cast

from jupyterhub.apihandlers import APIHandler
from jupyterhub.user import User
from pydantic import ValidationError
from tornado import web

from carme_spawner.names import name_pattern
from carme_spawner.reports import Report
from carme_spawner.spawner import CarmeSpawner

__all__ = ["LONGEST_REPORT", "ReportHandler"]

#: Bytes that a report has at most.
LONGEST_REPORT = 4096

R = TypeVar("R", bound=Report)


class ReportHandler(APIHandler):
    """Takes a server's report about itself: whose it is, the request's token and certificate say."""

    def own_spawner(self) -> CarmeSpawner:
        """The spawner whose server holds the token and the certificate of this request."""
        token, user = self.get_token(), self.current_user
        if token is not None and isinstance(user, User):
            for spawner in list(user.spawners.values()):
                if spawner.token_id == token.id and name_pattern(spawner.identity) in self.peer_names():
                    return cast(CarmeSpawner, spawner)
        raise web.HTTPError(
            403, "Only the server of a session may report, about itself, with its own token and certificate."
        )

    def peer_names(self) -> list[str]:
        """What the connection's certificate is good for; behind the proxy it is the proxy's."""
        certificate = self.request.get_ssl_certificate()
        names = certificate.get("subjectAltName", ()) if isinstance(certificate, dict) else ()
        return [str(value) for kind, value in names if kind == "DNS"]  # pyright: ignore  untyped

    def report(self, model: type[R]) -> R:
        """The body of the request, as the model says."""
        body = self.request.body
        try:
            if len(body) > LONGEST_REPORT:
                raise web.HTTPError(
                    400, f"A server's report has at most {LONGEST_REPORT} bytes, this one has {len(body)}."
                )
            return model.model_validate_json(body)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "body"
            raise web.HTTPError(
                400,
                f"The report must be JSON with {', '.join(model.model_fields)}, and nothing else. "
                f"Correct {where}: {first['msg']}.",
            ) from None
