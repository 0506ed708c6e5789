"""`DELETE /api/carme/logins/NAME`: the portal signs a user out of the hub."""

import asyncio
from datetime import UTC, datetime
from typing import cast

from jupyterhub.apihandlers import APIHandler
from jupyterhub.orm import new_token
from jupyterhub.scopes import needs_scope
from tornado import web

from carme_spawner.spawner import CarmeSpawner


class LoginsHandler(APIHandler):
    """Ends a user's logins at the hub and at their servers; sessions and their own keys live on.

    What these logins have open at servers (kernels, terminals, apps) is closed. The body may say `before`
    (seconds since 1970): who signed in after that, while this was on its way, stays signed in.
    """

    @needs_scope("admin:users")
    async def delete(self, user_name: str) -> None:
        user = self.find_user(user_name)
        if user is None:
            raise web.HTTPError(404, f"The hub has no user {user_name}.")
        before = _moment((self.get_json_body() or {}).get("before"))
        # Cookies name their user by this.
        user.orm_user.cookie_id = new_token()
        for token in list(user.orm_user.api_tokens):
            # Browsers got these by logging in; the tokens of servers, and those made by hand, have no login.
            if token.session_id and token.created <= before:
                self.db.delete(token)
        self.db.commit()
        spawners = [cast(CarmeSpawner, spawner) for spawner in user.spawners.values() if spawner.ready]
        await asyncio.gather(*(spawner.report_sign_out() for spawner in spawners))
        self.set_status(204)


def _moment(seconds: object) -> datetime:
    """As the hub's database keeps times: UTC, and not saying so."""
    if seconds is None:
        return datetime.now(UTC).replace(tzinfo=None)
    try:
        if not isinstance(seconds, int | float):
            raise ValueError
        return datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None)
    except (ValueError, OverflowError, OSError):
        raise web.HTTPError(400, "'before' must be a time in seconds since 1970.") from None
