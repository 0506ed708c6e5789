"""A small OpenID Connect provider, real but for the people: it signs in each visitor without a question."""

import base64
import hashlib
import json
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import RSAKey

CLIENT = "portal"
SECRET = "secret-of-the-portal"


class Provider:
    """A provider. `claims`: what its next token says; `change`: what it then does wrong.

    As a provider must, it takes a code once, with the verifier of the challenge that the code was given for.

    Args:
        back: The one address to which it sends browsers back.
        addresses: Where it listens, all at the same port; it is the first that it goes by.
        port: That port; 0: one that is free.
    """

    def __init__(self, back: str, addresses: Sequence[str] = ("127.0.0.1",), port: int = 0) -> None:
        self.back = back
        self.keys = {name: RSAKey.generate_key(2048, {"kid": "1"}) for name in ("own", "foreign")}
        self.claims: dict[str, Any] = {"sub": "u-1", "preferred_username": "alice"}
        self.change: dict[str, Any] = {}
        self.key = "own"
        self.codes: dict[str, dict[str, str]] = {}
        self.down = False
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                address = f"{provider.issuer}{self.path}"
                if urlsplit(self.path).path == "/authorize":
                    self.send_response(302)
                    self.send_header("Location", f"{provider.back}?{urlencode(provider.authorize(address))}")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                else:
                    self.reply(*provider.get(urlsplit(self.path).path))

            def do_POST(self) -> None:
                sent = self.rfile.read(int(self.headers["Content-Length"])).decode()
                form = {key: values[0] for key, values in parse_qs(sent).items()}
                self.reply(*provider.token(form, self.headers.get("Authorization", "")))

            def reply(self, status: int, answer: Any) -> None:
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *_: Any) -> None:
                """Nothing."""

        first = ThreadingHTTPServer((addresses[0], port), Handler)
        self.port = first.server_port
        further = [ThreadingHTTPServer((address, self.port), Handler) for address in addresses[1:]]
        self._servers = [first, *further]
        self.issuer = f"http://{addresses[0]}:{self.port}"
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def forwarder(self, gateway: str) -> tuple[str, ...]:
        """The program with which a host that knows us as `gateway` reaches it at its own loopback address."""
        address = f"TCP-LISTEN:{self.port},bind=127.0.0.1,fork,reuseaddr"
        return ("socat", address, f"TCP:{gateway}:{self.port}")

    def stop(self) -> None:
        """End the servers."""
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def get(self, path: str) -> tuple[int, Any]:
        if self.down:
            return 503, {}
        if path == "/keys":
            return 200, {"keys": [self.keys["own"].as_dict(private=False)]}
        return 200, {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/authorize",
            "token_endpoint": f"{self.issuer}/token",
            "jwks_uri": f"{self.issuer}/keys",
            "id_token_signing_alg_values_supported": ["RS256"],
        }

    def authorize(self, address: str) -> dict[str, str]:
        """Sign somebody in; return the query with which the browser is sent back."""
        sent = {key: values[0] for key, values in parse_qs(urlsplit(address).query).items()}
        assert address.startswith(f"{self.issuer}/authorize?")
        assert (sent["response_type"], sent["redirect_uri"]) == ("code", self.back)
        assert sent["code_challenge_method"] == "S256" and sent["code_challenge"] and sent["nonce"]
        code = f"code-{len(self.codes)}"
        self.codes[code] = sent
        return {"code": code, "state": sent["state"]}

    def token(self, form: dict[str, str], authorization: str) -> tuple[int, Any]:
        known = base64.b64decode(authorization.removeprefix("Basic ")).decode()
        requested = self.codes.pop(form.get("code", ""), None)
        digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        if known != f"{CLIENT}:{SECRET}" or requested is None or requested["code_challenge"] != challenge:
            return 400, {"error": "invalid_grant"}
        now = int(time.time())
        claims = {"iss": self.issuer, "aud": CLIENT, "iat": now, "exp": now + 60, "nonce": requested["nonce"]}
        claims |= self.claims | self.change
        claims = {name: value for name, value in claims.items() if value is not None}
        signed = jwt.encode({"alg": "RS256", "kid": "1"}, claims, self.keys[self.key])
        return 200, {"access_token": "a", "token_type": "Bearer", "id_token": signed}
